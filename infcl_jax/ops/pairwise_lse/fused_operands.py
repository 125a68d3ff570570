"""A block as the kernels want it: whole tiles, bf16 parts, base-2 exponents, masks as infinite references."""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jax import lax

from infcl_jax.ops.pairwise_lse.base import Array, Block, round_up
from infcl_jax.ops.pairwise_lse.fused_kernel_api import RANGE, Kernels, Operands, Pairs, Weights

LOG2E = math.log2(math.e)
# Tensor cores truncate a sum whenever they add to it, so similarities come out too small: on an H200 by 0.75e-9 of
# themselves for each feature if these are random, and by 2.1e-9 at most, if one outweighs the others.
TRUNCATION = 1e-9


@dataclasses.dataclass(frozen=True)
class Padded:
    """A block's features as the kernels want them: bf16 parts, whole tiles.

    Attributes:
      x: `[rows, parts * width]`.
      y: `[columns, parts * width]`.
      parts: 1 for bf16 features, 3 for fp32 ones (24 bits in three times 8).
      width: features, padded.
      bx: rows that are not padding.
      by: columns that are not padding.
      features: features that are not padding.
    """

    x: Array
    y: Array
    parts: int
    width: int
    bx: int
    by: int
    features: int

    @classmethod
    def of(cls, block: Block, kernels: Kernels) -> "Padded":
        """Pads and splits a block's features."""
        parts = 1 if block.x.dtype == jnp.bfloat16 else 3
        width = round_up(block.x.shape[1], kernels.depth)
        x, y = (
            _parts(extended(a, (round_up(a.shape[0], tile), width)), parts)
            for a, tile in zip((block.x, block.y), kernels.tile, strict=True)
        )
        return cls(x, y, parts, width, block.x.shape[0], block.y.shape[0], block.x.shape[1])

    @property
    def gain(self) -> float:
        """What similarities have to be multiplied by to make up for truncation."""
        return 1 + TRUNCATION * self.width

    @property
    def pairs(self) -> Pairs:
        """Parts whose products make a similarity, the smallest first; what is left out is under 2^-24 of it."""
        return ((0, 0),) if self.parts == 1 else ((0, 2), (2, 0), (1, 1), (0, 1), (1, 0), (0, 0))

    @property
    def d_s_parts(self) -> int:
        """Parts of dS."""
        return 1 if self.parts == 1 else 2

    @property
    def gradient_pairs(self) -> Pairs:
        """Parts of dS and of features whose products make a gradient."""
        return ((0, 0),) if self.parts == 1 else ((0, 2), (1, 1), (0, 1), (1, 0), (0, 0))

    def operands(self, block: Block, row_reference: Array, column_reference: Array | None) -> Operands:
        """The kernels' operands.

        Args:
          block: the block, padded or not.
          row_reference: what is subtracted from a row's exponents, in nats, `[]` or `[bx]`.
          column_reference: likewise for columns; not read with a shared scale.
        """
        rows, columns = self.x.shape[0], self.y.shape[0]
        row_masked = _masked(block.x_mask, self.bx, rows)
        column_masked = _masked(block.y_mask, self.by, columns)

        def vector(a: Array, size: int, count: int, gain: float = 1) -> Array:
            return extended(jnp.broadcast_to(a, (size,)) * (LOG2E * gain), (count,))

        x_reference = vector(row_reference, self.bx, rows)
        operands = Operands(
            self.x,
            self.y,
            vector(block.x_scale, self.bx, rows, self.gain),
            x_reference if row_masked is None else x_reference + row_masked,
            column_masked,
        )
        if block.labels is not None:
            labels = self.labels(block)
            ranges = labels.reshape(-1, RANGE)
            some = jnp.where(ranges < 0, jnp.full_like(ranges, jnp.iinfo(jnp.int32).max), ranges)
            operands = operands._replace(labels=labels, lowest=some.min(1), highest=ranges.max(1))
        if block.y_scale is None:
            return operands
        zeros = [jnp.zeros_like(a[:, 0], jnp.float32) for a in (self.x, self.y)]
        row_masked = zeros[0] if row_masked is None else row_masked
        column_masked = zeros[1] if column_masked is None else column_masked
        return operands._replace(
            column_reference=vector(column_reference, self.by, columns) + column_masked,
            column_scale=vector(block.y_scale, self.by, columns, self.gain),
            row_masked=row_masked,
            column_masked=column_masked,
        )

    def weights(self, weights: Weights) -> Weights:
        """The weights with zeros for padding."""
        rows, columns = (self.x.shape[0],), (self.y.shape[0],)
        row, column, positive = weights
        return Weights(
            extended(row, rows),
            None if column is None else extended(column, columns),
            None if positive is None else extended(positive, rows),
        )

    def labels(self, block: Block) -> Array:
        """Labels, -1 for padding and for positives elsewhere."""
        inside = (block.labels >= 0) & (block.labels < self.by)
        labels = jnp.where(inside, block.labels, jnp.full_like(block.labels, -1))
        return extended(labels, (self.x.shape[0],), -1)

    def dot(self, features: Array, gradient: Array) -> Array:
        """Sum of the products of all features with their gradients, both padded."""
        parts = (features[:, p * self.width : (p + 1) * self.width] for p in reversed(range(self.parts)))
        return (sum(p.astype(jnp.float32) for p in parts) * gradient.astype(jnp.float32)).sum()


def _masked(mask: Array | None, count: int, padded: int) -> Array | None:
    """fp32 `[padded]`: +inf for what is masked or padding, else 0; None if nothing is."""
    if mask is None and count == padded:
        return None
    infinite = jnp.float32(jnp.inf)
    kept = jnp.zeros(count, jnp.float32) if mask is None else jnp.where(mask, jnp.float32(0), infinite)
    return extended(kept, (padded,), infinite)


def extended(array: Array, shape: tuple[int, ...], value: Any = 0) -> Array:
    """The array, padded at the end of each axis."""
    widths = [(0, to - n) for n, to in zip(array.shape, shape, strict=True)]
    return jnp.pad(array, widths, constant_values=value) if any(w for _, w in widths) else array


def _parts(features: Array, parts: int) -> Array:
    """Features as bf16 parts that add up to them, side by side."""
    found, rest = [], features
    for _ in range(parts):
        # Not a conversion to bf16 and back, which the compiler may take for nothing.
        found.append(lax.reduce_precision(rest, 8, 7))
        rest = rest - found[-1]
    return jnp.concatenate([f.astype(jnp.bfloat16) for f in found], axis=1) if parts > 1 else features
