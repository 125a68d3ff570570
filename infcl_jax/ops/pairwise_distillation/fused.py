"""Backend around the fused GPU kernels of distillation.

Padding, windows and gradient GEMMs are those of the fused backend of `pairwise_lse`.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float

from infcl_jax.ops.common.derivatives import first_derivative
from infcl_jax.ops.pairwise_distillation.base import Block, Cotangents, Gradient, NeedsGrad, Side, Sums
from infcl_jax.ops.pairwise_distillation.fused_kernel_api import BothPairs, Kernels, KernelSums, Operands, Weights
from infcl_jax.ops.pairwise_distillation.xla import zero_accumulators
from infcl_jax.ops.pairwise_lse import base as lse
from infcl_jax.ops.pairwise_lse.base import Array, constant
from infcl_jax.ops.pairwise_lse.chunking import loop_over_slices
from infcl_jax.ops.pairwise_lse.fused import label_similarities
from infcl_jax.ops.pairwise_lse.fused_gradients import Accumulators, RowMomentSweep, combine_rows, row_slices
from infcl_jax.ops.pairwise_lse.fused_kernel_api import LABEL_RANGE_ROWS, Window, row_ranges
from infcl_jax.ops.pairwise_lse.fused_operands import LOG2E, Padded, mask_shift, pad_to
from infcl_jax.ops.pairwise_lse.fused_windows import WindowConfig
from infcl_jax.ops.pairwise_lse.stabilization import factor, shared_shift, shifted_log_sum

# Most pairs of a window of sums: 144 MiB of partial sums, three each per 128 columns and per 64 rows.
MAX_FORWARD_PAIRS = 1 << 29


class _Models(NamedTuple):
    """Padded features of both models."""

    student: Padded
    teacher: Padded

    @property
    def pairs(self) -> BothPairs:
        """Pairs of bf16 terms of both models."""
        return self.student.pairs, self.teacher.pairs


@dataclasses.dataclass(frozen=True)
class Fused:
    """`base.Backend` around fused GPU kernels, with one shared max-shift for each model.

    Attributes:
      kernels: kernels of the default device.
      windows: limits of window sizes on that device.
    """

    kernels: Kernels
    windows: WindowConfig = dataclasses.field(default_factory=WindowConfig)

    def forward(self, block: Block) -> tuple[Sums, Sums, Float[Array, "bx"]]:
        """Implement `base.Backend.forward`."""
        block = first_derivative(block)
        models = self._padded(block)
        operands = self._operands(block, models)
        lengths = models.student.x.shape[0], models.student.y.shape[0]
        limit = MAX_FORWARD_PAIRS // max(map(len, models.pairs))
        width = models.student.width + models.teacher.width
        window_rows, window_columns = self.windows.best_size(*lengths, limit, width, self.kernels.tile)

        def add_rows(row: Array, count: int, sums: tuple) -> tuple:
            def add_window(column: Array, size: int, sums: tuple) -> tuple:
                updates = self.kernels.sums(operands, Window(row, column, count, size), models.pairs)
                return tuple(
                    KernelSums(*(combine_rows(jnp.add, a, u, first) for a, u in zip(acc, update, strict=True)))
                    for acc, update, first in zip(sums, updates, (row, column), strict=True)
                )

            return loop_over_slices(lengths[1], window_columns, add_window, sums)

        zeros = (constant((n,), 0, jnp.float32, varying_like=operands.x) for n in lengths)
        sums = loop_over_slices(lengths[0], window_rows, add_rows, tuple(KernelSums(a, a, a) for a in zeros))
        shifts = shared_shift(block.scale), shared_shift(block.teacher_scale)
        row, column = (_log_sums(s, n, shifts) for s, n in zip(sums, (len(block.x), len(block.y)), strict=True))
        positive = label_similarities(self.kernels, _student(block), models.student)
        return row, column, block.scale * positive

    def accumulators(self, block: Block, needs_grad: NeedsGrad, dtype: jnp.dtype) -> Gradient:
        """Implement `base.Backend.accumulators`, with padding and row slices."""
        padded = self._padded(block).student
        x_term, y_term = (a[:, : padded.width] for a in (padded.x, padded.y))
        acc = zero_accumulators(x_term, y_term, block, needs_grad, dtype)
        return acc._replace(x=row_slices(acc.x, padded, self.windows, self.kernels.tile[0]))

    def backward(self, block: Block, cotangents: Cotangents, acc: Gradient) -> Gradient:
        """Implement `base.Backend.backward`."""
        block = first_derivative(block)
        models = self._padded(block)
        padded, rows, columns = models.student, models.student.x.shape[0], models.student.y.shape[0]
        scale = jnp.where(block.scale == 0, jnp.ones_like(block.scale), block.scale)  # the VJP sets gradients to zero

        def weights(side: Side, count: int) -> tuple[Array, Array]:
            factors = factor(side.sums.negatives, side.d_negatives), factor(side.sums.teacher, side.d_gap)
            student, teacher = (pad_to(scale * f, (count,)) for f in factors)
            return student, teacher

        (row, teacher_row), (column, teacher_column) = (
            weights(cotangents.rows, rows),
            weights(cotangents.columns, columns),
        )
        positive = None if block.labels is None else pad_to(scale * cotangents.d_positive, (rows,))
        sizes = self.windows.gradients(
            (rows, columns),
            acc.x[0].shape[0] if acc.x else rows,
            padded.width,
            self.kernels.tile,
            fp32=padded.num_terms > 1,
            fp32_accumulators=any(a.dtype == jnp.float32 for a in jax.tree.leaves((acc.x, acc.y))),
        )
        sweep = RowMomentSweep(
            self.kernels,
            padded,
            self._operands(block, models),
            Weights(row, column, teacher_row, teacher_column, positive),
            sizes,
            exclude=False,
            moments=acc.scale is not None,
            pairs=models.pairs,
        )
        grads = sweep.add_to(Accumulators(acc.x, acc.y))
        acc = acc._replace(x=grads.x, y=grads.y)
        if acc.scale is None:
            return acc
        # The kernels' similarities lack what tensor cores truncate, see `Padded.gain`.
        return acc._replace(scale=acc.scale + grads.row_moment.sum() * padded.gain / scale)

    def gradient(self, block: Block, acc: Gradient) -> Gradient:
        """Implement `base.Backend.gradient`."""
        (rows, width), columns = block.x.shape, block.y.shape[0]
        return acc._replace(
            x=None if acc.x is None else jnp.concatenate(acc.x)[:rows, :width],
            y=None if acc.y is None else acc.y[:columns, :width],
        )

    def _padded(self, block: Block) -> _Models:
        kernels: Any = self.kernels  # only its tile and its depth are read
        teacher_x, teacher_y = (
            a if a.dtype == jnp.bfloat16 else a.astype(jnp.float32) for a in (block.teacher_x, block.teacher_y)
        )
        teacher = lse.Block(teacher_x, teacher_y, block.teacher_scale)
        return _Models(Padded.of(_student(block), kernels), Padded.of(teacher, kernels))

    def _operands(self, block: Block, models: _Models) -> Operands:
        student, teacher = models
        rows, columns = student.x.shape[0], student.y.shape[0]
        masked = mask_shift(block.x_mask, student.bx, rows)

        def row_shift(scale: Array) -> Array:
            shift = jnp.broadcast_to(shared_shift(scale) * LOG2E, (rows,))
            return shift if masked is None else shift + masked

        def kernel_scale(scale: Array, padded: Padded) -> Array:
            return (scale * (LOG2E * padded.gain)).reshape(1)

        operands = Operands(
            student.x,
            student.y,
            teacher.x,
            teacher.y,
            kernel_scale(block.scale, student),
            kernel_scale(block.teacher_scale, teacher),
            row_shift(block.scale),
            row_shift(block.teacher_scale),
            mask_shift(block.y_mask, student.by, columns),
        )
        if block.labels is None:
            return operands
        labels = student.labels(_student(block))
        lowest, highest = row_ranges(labels, labels, LABEL_RANGE_ROWS)
        return operands._replace(labels=labels, lowest=lowest, highest=highest)


def _student(block: Block) -> lse.Block:
    """Return the student's features and labels as a block of `pairwise_lse`."""
    return lse.Block(block.x, block.y, block.scale, labels=block.labels)


def _log_sums(sums: KernelSums, count: int, shifts: tuple[Array, Array]) -> Sums:
    """Convert the kernels' sums to log-sum-exps and nats, without padding."""
    negatives, teacher, difference = (a[:count] for a in sums)
    return Sums(shifted_log_sum(shifts[0], negatives), shifted_log_sum(shifts[1], teacher), difference * math.log(2))
