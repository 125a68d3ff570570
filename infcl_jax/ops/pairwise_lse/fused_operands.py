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

from infcl_jax.ops.pairwise_lse.base import Array, Block, round_up
from infcl_jax.ops.pairwise_lse.fused_kernel_api import (
    LABEL_RANGE_ROWS,
    Kernels,
    Operands,
    Pairs,
    Weights,
    WeightsByID,
    row_ranges,
)
from infcl_jax.ops.pairwise_lse.id_order import ranges_by_id

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
    def of(cls, block: Block, kernels: Kernels) -> "Padded":
        """Pad and split the features of a block."""
        num_terms = 1 if block.x.dtype == jnp.bfloat16 else 3
        width = round_up(block.x.shape[1], kernels.depth)
        x, y = (
            _split_bf16(pad_to(a, (round_up(a.shape[0], tile), width)), num_terms)
            for a, tile in zip((block.x, block.y), kernels.tile, strict=True)
        )
        return cls(x, y, num_terms, width, block.x.shape[0], block.y.shape[0], block.x.shape[1])

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

    def operands(
        self,
        block: Block,
        row_shift: Float[Array, ""] | Float[Array, "bx"],
        column_shift: Float[Array, ""] | Float[Array, "by"] | None,
    ) -> Operands:
        """Return the kernels' operands.

        Args:
          block: the block whose features these are.
          row_shift: max-shift of the rows' exponents in nats, `[]` or `[bx]`.
          column_shift: max-shift of the columns' exponents in nats, `[]` or `[by]`; not read with a shared scale.
        """
        rows, columns = self.x.shape[0], self.y.shape[0]
        row_masked = mask_shift(block.x_mask, self.bx, rows)
        column_masked = mask_shift(block.y_mask, self.by, columns)

        def vector(a: Array, size: int, count: int, gain: float = 1) -> Array:
            """Convert `a`, scalar or `[size]`, to base 2 and pad it to `[count]`."""
            return pad_to(jnp.broadcast_to(a, (size,)) * (LOG2E * gain), (count,))

        x_shift = vector(row_shift, self.bx, rows)
        operands = Operands(
            self.x,
            self.y,
            vector(block.x_scale, self.bx, rows, self.gain),
            x_shift if row_masked is None else x_shift + row_masked,
            column_masked,
        )
        if block.labels is not None:
            labels = self.labels(block)
            lowest, highest = row_ranges(labels, labels, LABEL_RANGE_ROWS)
            operands = operands._replace(labels=labels, lowest=lowest, highest=highest)
        elif block.x_ids is not None:
            operands = with_positives_by_id(operands, block.x_ids, block.y_ids)
        if block.y_scale is None:
            return operands
        zeros = [jnp.zeros_like(a[:, 0], jnp.float32) for a in (self.x, self.y)]
        row_masked = zeros[0] if row_masked is None else row_masked
        column_masked = zeros[1] if column_masked is None else column_masked
        return operands._replace(
            column_shift=vector(column_shift, self.by, columns) + column_masked,
            column_scale=vector(block.y_scale, self.by, columns, self.gain),
            row_masked=row_masked,
            column_masked=column_masked,
        )

    def weights(self, weights: Weights) -> Weights:
        """Pad the weights with zeros."""
        rows, columns = (self.x.shape[0],), (self.y.shape[0],)
        row, column, positive, by_id = weights

        def pad(name: str, array: Array | None) -> Array | None:
            if array is None or name == "scale":
                return array
            return pad_to(array, columns if name.startswith("column") else rows)

        return Weights(
            pad("row", row),
            pad("column", column),
            pad("positive", positive),
            None if by_id is None else WeightsByID(**{name: pad(name, a) for name, a in by_id._asdict().items()}),
        )

    def labels(self, block: Block) -> Int32[Array, "padded_bx"]:
        """Return padded labels, -1 for padding and positives outside the block."""
        inside = (block.labels >= 0) & (block.labels < self.by)
        labels = jnp.where(inside, block.labels, jnp.full_like(block.labels, -1))
        return pad_to(labels, (self.x.shape[0],), -1)

    def dot(self, features: BFloat16[Array, "n terms_k"], gradient: Float[Array, "n k"]) -> Float32[Array, ""]:
        """Compute the inner product of padded features and their padded gradient, in fp32."""
        terms = (features[:, p * self.width : (p + 1) * self.width] for p in reversed(range(self.num_terms)))
        # Sums the terms from the smallest to the largest.
        return (sum(term.astype(jnp.float32) for term in terms) * gradient.astype(jnp.float32)).sum()


def with_positives_by_id(operands: Operands, x_ids: Int32[Array, "bx"], y_ids: Int32[Array, "by"]) -> Operands:
    """Add the column range of each row's positives by id.

    Args:
      operands: padded operands without positives.
      x_ids: sorted group numbers of the rows.
      y_ids: sorted group numbers of the columns.
    """
    rows = operands.x.shape[:1]
    first, last = (pad_to(a, rows, -1) for a in ranges_by_id(x_ids, y_ids))
    lowest, highest = row_ranges(first, last, LABEL_RANGE_ROWS)
    return operands._replace(labels=first, last=last, lowest=lowest, highest=highest)


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
