"""Backend around the fused GPU kernels of the sigmoid loss.

Padding, windows and gradient GEMMs are those of the fused backend of `pairwise_lse`.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float32, Int32

from infcl_jax.ops.common.derivatives import first_derivative
from infcl_jax.ops.pairwise_lse import base as lse
from infcl_jax.ops.pairwise_lse.base import Array, constant
from infcl_jax.ops.pairwise_lse.chunking import loop_over_slices
from infcl_jax.ops.pairwise_lse.fused_gradients import Accumulators, RowMomentSweep, combine_rows, row_slices
from infcl_jax.ops.pairwise_lse.fused_kernel_api import Window
from infcl_jax.ops.pairwise_lse.fused_operands import LOG2E, Padded, pad_to
from infcl_jax.ops.pairwise_lse.fused_windows import WindowConfig
from infcl_jax.ops.pairwise_sigmoid.base import UNMATCHED_COLUMN, UNMATCHED_ROW, Block, Gradient, NeedsGrad, Sums
from infcl_jax.ops.pairwise_sigmoid.fused_kernel_api import Kernels, Matches, Operands, Weights
from infcl_jax.ops.pairwise_sigmoid.xla import zero_accumulators

# Most pairs of a window of sums: 128 MiB of partial sums, of positives and of negatives, one each per 128 columns. They
# may be in memory together with a window of dS, because the gradients do not depend on the sums.
MAX_FORWARD_PAIRS = 1 << 31


@dataclasses.dataclass(frozen=True)
class Fused:
    """`base.Backend` around fused GPU kernels.

    Attributes:
      kernels: kernels of the default device.
      windows: limits of window sizes on that device.
    """

    kernels: Kernels
    windows: WindowConfig = dataclasses.field(default_factory=WindowConfig)

    @property
    def sorts_ids(self) -> bool:
        """Implement `base.Backend.sorts_ids`: the kernels compare numbers only where their ranges overlap."""
        return True

    def forward(self, block: Block) -> Sums:
        """Implement `base.Backend.forward`."""
        block = first_derivative(block)
        padded = self._padded(block)
        operands = self._operands(block, padded)
        rows, columns = padded.x.shape[0], padded.y.shape[0]
        limit = MAX_FORWARD_PAIRS // len(padded.pairs)
        window_rows, window_columns = self.windows.best_size(rows, columns, limit, padded.width, self.kernels.tile)

        def add_rows(row: Array, count: int, sums: tuple) -> tuple:
            def add_window(column: Array, width: int, sums: tuple) -> tuple:
                updates = self.kernels.sums(operands, Window(row, column, count, width), padded.pairs)
                return tuple(
                    acc if update is None else combine_rows(jnp.add, acc, update, row)
                    for acc, update in zip(sums, updates, strict=True)
                )

            return loop_over_slices(columns, window_columns, add_window, sums)

        zeros = constant((rows,), 0, jnp.float32, varying_like=operands.x)
        negative, positive = loop_over_slices(rows, window_rows, add_rows, (zeros, zeros))
        return Sums(positive[: padded.bx], negative[: padded.bx])

    def accumulators(self, block: Block, needs_grad: NeedsGrad, dtype: jnp.dtype) -> Gradient:
        """Implement `base.Backend.accumulators`, with padding and row slices."""
        padded = self._padded(block)
        x_term, y_term = (a[:, : padded.width] for a in (padded.x, padded.y))
        acc = zero_accumulators(x_term, y_term, block, needs_grad, dtype)
        return acc._replace(x=row_slices(acc.x, padded, self.windows, self.kernels.tile[0]))

    def backward(self, block: Block, cotangents: Sums, acc: Gradient) -> Gradient:
        """Implement `base.Backend.backward`."""
        block = first_derivative(block)
        padded = self._padded(block)
        operands = self._operands(block, padded)
        scale, rows = _nonzero(block.scale), padded.x.shape[0]
        weights = Weights(
            pad_to(scale * cotangents.negative, (rows,)),
            None if operands.matches is None else pad_to(-scale * cotangents.positive, (rows,)),
        )
        sizes = self.windows.gradients(
            (rows, padded.y.shape[0]),
            acc.x[0].shape[0] if acc.x else rows,
            padded.width,
            self.kernels.tile,
            fp32=padded.num_terms > 1,
            fp32_accumulators=any(a.dtype == jnp.float32 for a in jax.tree.leaves((acc.x, acc.y))),
        )
        moments = acc.scale is not None or acc.bias is not None
        sweep = RowMomentSweep(
            self.kernels,
            padded,
            operands,
            weights,
            sizes,
            exclude=False,
            moments=moments,
            pairs=padded.pairs,
            row_moment_shape=(2,),
        )
        grads = sweep.add_to(Accumulators(acc.x, acc.y))
        acc = acc._replace(x=grads.x, y=grads.y)
        if not moments:
            return acc
        # The kernels' similarities lack what tensor cores truncate, see `Padded.gain`.
        d_scale, d_bias = grads.row_moment.sum(0) / scale * jnp.array([padded.gain, 1], jnp.float32)
        return acc._replace(
            scale=None if acc.scale is None else acc.scale + d_scale,
            bias=None if acc.bias is None else acc.bias + d_bias,
        )

    def gradient(self, block: Block, acc: Gradient) -> Gradient:
        """Implement `base.Backend.gradient`."""
        (rows, width), columns = block.x.shape, block.y.shape[0]
        return acc._replace(
            x=None if acc.x is None else jnp.concatenate(acc.x)[:rows, :width],
            y=None if acc.y is None else acc.y[:columns, :width],
        )

    def _padded(self, block: Block) -> Padded:
        kernels: Any = self.kernels  # only its tile and its depth are read
        return Padded.of(lse.Block(block.x, block.y, block.scale), kernels)

    def _operands(self, block: Block, padded: Padded) -> Operands:
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
        return Operands(padded.x, padded.y, scale, pad_to(row_bias, (rows,), -jnp.inf), column_bias, matches)


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
