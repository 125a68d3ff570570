"""Interface between the fused backend and its GPU kernels.

Operands are in bf16, exponents in base 2.
"""

import dataclasses
import functools
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import BFloat16, Float, Float32, Int32

from infcl_jax.ops.pairwise_lse.base import Array

# Rows per label range. A tile whose columns are outside the ranges of its rows skips the comparison with labels.
LABEL_RANGE_ROWS = 64

# Pairs (bf16 term of the left operand, bf16 term of the right operand) whose GEMMs are summed.
Pairs = tuple[tuple[int, int], ...]


class Operands(NamedTuple):
    """Kernel operands of a block, in bf16 and base 2.

    `s_ij` is the fp32 sum of the GEMMs over the operands' bf16 terms. A shift is a max-shift in base 2. The
    exponentials are

        shared scale:       e_ij  = exp2(row_scale_i s_ij - row_shift_i - column_shift_j) for rows and columns
        per-sample scales:  er_ij = exp2(row_scale_i s_ij - row_shift_i - column_masked_j) for rows
                            ec_ij = exp2(column_scale_j s_ij - column_shift_j - row_masked_i) for columns

    Attributes:
      x: bf16 `[bx, num_terms * K]`; the bf16 terms of the features are concatenated.
      y: bf16 `[by, num_terms * K]`; the bf16 terms of the features are concatenated.
      row_scale: fp32 `[bx]`.
      row_shift: fp32 `[bx]`, +inf for masked rows.
      column_shift: fp32 `[by]`, +inf for masked columns; None for zeros.
      column_scale: fp32 `[by]`; None with a shared scale.
      row_masked: fp32 `[bx]`, 0 or +inf; None with a shared scale.
      column_masked: fp32 `[by]`, 0 or +inf; None with a shared scale.
      labels: int32 `[bx]`, column of each row's positive, -1 if it is not in the block; None: no positives. With ids,
        the first column of each row's positives.
      lowest: int32 `[bx / LABEL_RANGE_ROWS]`, lowest label other than -1 of each range of rows; None without labels.
      highest: int32 `[bx / LABEL_RANGE_ROWS]`, highest label of each range of rows; None without labels. With ids, the
        last column of all their positives.
      last: int32 `[bx]`, last column of each row's positives by id, -1 if there is none in the block. The positives are
        the columns from `labels` to `last`, because rows and columns are sorted by id. None without ids.
    """

    x: BFloat16[Array, "bx k"]
    y: BFloat16[Array, "by k"]
    row_scale: Float32[Array, "bx"]
    row_shift: Float32[Array, "bx"]
    column_shift: Float32[Array, "by"] | None = None
    column_scale: Float32[Array, "by"] | None = None
    row_masked: Float32[Array, "bx"] | None = None
    column_masked: Float32[Array, "by"] | None = None
    labels: Int32[Array, "bx"] | None = None
    lowest: Int32[Array, "ranges"] | None = None
    highest: Int32[Array, "ranges"] | None = None
    last: Int32[Array, "bx"] | None = None


class WeightsByID(NamedTuple):
    """Weights of the positives by id in dS, fp32.

    `dS_ij` at a positive contains

        shared scale:       e_ij (row_i + column_j) + scale (row_sum_i + column_sum_j)
        per-sample scales:  exp2(row_scale_i s_ij - row_shift_i) row_i + row_sum_i
                            + exp2(column_scale_j s_ij - column_shift_j) column_j + column_sum_j

    With a shared scale, a weight `row_i + column_j` of 0 gives 0, even if `e_ij` is infinite.

    Attributes:
      row: `[bx]`.
      row_sum: `[bx]`.
      column: `[by]`; None without column sums.
      column_sum: `[by]`; None without column sums.
      scale: `[1]`; None with per-sample scales.
      row_shift: `[bx]`, max-shift of the positives in base 2; None with a shared scale.
      column_shift: `[by]`; None with a shared scale or without column sums.
    """

    row: Float32[Array, "bx"]
    row_sum: Float32[Array, "bx"]
    column: Float32[Array, "by"] | None = None
    column_sum: Float32[Array, "by"] | None = None
    scale: Float32[Array, "1"] | None = None
    row_shift: Float32[Array, "bx"] | None = None
    column_shift: Float32[Array, "by"] | None = None


