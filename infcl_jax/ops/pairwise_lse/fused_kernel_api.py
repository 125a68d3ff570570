"""The contract between the fused backend and the GPU kernels: what they get, in bf16 and base 2, and must find."""

import dataclasses
import functools
from typing import NamedTuple, Protocol

import jax

from infcl_jax.ops.pairwise_lse.base import Array

# Rows whose labels are summed up as a range, so that tiles without positives are told at once.
RANGE = 64

Pairs = tuple[tuple[int, int], ...]


class Operands(NamedTuple):
    """What the kernels need of a block, in bf16 and base 2.

    With `s_ij` the fp32 sum of the products of the operands' parts, the exponentials are

        shared scale:       e_ij  = exp2(row_scale_i s_ij - row_reference_i - column_reference_j) for rows and columns
        per-sample scales:  er_ij = exp2(row_scale_i s_ij - row_reference_i - column_masked_j) for rows
                            ec_ij = exp2(column_scale_j s_ij - column_reference_j - row_masked_i) for columns

    Attributes:
      x: bf16 `[bx, parts * K]`, the parts of features that bf16 cannot hold side by side.
      y: bf16 `[by, parts * K]`.
      row_scale: fp32 `[bx]`.
      row_reference: fp32 `[bx]`, +inf for masked rows.
      column_reference: fp32 `[by]`, +inf for masked columns; None for zeros.
      column_scale: fp32 `[by]`; None: shared scale.
      row_masked: fp32 `[bx]`, 0 or +inf; None with a shared scale.
      column_masked: fp32 `[by]`, 0 or +inf; None with a shared scale.
      labels: int32 `[bx]`, column of each row's positive, -1 if not in the block; None: no positives.
      lowest: int32 `[bx / RANGE]`, the lowest label of so many rows that is not -1; None without labels.
      highest: likewise the highest.
    """

    x: Array
    y: Array
    row_scale: Array
    row_reference: Array
    column_reference: Array | None = None
    column_scale: Array | None = None
    row_masked: Array | None = None
    column_masked: Array | None = None
    labels: Array | None = None
    lowest: Array | None = None
    highest: Array | None = None


class Weights(NamedTuple):
    """Factors of the exponentials in dS, fp32: `er_ij row_i + ec_ij column_j + [j == labels_i] positive_i`.

    Attributes:
      row: `[bx]`.
      column: `[by]`, or None without columns.
      positive: `[bx]`, or None without positives.
    """

    row: Array
    column: Array | None
    positive: Array | None


@functools.partial(jax.tree_util.register_dataclass, data_fields=["row", "column"], meta_fields=["rows", "columns"])
@dataclasses.dataclass(frozen=True)
class Window:
    """Some rows and columns of a block.

    Attributes:
      row: the first row, an int32 scalar.
      column: the first column.
      rows: how many, static.
      columns: how many, static.
    """

    row: Array
    column: Array
    rows: int
    columns: int


class Kernels(Protocol):
    """What a GPU has to provide. Everything is bitwise reproducible."""

    @property
    def tile(self) -> tuple[int, int]:
        """Windows are multiples of this many rows and columns."""

    @property
    def depth(self) -> int:
        """K is a multiple of this."""

    def sums(
        self, operands: Operands, window: Window, pairs: Pairs, *, exclude: bool, columns: bool, maxima: bool
    ) -> tuple[Array, Array | None]:
        """Sums of the window's exponentials over columns `[rows]` and rows `[columns]`; or maxima of the exponents."""

    def weights(
        self,
        operands: Operands,
        weights: Weights,
        window: Window,
        pairs: Pairs,
        *,
        exclude: bool,
        parts: int,
        moments: bool,
    ) -> tuple[Array, Array | None, Array | None]:
        """The window of dS, bf16 `[rows, parts * columns]`, and the moments `sum_j er_ij s_ij`, `sum_i ec_ij s_ij`."""

    def positives(self, x: Array, y: Array, pairs: Pairs) -> Array:
        """`s_ii` fp32 `[rows]`, bit for bit as the other kernels see it."""
