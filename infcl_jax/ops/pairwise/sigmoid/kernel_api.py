"""Interface between the fused backend of the sigmoid loss and its GPU kernels.

Features are in bf16, logits in base 2.
"""

from typing import NamedTuple, Protocol

from jaxtyping import BFloat16, Float32, Int32

from infcl_jax.ops.pairwise.base import Array
from infcl_jax.ops.pairwise.kernel_api import Kernels


class Matches(NamedTuple):
    """Group numbers of a block's rows and columns.

    A pair with equal numbers is a positive. A tile whose ranges of rows and columns do not overlap skips the
    comparison. Unmatched rows and columns are in no range. `SigmoidKernels.ranges` are the sizes of a range.

    Attributes:
      row: int32 `[bx]`.
      column: int32 `[by]`.
      row_lowest: int32 `[bx / ranges[0]]`, lowest number of each range of rows.
      row_highest: int32 `[bx / ranges[0]]`.
      column_lowest: int32 `[by / ranges[1]]`.
      column_highest: int32 `[by / ranges[1]]`.
    """

    row: Int32[Array, "bx"]
    column: Int32[Array, "by"]
    row_lowest: Int32[Array, "row_ranges"]
    row_highest: Int32[Array, "row_ranges"]
    column_lowest: Int32[Array, "column_ranges"]
    column_highest: Int32[Array, "column_ranges"]


class SigmoidOperands(NamedTuple):
    """Kernel operands of a block, in bf16 and base 2.

    `s_ij` is the fp32 sum of the GEMMs over the operands' bf16 terms. The logits in base 2 are

        l_ij = scale s_ij + row_bias_i + column_bias_j

    Attributes:
      x: bf16 `[bx, num_terms * K]`; the bf16 terms of the features are concatenated.
      y: bf16 `[by, num_terms * K]`.
      scale: fp32 `[1]`.
      row_bias: fp32 `[bx]`, -inf for masked rows.
      column_bias: fp32 `[by]`, 0 or, for masked columns, -inf; None for zeros.
      matches: group numbers; None for a block without positives.
    """

    x: BFloat16[Array, "bx k"]
    y: BFloat16[Array, "by k"]
    scale: Float32[Array, "1"]
    row_bias: Float32[Array, "bx"]
    column_bias: Float32[Array, "by"] | None
    matches: Matches | None


class SigmoidWeights(NamedTuple):
    """Row weights of dS, fp32.

    `dS_ij = negative_i sigmoid(l_ij)` for negatives and `positive_i sigmoid(-l_ij)` for positives.

    Attributes:
      negative: `[bx]`.
      positive: `[bx]`; None for a block without positives.
    """

    negative: Float32[Array, "bx"]
    positive: Float32[Array, "bx"] | None


class SigmoidKernels(Kernels, Protocol):
    """GPU kernels of the sigmoid loss.

    `sums` returns the sums of softplus(l) over the negatives `[rows]`, and of softplus(-l) over the positives `[rows]`,
    in nats. The latter is None for a block without positives. The moments of `ds` are `sum_j dS_ij s_ij` and
    `sum_j dS_ij`, fp32 `[rows, 2]`, from dS before it is rounded.
    """

    @property
    def ranges(self) -> tuple[int, int]:
        """Rows and columns of a range of `Matches`; divisors of `tile`."""
