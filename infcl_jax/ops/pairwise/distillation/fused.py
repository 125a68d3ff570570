"""Fused backend of distillation, with one shared max-shift for each model."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax.numpy as jnp

from infcl_jax.ops.common.derivatives import first_derivative
from infcl_jax.ops.pairwise.base import Array
from infcl_jax.ops.pairwise.distillation.block import (
    DistillationBlock,
    DistillationCotangents,
    DistillationGradient,
    DistillationSums,
    Side,
    SideSums,
)
from infcl_jax.ops.pairwise.distillation.kernel_api import (
    BothPairs,
    DistillationOperands,
    DistillationWeights,
    KernelSums,
)
from infcl_jax.ops.pairwise.fused import Fused, label_similarities
from infcl_jax.ops.pairwise.fused_operands import LOG2E, Padded, mask_shift, pad_to
from infcl_jax.ops.pairwise.kernel_api import Window
from infcl_jax.ops.pairwise.max_shift import factor, shared_shift, shifted_log_sum

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
class DistillationFused(Fused):
    """`base.Backend` around `Kernels` with the operands of both models."""

    def forward(self, block: DistillationBlock) -> DistillationSums:
        """Implement `base.Backend.forward`."""
        block = first_derivative(block)
        models = self._models(block)
        operands, student = self._operands(block, models), models.student
        limit = MAX_FORWARD_PAIRS // max(map(len, models.pairs))
        width = student.width + models.teacher.width
        sizes = self.windows.best_size(len(student.x), len(student.y), limit, width, self.kernels.tile)

        def sums(window: Window) -> tuple[KernelSums, KernelSums]:
            return self.kernels.sums(operands, window, models.pairs)

        row, column = self.empty_sums(student)
        init = KernelSums(row, row, row), KernelSums(column, column, column)
        totals = self.reduce_windows(student, sizes, sums, init)
        shifts = shared_shift(block.scale), shared_shift(block.teacher_scale)
        rows, columns = (_log_sums(s, n, shifts) for s, n in zip(totals, (student.bx, student.by), strict=True))
        positive = student.gain * label_similarities(self.kernels, block.labels, student)
        return DistillationSums(rows, block.scale * positive, columns)

    def backward(
        self, block: DistillationBlock, cotangents: DistillationCotangents, acc: DistillationGradient
    ) -> DistillationGradient:
        """Implement `base.Backend.backward`."""
        block = first_derivative(block)
        models = self._models(block)
        padded, operands = models.student, self._operands(block, models)
        scale = jnp.where(block.scale == 0, jnp.ones_like(block.scale), block.scale)  # the VJP sets gradients to zero

        def weights_of(side: Side, count: int) -> tuple[Array, Array]:
            factors = factor(side.sums.negatives, side.d_negatives), factor(side.sums.teacher, side.d_gap)
            student, teacher = (pad_to(scale * f, (count,)) for f in factors)
            return student, teacher

        row, teacher_row = weights_of(cotangents.rows, len(padded.x))
        column, teacher_column = weights_of(cotangents.columns, len(padded.y))
        positive = None if block.labels is None else pad_to(scale * cotangents.d_positive, padded.x.shape[:1])
        weights = DistillationWeights(row, column, teacher_row, teacher_column, positive)
        moments = acc.scale is not None

        def ds(window: Window) -> tuple[Array, Array | None, None]:
            options: dict[str, Any] = {"terms": padded.num_ds_terms, "moments": moments}
            return self.kernels.ds(operands, weights, window, models.pairs, **options)

        acc, grads = self.add_windows(padded, acc, ds, () if moments else None)
        if not moments:
            return acc
        # The kernels' similarities lack what tensor cores truncate, see `Padded.gain`.
        return acc._replace(scale=acc.scale + grads.row_moment.sum() * padded.gain / scale)

    def _models(self, block: DistillationBlock) -> _Models:
        x, y = (a if a.dtype == jnp.bfloat16 else a.astype(jnp.float32) for a in (block.teacher_x, block.teacher_y))
        return _Models(self.padded(block), Padded.of(x, y, self.kernels))

    def _operands(self, block: DistillationBlock, models: _Models) -> DistillationOperands:
        student, teacher = models
        rows, columns = student.x.shape[0], student.y.shape[0]
        masked = mask_shift(block.x_mask, student.bx, rows)

        def row_shift(scale: Array) -> Array:
            shift = jnp.broadcast_to(shared_shift(scale) * LOG2E, (rows,))
            return shift if masked is None else shift + masked

        def kernel_scale(scale: Array, padded: Padded) -> Array:
            return (scale * (LOG2E * padded.gain)).reshape(1)

        operands = DistillationOperands(
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
        return operands._replace(**student.label_ranges(block.labels))


def _log_sums(sums: KernelSums, count: int, shifts: tuple[Array, Array]) -> SideSums:
    """Convert the kernels' sums to log-sum-exps and nats, without padding."""
    negatives, teacher, difference = (a[:count] for a in sums)
    return SideSums(
        shifted_log_sum(shifts[0], negatives), shifted_log_sum(shifts[1], teacher), difference * math.log(2)
    )


BACKEND = DistillationFused
