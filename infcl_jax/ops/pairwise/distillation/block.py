"""Arrays that the ring and the backends of distillation exchange."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Bool, Float, Int32

from infcl_jax.ops.pairwise.base import Array, LogSum, columns, exp_below, finite_shift, join_columns
from infcl_jax.ops.pairwise.max_shift import factor
from infcl_jax.ops.pairwise.strips import labels_from


@columns("y", "teacher_y", "y_mask")
class DistillationBlock(NamedTuple):
    """Rows and columns of both models that a backend compares in one call.

    Attributes:
      x: student's row features `[bx, D]`, bf16, fp32 or fp64.
      y: student's column features `[by, D]`, same dtype.
      scale: student's inverse temperature, scalar in the accumulation dtype.
      teacher_x: teacher's row features `[bx, Dt]`, bf16, fp32 or fp64; no gradient.
      teacher_y: teacher's column features `[by, Dt]`; no gradient.
      teacher_scale: teacher's inverse temperature, in the student's accumulation dtype; no gradient.
      x_mask: bool `[bx]`, False for masked rows; None: no row is masked.
      y_mask: bool `[by]`, False for masked columns; None: no column is masked.
      labels: int32 `[bx]`, the column of each row's positive. A value outside `[0, by)` means that the row's positive
        is in another block. None: the block contains no positives.
    """

    x: Float[Array, "bx d"]
    y: Float[Array, "by d"]
    scale: Float[Array, ""]
    teacher_x: Float[Array, "bx dt"]
    teacher_y: Float[Array, "by dt"]
    teacher_scale: Float[Array, ""]
    x_mask: Bool[Array, "bx"] | None = None
    y_mask: Bool[Array, "by"] | None = None
    labels: Int32[Array, "bx"] | None = None

    def with_columns(self, columns: tuple, first: int | None) -> "DistillationBlock":
        """Implement `base.Block.with_columns`."""
        return join_columns(self, columns)._replace(labels=labels_from(self.labels, first))


class SideSums(NamedTuple):
    """Sums over the columns of each row, or over the rows of each column.

    Attributes:
      negatives: student's log-sum-exp over the negatives `[n]`.
      teacher: teacher's log-sum-exp over all pairs `[n]`.
      difference: sum of the teacher's exponentials, shifted as in `teacher`, times the difference of the teacher's from
        the student's logits `[n]`.
    """

    negatives: LogSum
    teacher: LogSum
    difference: Float[Array, "n"]

    def merge(self, other: "SideSums") -> "SideSums":
        """Return the sums over both sets of terms."""
        teacher = self.teacher.merge(other.teacher)
        shift = finite_shift(teacher.shift)
        first, second = (sums.difference * exp_below(sums.teacher.shift, shift) for sums in (self, other))
        return SideSums(self.negatives.merge(other.negatives), teacher, first + second)

    def gap(self) -> Float[Array, "n"]:
        """Compute `PairLogits.row_gap`; 0 for an empty sum."""
        lse = self.teacher.log()
        return factor(self.teacher, self.difference) - jnp.where(jnp.isneginf(lse), jnp.zeros_like(lse), lse)


@columns("columns")
class DistillationSums(NamedTuple):
    """Forward results of one block.

    Attributes:
      rows: sums over the columns of each row.
      positive: student's logit of each row's positive `[bx]`; 0 if the positive is in another block.
      columns: sums over the rows of each column.
    """

    rows: SideSums
    positive: Float[Array, "bx"]
    columns: SideSums


class PairLogits(NamedTuple):
    """Log-sum-exps, positives and gaps of rows and columns, or their cotangents.

    Attributes:
      row_negatives: `[bx]` log-sum-exp of each row's negatives; -inf without one.
      column_negatives: `[by]` log-sum-exp of each column's negatives.
      positive: `[bx]` logit of each pair.
      row_gap: `[bx]` see `vjp`; 0 for masked rows.
      column_gap: `[by]`.
    """

    row_negatives: Float[Array, "bx"]
    column_negatives: Float[Array, "by"]
    positive: Float[Array, "bx"]
    row_gap: Float[Array, "bx"]
    column_gap: Float[Array, "by"]


class Side(NamedTuple):
    """Sums of the rows or of the columns over all blocks, and their cotangents.

    Attributes:
      sums: final sums `[n]`.
      d_negatives: dL / d (log-sum-exp of the negatives) `[n]`.
      d_gap: dL / d gap `[n]`.
    """

    sums: SideSums
    d_negatives: Float[Array, "n"]
    d_gap: Float[Array, "n"]


@columns("columns")
class DistillationCotangents(NamedTuple):
    """Inputs of the backward pass.

    Attributes:
      rows: sums and cotangents of the rows.
      columns: sums and cotangents of the columns.
      d_positive: dL / d (logit of the positive) `[bx]`; only read with labels.
    """

    rows: Side
    columns: Side
    d_positive: Float[Array, "bx"]


@columns("y")
class DistillationGradient(NamedTuple):
    """Gradients, their accumulators, or flags of those that are required; see `base.Backend`.

    Attributes:
      x: `[bx, D]`.
      y: `[by, D]`.
      scale: scalar in the accumulation dtype.
    """

    x: Any = True
    y: Any = True
    scale: Any = True
