"""Positives by id in the fused backend.

Rows and columns are sorted by id (see `ids`), so that a row's positives are adjacent columns. Sums over positives
come from the tiles that contain positives only. Those of the columns are sums of the transposed block.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Float, Float32

from infcl_jax.ops.pairwise.base import Array, LogSum, finite_shift
from infcl_jax.ops.pairwise.fused_operands import LOG2E, Padded, pad_to
from infcl_jax.ops.pairwise.kernel_api import Pairs
from infcl_jax.ops.pairwise.lse.block import LseBlock, LseCotangents, PositiveSums
from infcl_jax.ops.pairwise.lse.kernel_api import LseKernels, LseOperands, WeightsByID, with_positives_by_id
from infcl_jax.ops.pairwise.max_shift import factor, shared_shift, shifted_log_sum


@dataclasses.dataclass(frozen=True)
class _Side:
    """Rows of a block or of the transposed block.

    Attributes:
      operands: kernel operands with exponents relative to a shift of 0.
      pairs: pairs of bf16 terms.
      scale: `[]` or `[n]` inverse temperature.
      count: number of rows n without padding.
      gain: factor on similarities.
    """

    operands: LseOperands
    pairs: Pairs
    scale: Float[Array, ""] | Float[Array, "n"]
    count: int
    gain: float

    @classmethod
    def of(cls, block: LseBlock, padded: Padded, *, transposed: bool) -> "_Side":
        """Return the rows, or the columns if `transposed`."""
        x, y, pairs, count = padded.x, padded.y, padded.pairs, padded.bx
        x_ids, y_ids, scale = block.x_ids, block.y_ids, block.x_scale
        if transposed:
            x, y, pairs, count = y, x, tuple((q, p) for p, q in pairs), padded.by
            x_ids, y_ids, scale = y_ids, x_ids, scale if block.shared else block.y_scale
        rows = x.shape[0]
        row_scale = pad_to(jnp.broadcast_to(scale, (count,)) * (LOG2E * padded.gain), (rows,))
        operands = LseOperands(x, y, row_scale, jnp.zeros_like(row_scale))
        return cls(with_positives_by_id(operands, x_ids, y_ids), pairs, scale, count, padded.gain)

    def reduce(
        self, kernels: LseKernels, shift: Float[Array, ""] | Float[Array, "n"], *, maxima: bool = False
    ) -> tuple[Float32[Array, "n"], Float32[Array, "n"], Float32[Array, "n"]]:
        """Return the results of `LseKernels.positive_sums` with the max-shift `shift`, in nats."""
        row_shift = pad_to(jnp.broadcast_to(shift, (self.count,)) * LOG2E, self.operands.row_shift.shape)
        operands = self.operands._replace(row_shift=row_shift)
        sums, similarity, moment = (a[: self.count] for a in kernels.positive_sums(operands, self.pairs, maxima=maxima))
        return sums, similarity * self.gain, moment * self.gain


def sums_by_id(
    kernels: LseKernels, block: LseBlock, padded: Padded, *, columns: bool
) -> tuple[PositiveSums, PositiveSums | None]:
    """Compute the sums over the positives of rows and columns.

    Per-sample scales need the maxima of the exponents as shifts, which takes another sweep over few tiles.
    """

    def sums(transposed: bool) -> PositiveSums:
        side = _Side.of(block, padded, transposed=transposed)
        if block.shared:
            shift = shared_shift(block.x_scale)
            sumexp, similarity, _ = side.reduce(kernels, shift)
            return PositiveSums(shifted_log_sum(shift, sumexp), similarity)
        maxima = side.reduce(kernels, jnp.zeros_like(side.scale), maxima=True)[0] / LOG2E
        sumexp, similarity, _ = side.reduce(kernels, finite_shift(maxima))
        return PositiveSums(LogSum(maxima, sumexp), similarity)

    return sums(False), sums(True) if columns else None


def weights_by_id(block: LseBlock, cotangents: LseCotangents) -> WeightsByID:
    """Return the weights of the positives in dS, without padding."""
    rows, columns = cotangents.row_positives, cotangents.column_positives
    shared = block.shared
    row_scale, column_scale = block.x_scale, block.x_scale if shared else block.y_scale
    weights = WeightsByID(
        row_scale * factor(rows.lse, rows.d_lse),
        rows.d_sum if shared else row_scale * rows.d_sum,
        scale=block.x_scale.reshape(1) if shared else None,
        row_shift=None if shared else finite_shift(rows.lse.shift) * LOG2E,
    )
    if columns is None:
        return weights
    return weights._replace(
        column=column_scale * factor(columns.lse, columns.d_lse),
        column_sum=columns.d_sum if shared else column_scale * columns.d_sum,
        column_shift=None if shared else finite_shift(columns.lse.shift) * LOG2E,
    )


def scale_gradients_by_id(
    kernels: LseKernels, block: LseBlock, padded: Padded, cotangents: LseCotangents, *, x_scale: bool, y_scale: bool
) -> tuple[Float32[Array, "bx"] | None, Float32[Array, "by"] | None]:
    """Compute the positives' terms of the gradients of per-sample scales.

    Returns None for gradients that are not needed.
    """

    def gradient(transposed: bool) -> Float32[Array, "n"]:
        positives = cotangents.column_positives if transposed else cotangents.row_positives
        side = _Side.of(block, padded, transposed=transposed)
        _, similarity, moment = side.reduce(kernels, finite_shift(positives.lse.shift))
        return factor(positives.lse, positives.d_lse) * moment + positives.d_sum * similarity

    return gradient(False) if x_scale else None, gradient(True) if y_scale else None