class Weights(NamedTuple):
    """Weights of the exponentials in dS, fp32.

    `dS_ij = er_ij row_i + ec_ij column_j + [j == labels_i] positive_i`. With a shared scale er = ec = e.

    Attributes:
      row: `[bx]`.
      column: `[by]`; None without column sums.
      positive: `[bx]`; None without positives by label.
      by_id: weights of the positives by id, whose terms are added; None without ids.
    """

    row: Float32[Array, "bx"]
    column: Float32[Array, "by"] | None
    positive: Float32[Array, "bx"] | None
    by_id: WeightsByID | None = None


@functools.partial(jax.tree_util.register_dataclass, data_fields=["row", "column"], meta_fields=["rows", "columns"])
@dataclasses.dataclass(frozen=True)
class Window:
    """Row and column range of a block that one kernel call computes.

    Attributes:
      row: first row, an int32 scalar.
      column: first column, an int32 scalar.
      rows: number of rows, static.
      columns: number of columns, static.
    """

    row: Array
    column: Array
    rows: int
    columns: int


class Kernels(Protocol):
    """GPU kernels of the fused backend; all results are bitwise reproducible."""

    @property
    def tile(self) -> tuple[int, int]:
        """Row and column multiples of every window."""

    @property
    def depth(self) -> int:
        """Multiple to which K is padded."""

    def sums(
        self, operands: Operands, window: Window, pairs: Pairs, *, exclude: bool, columns: bool, maxima: bool
    ) -> tuple[Float32[Array, "{window.rows}"], Float32[Array, "{window.columns}"] | None]:
        """Compute sums of a window's exponentials, or maxima of its exponents if `maxima`.

        Returns:
          Reductions over columns `[rows]` and over rows `[columns]` (None without `columns`), fp32.
        """

    def ds(
        self,
        operands: Operands,
        weights: Weights,
        window: Window,
        pairs: Pairs,
        *,
        exclude: bool,
        terms: int,
        moments: bool,
    ) -> tuple[
        BFloat16[Array, "{window.rows} {terms*window.columns}"],
        Float32[Array, "{window.rows}"] | None,
        Float32[Array, "{window.columns}"] | None,
    ]:
        """Compute a window of dS, and moments if `moments`.

        Returns:
          dS as `terms` concatenated bf16 terms `[rows, terms * columns]`, and the moments `sum_j er_ij s_ij` `[rows]`
          and `sum_i ec_ij s_ij` `[columns]`, fp32.
        """

    def positives(
        self, x: BFloat16[Array, "rows k"], y: BFloat16[Array, "rows k"], pairs: Pairs
    ) -> Float32[Array, "rows"]:
        """Compute `s_ii` fp32 `[rows]`, bitwise equal to the other kernels' values."""

    def positive_sums(
        self, operands: Operands, pairs: Pairs, *, maxima: bool
    ) -> tuple[Float32[Array, "bx"], Float32[Array, "bx"], Float32[Array, "bx"]]:
        """Compute sums over each row's positives by id, from the tiles that contain positives only.

        `operands` has a shared scale, and rows and columns without padding.

        Returns:
          Sums over the positives of `e_ij`, `s_ij` and `e_ij s_ij`, fp32 `[bx]`; with `maxima`, the maximum of the
          exponents of `e_ij` (-inf without a positive) instead of the first.
        """


def positive_tiles(
    operands: Operands, tile_rows: int, tile_columns: int
) -> tuple[Int32[Array, "row_tiles"], Int32[Array, "row_tiles"]]:
    """Return the first column tile that contains positives by id, and their number, of each row tile."""
    lowest, highest = row_ranges(operands.labels, operands.last, tile_rows)
    none = highest < 0
    first = jnp.where(none, jnp.zeros_like(lowest), lowest // tile_columns)
    return first, jnp.where(none, jnp.zeros_like(first), highest // tile_columns - first + 1)


def row_ranges(
    labels: Int32[Array, "rows"], last: Int32[Array, "rows"], size: int
) -> tuple[Int32[Array, "ranges"], Int32[Array, "ranges"]]:
    """Return the lowest of `labels` other than -1, and the highest of `last`, of each range of `size` rows."""
    labels = labels.reshape(-1, size)
    valid = jnp.where(labels < 0, jnp.full_like(labels, jnp.iinfo(jnp.int32).max), labels)
    return valid.min(1), last.reshape(-1, size).max(1)


def term_width(x: Float[Array, "rows k"], pairs: Pairs) -> int:
    """Return the padded number of features K of operands `[bx, num_terms * K]`."""
    return x.shape[1] // (1 + max(p for p, _ in pairs))
