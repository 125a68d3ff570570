"""Gradients of a block, accumulated over windows of dS.

The loops are, from the outside: column groups, row slices (each with its own accumulator), windows of a row slice,
windows of a column group. `fused_windows` defines windows and column groups.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import BFloat16, Float, Float32, Int32

from infcl_jax.ops.pairwise.base import Array, constant, matmul, zero_after
from infcl_jax.ops.pairwise.fused_operands import Padded
from infcl_jax.ops.pairwise.fused_windows import WindowConfig, WindowSizes
from infcl_jax.ops.pairwise.kernel_api import Window
from infcl_jax.ops.pairwise.strips import loop_over_slices, update_rows


class Accumulators(NamedTuple):
    """Padded accumulators; None for gradients that are not needed.

    Attributes:
      x: row gradients, one array per row slice.
      y: column gradients. Within a column group: tuple of fp32 gradients, one per window.
      row_moment: fp32 sums over the columns of each row, see `Kernels.ds`.
      column_moment: fp32 sums over the rows of each column.
    """

    x: tuple[Float[Array, "_ k"], ...] | None
    y: Any
    row_moment: Float32[Array, "bx *moments"] | None = None
    column_moment: Float32[Array, "by"] | None = None

    def with_moments(self, row: Array, column: Array | None, first_row: Array, first_column: Array) -> "Accumulators":
        """Add the moments of one window."""
        return self._replace(
            row_moment=combine_rows(jnp.add, self.row_moment, row, first_row),
            column_moment=None if column is None else combine_rows(jnp.add, self.column_moment, column, first_column),
        )


class _Columns(NamedTuple):
    """Columns of one window: the first (traced) and their number (static)."""

    first: Array
    width: int


@dataclasses.dataclass(frozen=True)
class GradientSweep:
    """Sweep over all windows of dS of a block.

    Attributes:
      ds: `ds(window)` computes a window of dS and its moments, see `Kernels.ds`.
      padded: features of the block.
      sizes: sizes of windows and column groups.
      row_moment: shape of the moments of one row, for the gradients of scales and biases; None without moments.
      column_moment: whether columns have moments.
    """

    ds: Callable[[Window], tuple[Array, Array | None, Array | None]]
    padded: Padded
    sizes: WindowSizes
    row_moment: tuple[int, ...] | None = None
    column_moment: bool = False

    def add_to(self, acc: Accumulators) -> Accumulators:
        """Add the gradients of the block; initialize the moments."""
        rows, columns = self.padded.x.shape[0], self.padded.y.shape[0]
        acc = acc._replace(
            row_moment=None if self.row_moment is None else self._zeros((rows, *self.row_moment)),
            column_moment=self._zeros((columns,)) if self.column_moment else None,
        )
        return loop_over_slices(columns, self.sizes.group, self._add_group, acc)

    def _add_group(self, first: Array, width: int, acc: Accumulators) -> Accumulators:
        """Add the windows of all rows and `width` columns."""
        x, y, size = acc.x, acc.y, self.sizes.columns
        group = [_Columns(first + c, min(size, width - c)) for c in range(0, width, size)]
        d_y = (None if y is None else _rows(y, *columns).astype(jnp.float32) for columns in group)
        acc = acc._replace(x=None, y=tuple(d_y))
        row = 0
        d_x_slices: tuple = ()
        for d_x in x or (None,):
            d_x, acc = self._add_row_slice(row, group, d_x, acc, d_x_slices[-1:])
            d_x_slices, row = (*d_x_slices, d_x), row + (0 if d_x is None else d_x.shape[0])
        for d, columns in zip(acc.y, group, strict=True) if y is not None else ():
            y = update_rows(y, d, columns.first)
        return acc._replace(x=x and d_x_slices, y=y)

    def _add_row_slice(
        self, first: int, group: list[_Columns], d_x_slice: Array | None, acc: Accumulators, previous: tuple
    ) -> tuple[Array | None, Accumulators]:
        """Add the windows of `d_x_slice`, after the windows of the accumulators in `previous`."""
        count = self.padded.x.shape[0] if d_x_slice is None else d_x_slice.shape[0]
        if d_x_slice is not None and d_x_slice.dtype == jnp.float32 and count <= self.sizes.rows:
            # The slice is one window high, so that its GEMMs accumulate in place.
            ordered_row = first + zero_after((previous, acc.y)) if previous else jnp.int32(first)
            return self._add_rows(jnp.int32(first), count, ordered_row, group, d_x_slice, acc)

        def add_window_rows(row: Array, count: int, state: tuple) -> tuple:
            d_x_slice, acc = state
            d_x = None if d_x_slice is None else self._zeros((count, self.padded.width))
            d_x, acc = self._add_rows(first + row, count, first + row, group, d_x, acc)
            return None if d_x_slice is None else combine_rows(jnp.add, d_x_slice, d_x, row), acc

        return loop_over_slices(count, self.sizes.rows, add_window_rows, (d_x_slice, acc))

    def _add_rows(
        self, row: Array, count: int, ordered_row: Array, group: list[_Columns], d_x: Array | None, acc: Accumulators
    ) -> tuple[Array | None, Accumulators]:
        """Add the windows of `count` rows, one after the other.

        `ordered_row` equals `row`, with a data dependency on the accumulators that must be complete first.
        """
        d_y = list(acc.y)
        for i, (column, width) in enumerate(group):
            d_s, row_moment, column_moment = self.ds(Window(ordered_row, column, count, width))
            if d_x is not None:
                d_x = d_x + self._gemm(d_s, self.padded.y, column, width, axis=1)
            if d_y[i] is not None:
                d_y[i] = d_y[i] + self._gemm(d_s, self.padded.x, row, count, axis=0)
            if self.row_moment is not None:
                acc = acc.with_moments(row_moment, column_moment, row, column)
            # Serializes the windows, because several dS would otherwise be in memory at once. The barrier keeps the
            # additions before the next window, too.
            d_x, d_y[i] = lax.optimization_barrier((d_x, d_y[i]))
            ordered_row = row + zero_after((d_x, d_y[i]))
        return d_x, acc._replace(y=tuple(d_y))

    def _gemm(
        self,
        d_s: BFloat16[Array, "_ _"],
        features: BFloat16[Array, "_ _"],
        first: Int32[Array, ""],
        count: int,
        axis: int,
    ) -> Float32[Array, "_ {self.padded.width}"]:
        """Multiply dS of a window with features, in fp32.

        Args:
          d_s: bf16 terms of dS.
          features: bf16 terms of y for `dS @ y`, of x for `dS.T @ x`.
          first: first row of the features in the window.
          count: number of these rows.
          axis: contracted axis of dS: 1 with y, 0 with x.
        """
        padded = self.padded
        rows = lax.dynamic_slice_in_dim(features, first, count)
        terms = [rows[:, n * padded.width : (n + 1) * padded.width] for n in range(padded.num_terms)]
        columns = d_s.shape[1] // padded.num_ds_terms
        gemms = (
            matmul(d_s[:, p * columns : (p + 1) * columns], terms[q], contract=(axis, 0))
            for p, q in padded.gradient_pairs
        )
        return functools.reduce(jnp.add, gemms)

    def _zeros(self, shape: tuple[int, ...]) -> Array:
        return constant(shape, 0, jnp.float32, varying_like=self.padded.x)


def row_slices(
    acc: Float[Array, "rows k"] | None, padded: Padded, windows: WindowConfig, tile_rows: int
) -> tuple[Float[Array, "_ k"], ...] | None:
    """Split a padded row accumulator into row slices; None for None.

    There are several slices with bf16 features and fp32 accumulators, as in a ring, see `WindowConfig.row_slice`.
    """
    if acc is None:
        return None
    rows = size = acc.shape[0]
    if padded.num_terms == 1 and acc.dtype == jnp.float32:
        size = windows.row_slice(rows, tile_rows)
    return tuple(acc[n : n + size] for n in range(0, rows, size))


def combine_rows(combine: Callable[[Array, Array], Array], acc: Array, update: Array, first: Array) -> Array:
    """Combine `update` with the rows of `acc` from row `first` on."""
    if acc.shape == update.shape:
        return combine(acc, update.astype(acc.dtype))
    old = lax.dynamic_slice_in_dim(acc, first, update.shape[0])
    new = combine(old.astype(update.dtype), update).astype(acc.dtype)
    return lax.dynamic_update_slice_in_dim(acc, new, first, 0)


def _rows(array: Array, first: Array, count: int) -> Array:
    return array if array.shape[0] == count else lax.dynamic_slice_in_dim(array, first, count)
