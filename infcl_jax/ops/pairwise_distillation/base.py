"""Interface between the ring and the compute backends of distillation."""

from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
from jaxtyping import Bool, Float, Int32

from infcl_jax.ops.pairwise_lse.base import Array, LogSum, exp_below, finite_shift
from infcl_jax.ops.pairwise_lse.stabilization import factor


class Block(NamedTuple):
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


class Sums(NamedTuple):
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

    def merge(self, other: "Sums") -> "Sums":
        """Return the sums over both sets of terms."""
        teacher = self.teacher.merge(other.teacher)
        shift = finite_shift(teacher.shift)
        first, second = (sums.difference * exp_below(sums.teacher.shift, shift) for sums in (self, other))
        return Sums(self.negatives.merge(other.negatives), teacher, first + second)

    def gap(self) -> Float[Array, "n"]:
        """Compute `PairLogits.row_gap`; 0 for an empty sum."""
        lse = self.teacher.log()
        return factor(self.teacher, self.difference) - jnp.where(jnp.isneginf(lse), jnp.zeros_like(lse), lse)


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

    sums: Sums
    d_negatives: Float[Array, "n"]
    d_gap: Float[Array, "n"]


class Cotangents(NamedTuple):
    """Inputs of the backward pass.

    Attributes:
      rows: sums and cotangents of the rows.
      columns: sums and cotangents of the columns.
      d_positive: dL / d (logit of the positive) `[bx]`; only read with labels.
    """

    rows: Side
    columns: Side
    d_positive: Float[Array, "bx"]


class Gradient(NamedTuple):
    """Gradients or their accumulators; None for gradients that are not needed.

    Attributes:
      x: `[bx, D]`; its accumulator may be any pytree that the backend chooses.
      y: `[by, D]`, optionally padded at the end of each axis.
      scale: scalar in the accumulation dtype.
    """

    x: Any
    y: Float[Array, "padded_by padded_d"] | None
    scale: Float[Array, ""] | None


class NeedsGrad(NamedTuple):
    """Static flags of the required gradients."""

    x: bool = True
    y: bool = True
    scale: bool = True


class Backend(Protocol):
    """Computation of one block of any size on one device."""

    def forward(self, block: Block) -> tuple[Sums, Sums, Float[Array, "bx"]]:
        """Compute the sums of rows and of columns, and the positives' logits.

        The logit is 0 for a row whose positive is in another block. Sums of masked rows or columns are arbitrary.
        """

    def accumulators(self, block: Block, needs_grad: NeedsGrad, dtype: jnp.dtype) -> Gradient:
        """Return zero accumulators; those of the features in `dtype`."""

    def backward(self, block: Block, cotangents: Cotangents, acc: Gradient) -> Gradient:
        """Add the block's gradients to `acc`, in place where that saves memory.

        Masked rows and columns contribute nothing. Cotangents are scaled so that the largest is between 1/2 and 1.
        """

    def gradient(self, block: Block, acc: Gradient) -> Gradient:
        """Convert complete accumulators into gradients."""
