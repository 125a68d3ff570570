"""Fused backend of the pairwise sigmoid loss."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Bool, Float32, Int32

from infcl_jax.ops.common.derivatives import first_derivative
from infcl_jax.ops.pairwise.base import Array
from infcl_jax.ops.pairwise.fused import Fused
from infcl_jax.ops.pairwise.fused_operands import LOG2E, Padded, pad_to
from infcl_jax.ops.pairwise.kernel_api import Window
from infcl_jax.ops.pairwise.sigmoid.block import (
    UNMATCHED_COLUMN,
    UNMATCHED_ROW,
    SigmoidBlock,
    SigmoidGradient,
    SigmoidSums,
)
from infcl_jax.ops.pairwise.sigmoid.kernel_api import Matches, SigmoidOperands, SigmoidWeights

# Most pairs of a window of sums: 128 MiB of partial sums, of positives and of negatives, one each per 128 columns. They
# may be in memory together with a window of dS, because the gradients do not depend on the sums.
MAX_FORWARD_PAIRS = 1 << 31


@dataclasses.dataclass(frozen=True)
class SigmoidFused(Fused):
    """`base.Backend` around `SigmoidKernels`."""

    def forward(self, block: SigmoidBlock) -> SigmoidSums:
        """Implement `base.Backend.forward`."""
        block = first_derivative(block)
        padded = self.padded(block)
        operands = self._operands(block, padded)
        limit = MAX_FORWARD_PAIRS // len(padded.pairs)
        sizes = self.windows.best_size(len(padded.x), len(padded.y), limit, padded.width, self.kernels.tile)

        def sums(window: Window) -> tuple[tuple, None]:
            return self.kernels.sums(operands, window, padded.pairs), None

        zeros, _ = self.empty_sums(padded)
        init = (zeros, None if operands.matches is None else zeros), None
        (negative, positive), _ = self.reduce_windows(padded, sizes, sums, init)
        positive = zeros if positive is None else positive
        return SigmoidSums(positive[: padded.bx], negative[: padded.bx])

    def backward(self, block: SigmoidBlock, cotangents: SigmoidSums, acc: SigmoidGradient) -> SigmoidGradient:
        """Implement `base.Backend.backward`."""
        block = first_derivative(block)
        padded = self.padded(block)
        operands = self._operands(block, padded)
        scale, rows = _nonzero(block.scale), padded.x.shape[:1]
        weights = SigmoidWeights(
            pad_to(scale * cotangents.negative, rows),
            None if operands.matches is None else pad_to(-scale * cotangents.positive, rows),
        )
        moments = acc.scale is not None or acc.bias is not None

        def ds(window: Window) -> tuple[Array, Array | None, None]:
            options: dict[str, Any] = {"terms": padded.num_ds_terms, "moments": moments}
            return self.kernels.ds(operands, weights, window, padded.pairs, **options)

        acc, grads = self.add_windows(padded, acc, ds, (2,) if moments else None)
        if not moments:
            return acc
        # The kernels' similarities lack what tensor cores truncate, see `Padded.gain`.
        d_scale, d_bias = grads.row_moment.sum(0) / scale * jnp.array([padded.gain, 1], jnp.float32)
        return acc._replace(
            scale=None if acc.scale is None else acc.scale + d_scale,
            bias=None if acc.bias is None else acc.bias + d_bias,
        )

    def _operands(self, block: SigmoidBlock, padded: Padded) -> SigmoidOperands:
        rows, columns = padded.x.shape[0], padded.y.shape[0]
        bias = block.bias * LOG2E
        row_bias = jnp.broadcast_to(bias, (padded.bx,))
        if block.x_mask is not None:
            row_bias = jnp.where(block.x_mask, row_bias, jnp.full_like(row_bias, -jnp.inf))
        column_bias = None
        if block.y_mask is not None or columns != padded.by:
            zeros = jnp.zeros_like(block.y[:, 0], jnp.float32)
            column_bias = zeros if block.y_mask is None else jnp.where(block.y_mask, zeros, zeros - jnp.inf)
            column_bias = pad_to(column_bias, (columns,), -jnp.inf)
        matches = None
        if block.x_ids is not None:
            row, column = (
                pad_to(ids, (count,), unmatched)
                for ids, count, unmatched in (
                    (block.x_ids, rows, UNMATCHED_ROW),
                    (block.y_ids, columns, UNMATCHED_COLUMN),
                )
            )
            sizes = self.kernels.ranges
            row_range = _number_ranges(row, block.x_mask, sizes[0])
            matches = Matches(row, column, *row_range, *_number_ranges(column, block.y_mask, sizes[1]))
        scale = (block.scale * (LOG2E * padded.gain)).reshape(1)
        return SigmoidOperands(padded.x, padded.y, scale, pad_to(row_bias, (rows,), -jnp.inf), column_bias, matches)


def _number_ranges(
    numbers: Int32[Array, "n"], mask: Bool[Array, "_"] | None, size: int
) -> tuple[Int32[Array, "ranges"], Int32[Array, "ranges"]]:
    """Return the lowest and the highest group number of each range.

    A range has `size` rows. Masked rows and padding do not count.
    """
    limits = jnp.iinfo(jnp.int32)
    matched = numbers >= 0
    if mask is not None:
        matched &= pad_to(mask, numbers.shape, False)
    lowest, highest = (jnp.where(matched, numbers, jnp.full_like(numbers, n)) for n in (limits.max, limits.min))
    return lowest.reshape(-1, size).min(1), highest.reshape(-1, size).max(1)


def _nonzero(scale: Float32[Array, ""]) -> Float32[Array, ""]:
    """Replace 0 by 1.

    The VJP then sets the gradients of the features to zero.
    """
    return jnp.where(scale == 0, jnp.ones_like(scale), scale)


BACKEND = SigmoidFused
