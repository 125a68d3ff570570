"""Conversion of a block to kernel operands.

Features are padded to whole tiles and split into bf16 terms that sum to them. Exponents are in base 2. Masked rows have
the shift +inf, so that their exponentials are 0.
"""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import BFloat16, Bool, Float, Float32, Int32

from infcl_jax.ops.pairwise.base import Array, round_up
from infcl_jax.ops.pairwise.kernel_api import LABEL_RANGE_ROWS, Kernels, Pairs, row_ranges

LOG2E = math.log2(math.e)
# Relative truncation error of similarities, per feature. Tensor cores truncate at every accumulation, so that
# similarities are too small. Measured on an H200: 0.75e-9 for random features, at most 2.1e-9 if one feature dominates.
TRUNCATION = 1e-9


@dataclasses.dataclass(frozen=True)
class Padded:
    """Features of a block in bf16 terms, padded to whole tiles.

    Attributes:
      x: `[rows, num_terms * width]`.
      y: `[columns, num_terms * width]`.
      num_terms: bf16 terms whose sum is a feature: 1 for bf16 features, 3 for fp32 features (24 mantissa bits in three
        times 8).
      width: padded number of features.
      bx: rows without padding.
      by: columns without padding.
      features: features without padding.
    """

    x: Array
    y: Array
    num_terms: int
    width: int
    bx: int
    by: int
    features: int

    @classmethod
    def of(cls, x: Float[Array, "bx d"], y: Float[Array, "by d"], kernels: Kernels) -> "Padded":
        """Pad and split the features of a block."""
        (bx, features), by, num_terms = x.shape, y.shape[0], 1 if x.dtype == jnp.bfloat16 else 3
        width = round_up(features, kernels.depth)
        x, y = (
            _split_bf16(pad_to(a, (round_up(a.shape[0], tile), width)), num_terms)
            for a, tile in zip((x, y), kernels.tile, strict=True)
        )
        return cls(x, y, num_terms, width, bx, by, features)

    @property
    def gain(self) -> float:
        """Factor on similarities that compensates the truncation of tensor cores."""
        return 1 + TRUNCATION * self.width

    @property
    def pairs(self) -> Pairs:
        """Pairs of terms whose GEMMs sum to the similarities, in increasing size.

        The omitted pairs contribute less than 2^-24 of a similarity.
        """
        return ((0, 0),) if self.num_terms == 1 else ((0, 2), (2, 0), (1, 1), (0, 1), (1, 0), (0, 0))

    @property
    def num_ds_terms(self) -> int:
        """Number of bf16 terms of dS."""
        return 1 if self.num_terms == 1 else 2

    @property
    def gradient_pairs(self) -> Pairs:
        """Pairs of dS and feature terms whose GEMMs sum to the gradients."""
        return ((0, 0),) if self.num_terms == 1 else ((0, 2), (1, 1), (0, 1), (1, 0), (0, 0))

    def labels(self, labels: Int32[Array, "bx"]) -> Int32[Array, "padded_bx"]:
        """Return padded labels, -1 for padding and positives outside the block."""
        inside = (labels >= 0) & (labels < self.by)
        return pad_to(jnp.where(inside, labels, jnp.full_like(labels, -1)), (self.x.shape[0],), -1)

    def label_ranges(self, labels: Int32[Array, "bx"] | None) -> dict[str, Int32[Array, "_"]]:
        """Return the operands `labels`, and `lowest` and `highest` of each range of rows; none without labels."""
        if labels is None:
            return {}
        labels = self.labels(labels)
        lowest, highest = row_ranges(labels, labels, LABEL_RANGE_ROWS)
        return {"labels": labels, "lowest": lowest, "highest": highest}

    def dot(self, features: BFloat16[Array, "n terms_k"], gradient: Float[Array, "n k"]) -> Float32[Array, ""]:
        """Compute the inner product of padded features and their padded gradient, in fp32."""
        terms = (features[:, p * self.width : (p + 1) * self.width] for p in reversed(range(self.num_terms)))
        # LseSums the terms from the smallest to the largest.
        return (sum(term.astype(jnp.float32) for term in terms) * gradient.astype(jnp.float32)).sum()


def pad_to(array: Array, shape: tuple[int, ...], value: Any = 0) -> Array:
    """Pad the array with `value` at the end of each axis."""
    widths = [(0, to - n) for n, to in zip(array.shape, shape, strict=True)]
    return jnp.pad(array, widths, constant_values=value) if any(w for _, w in widths) else array


def mask_shift(mask: Bool[Array, "{count}"] | None, count: int, padded: int) -> Float32[Array, "{padded}"] | None:
    """Return the shift fp32 `[padded]`: +inf for masked rows and padding, else 0.

    Returns None if nothing is masked or padded.
    """
    if mask is None and count == padded:
        return None
    infinite = jnp.float32(jnp.inf)
    shift = jnp.zeros(count, jnp.float32) if mask is None else jnp.where(mask, jnp.float32(0), infinite)
    return pad_to(shift, (padded,), infinite)


def _split_bf16(features: Float[Array, "n k"], num_terms: int) -> Float[Array, "n _"]:
    """Split features into concatenated bf16 terms that sum to them."""
    terms, remainder = [], features
    for _ in range(num_terms):
        # XLA may remove a conversion to bf16 and back, but not `reduce_precision`.
        terms.append(lax.reduce_precision(remainder, 8, 7))
        remainder = remainder - terms[-1]
    return jnp.concatenate([term.astype(jnp.bfloat16) for term in terms], axis=1) if num_terms > 1 else features
