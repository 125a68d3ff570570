"""Interface between the fused backend of distillation and its GPU kernels.

Features are in bf16, logits in base 2.
"""

from typing import NamedTuple

from jaxtyping import BFloat16, Float32, Int32

from infcl_jax.ops.pairwise.base import Array
from infcl_jax.ops.pairwise.kernel_api import Pairs

# Pairs of bf16 terms of the student's and of the teacher's features.
BothPairs = tuple[Pairs, Pairs]


class DistillationOperands(NamedTuple):
    """Kernel operands of a block, in bf16 and base 2.

    `s_ij` is the fp32 sum of the GEMMs over the bf16 terms of the student's features, `u_ij` that of the teacher's.
    Logits and exponentials are

        z_ij = scale s_ij            e_ij = exp2(z_ij - row_shift_i - column_masked_j)
        t_ij = teacher_scale u_ij    f_ij = exp2(t_ij - teacher_row_shift_i - column_masked_j)

    Attributes:
      x: bf16 `[bx, num_terms * K]`; the bf16 terms of the features are concatenated.
      y: bf16 `[by, num_terms * K]`.
      teacher_x: bf16 `[bx, teacher_terms * Kt]`.
      teacher_y: bf16 `[by, teacher_terms * Kt]`.
      scale: fp32 `[1]`.
      teacher_scale: fp32 `[1]`.
      row_shift: fp32 `[bx]`, the student's max-shift, +inf for masked rows.
      teacher_row_shift: fp32 `[bx]`, the teacher's max-shift, +inf for masked rows.
      column_masked: fp32 `[by]`, 0 or, for masked columns, +inf; None for zeros.
      labels: int32 `[bx]`, column of each row's positive, -1 if it is not in the block; None: no positives.
      lowest: int32 `[bx / LABEL_RANGE_ROWS]`, lowest label other than -1 of each range of rows; None without labels.
      highest: int32 `[bx / LABEL_RANGE_ROWS]`, highest label of each range of rows; None without labels.
    """

    x: BFloat16[Array, "bx k"]
    y: BFloat16[Array, "by k"]
    teacher_x: BFloat16[Array, "bx kt"]
    teacher_y: BFloat16[Array, "by kt"]
    scale: Float32[Array, "1"]
    teacher_scale: Float32[Array, "1"]
    row_shift: Float32[Array, "bx"]
    teacher_row_shift: Float32[Array, "bx"]
    column_masked: Float32[Array, "by"] | None = None
    labels: Int32[Array, "bx"] | None = None
    lowest: Int32[Array, "ranges"] | None = None
    highest: Int32[Array, "ranges"] | None = None


class DistillationWeights(NamedTuple):
    """Weights of the exponentials in dS, fp32.

    `dS_ij = e_ij (row_i + column_j) - f_ij (teacher_row_i + teacher_column_j)`. At the positive of row i, `positive_i`
    replaces the first product.

    Attributes:
      row: `[bx]`.
      column: `[by]`.
      teacher_row: `[bx]`.
      teacher_column: `[by]`.
      positive: `[bx]`; None for a block without positives.
    """

    row: Float32[Array, "bx"]
    column: Float32[Array, "by"]
    teacher_row: Float32[Array, "bx"]
    teacher_column: Float32[Array, "by"]
    positive: Float32[Array, "bx"] | None


class KernelSums(NamedTuple):
    """Sums over the columns of each row, or over the rows of each column: results of `Kernels.sums`.

    Attributes:
      negatives: fp32 `[n]`, sum of e over the negatives.
      teacher: fp32 `[n]`, sum of f.
      difference: fp32 `[n]`, sum of f (t - z).
    """

    negatives: Float32[Array, "n"]
    teacher: Float32[Array, "n"]
    difference: Float32[Array, "n"]
