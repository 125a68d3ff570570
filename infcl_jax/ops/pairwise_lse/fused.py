"""Backend around the fused GPU kernels, in constant memory.

The kernels process windows: row and column ranges of a block, in tiles of bf16 operands (see `fused_kernel_api` and
`fused_operands`). This module selects the max-shift, splits a block into windows and reduces their results.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from infcl_jax.ops.pairwise_lse.base import (
    Array,
    Block,
    Cotangents,
    Gradient,
    LogSum,
    NeedsGrad,
    Sums,
    constant,
    finite_shift,
    matmul,
    round_up,
    zero_after,
    zero_gradients,
)
from infcl_jax.ops.pairwise_lse.chunking import loop_over_slices, update_rows
from infcl_jax.ops.pairwise_lse.fused_kernel_api import Kernels, Operands, Weights, Window
from infcl_jax.ops.pairwise_lse.fused_operands import LOG2E, Padded
from infcl_jax.ops.pairwise_lse.stabilization import factor, is_shared, shared_shift, shifted_log_sum, within_range

# Pairs of a window: 256 MiB of dS in bf16, and at most as much for partial sums (one per 128 columns).
WINDOW, FORWARD_WINDOW = 1 << 27, 1 << 32
# Rows plus columns above which the vectors of rows and columns take half of that memory.
LARGE = 1 << 18
# Factor by which windows shrink with fp32 features: tensor cores truncate at every accumulation, and the error grows
# with the length of a GEMM.
PRECISE = 8
# In a ring, bf16 features rotate with fp32 accumulators. A window then takes half the memory, and at most this many
# pairs per row and feature.
RING_WINDOW = 6
# Most row slices in a ring, and rows of each. Slices have separate accumulators and are unrolled, because XLA overlaps
# transfers with GEMMs but not with loops.
IN_LINE, IN_LINE_ROWS = 4, 1 << 14
# Bytes of the fp32 column gradients that stay in memory during the loop over rows.
PANEL = 128 << 20
# SMs of an H100 or H200 (SXM), and the tile of a library GEMM; both select the window size.
SM_COUNT, GEMM_TILE = 132, (128, 256)


@dataclasses.dataclass(frozen=True)
class Fused:
    """Computes a block with fused kernels.

    Attributes:
      kernels: kernels of the default device.
    """

    kernels: Kernels

    def forward(self, block: Block, *, exclude: bool, columns: bool) -> Sums:
        """Implements `base.Backend.forward`."""
        padded = Padded.of(block, self.kernels)
        bx, by = block.x.shape[0], block.y.shape[0]
        shared = shared_shift(block.x_scale), None if block.y_scale is None else shared_shift(block.y_scale)
        row, column = self._sweep(padded.operands(block, *shared), padded, exclude, columns)
        shifts = shared
        if not is_shared(block):
            exact = within_range(row[:bx], block.x_mask, by)
            if columns:
                exact &= within_range(column[:by], block.y_mask, bx)
            row, column, *shifts = lax.cond(
                exact, lambda: (row, column, *shared), lambda: self._max_shifted_sums(block, padded, exclude, columns)
            )
        elif columns:
            shifts = shared[0], shared[0]
        return Sums(
            shifted_log_sum(shifts[0], row[:bx]),
            shifted_log_sum(shifts[1], column[:by]) if columns else None,
            self._positives(block, padded),
        )

    def accumulators(self, block: Block, needs_grad: NeedsGrad, dtype: jnp.dtype) -> Gradient:
        """Implements `base.Backend.accumulators`, with padding.

        A shared scale needs no accumulator, see `gradient`.
        """
        shared = is_shared(block)
        padded = Padded.of(block, self.kernels)
        x = needs_grad.x or (shared and needs_grad.x_scale and not needs_grad.y)
        stored = NeedsGrad(x, needs_grad.y, needs_grad.x_scale and not shared, needs_grad.y_scale)
        features = [a[:, : padded.width] for a in (padded.x, padded.y)]
        acc = zero_gradients(block._replace(x=features[0], y=features[1]), stored, dtype)
        if acc.x is None:
            return acc
        rows = slice_rows = acc.x.shape[0]
        if padded.num_terms == 1 and dtype == jnp.float32 and rows <= IN_LINE * IN_LINE_ROWS:
            slice_rows = max(round_up(-(-rows // IN_LINE), self.kernels.tile[0]), IN_LINE_ROWS // 2)
        return acc._replace(x=tuple(acc.x[n : n + slice_rows] for n in range(0, rows, slice_rows)))

    def backward(self, block: Block, cotangents: Cotangents, acc: Gradient, *, exclude: bool) -> Gradient:
        """Implements `base.Backend.backward`."""
        padded = Padded.of(block, self.kernels)
        row_weight, column_weight = factor(cotangents.row, cotangents.row_weight), None
        if cotangents.column is not None:
            column_weight = factor(cotangents.column, cotangents.column_weight)
        if is_shared(block):
            operands = padded.operands(block, shared_shift(block.x_scale), None)
            scales = block.x_scale, block.x_scale
        else:
            operands = padded.operands(block, _finite_shift(cotangents.row), _finite_shift(cotangents.column))
            scales = block.x_scale, block.y_scale
        weights = Weights(
            scales[0] * row_weight,
            None if column_weight is None else scales[1] * column_weight,
            None if block.labels is None else cotangents.positive_weight,
        )
        moments = acc.x_scale is not None or acc.y_scale is not None
        grads = self._gradients(
            operands, padded, weights, _Accumulators(acc.x, acc.y), exclude=exclude, moments=moments
        )
        acc = acc._replace(x=grads.x, y=grads.y)
        if acc.x_scale is not None:
            acc = acc._replace(x_scale=acc.x_scale + grads.row_moment[: padded.bx] * row_weight)
        if acc.y_scale is not None:
            acc = acc._replace(y_scale=acc.y_scale + grads.column_moment[: padded.by] * column_weight)
        return acc

    def gradient(self, block: Block, cotangents: Cotangents, acc: Gradient, needs_grad: NeedsGrad) -> Gradient:
        """Implements `base.Backend.gradient`.

        The gradient of a shared scale is derived from the feature gradients.
        """
        padded = Padded.of(block, self.kernels)
        scale, x_scale = block.x_scale, acc.x_scale
        if acc.x is not None:
            acc = acc._replace(x=jnp.concatenate(acc.x))
        if needs_grad.x_scale and is_shared(block):
            # sum_ij dS_ij s_ij, without the positives' weights, is scale times the gradient of the scale.
            features, d = (padded.x, acc.x) if acc.x is not None else (padded.y, acc.y)
            in_block = (block.labels >= 0) & (block.labels < block.y.shape[0])
            positive = jnp.where(
                in_block, cotangents.positive_weight * cotangents.positive, jnp.zeros_like(in_block, scale.dtype)
            )
            x_scale = (padded.dot(features, d) - positive.sum()) / scale
        return Gradient(
            acc.x[: padded.bx, : padded.features] if needs_grad.x else None,
            acc.y[: padded.by, : padded.features] if needs_grad.y else None,
            x_scale,
            acc.y_scale,
        )

    def _max_shifted_sums(self, block: Block, padded: Padded, exclude: bool, columns: bool) -> tuple[Array | None, ...]:
        """Computes row and column sums with per-row and per-column maxima as shifts.

        Returns the sums and the shifts.
        """
        unshifted = padded.operands(block, jnp.zeros_like(block.x_scale), jnp.zeros_like(block.y[:, 0], jnp.float32))
        maxima = self._sweep(unshifted, padded, exclude, columns, maxima=True)
        shifts = [None if t is None else finite_shift(t) / LOG2E for t in maxima]
        shifts = [None if t is None else t[:n] for t, n in zip(shifts, (padded.bx, padded.by), strict=True)]
        row, column = self._sweep(padded.operands(block, *shifts), padded, exclude, columns)
        return row, column, *shifts

    def _sweep(
        self, operands: Operands, padded: Padded, exclude: bool, columns: bool, maxima: bool = False
    ) -> tuple[Array, Array | None]:
        """Computes all row and column sums, or maxima, window by window."""
        combine = jnp.maximum if maxima else jnp.add
        init = -jnp.inf if maxima else 0.0
        limit = FORWARD_WINDOW // len(padded.pairs)
        rows, cols = operands.x.shape[0], operands.y.shape[0]
        size = self._window(rows, cols, limit, padded.width)

        def row_window(row: Array, count: int, carry: tuple) -> tuple:
            def column_window(column: Array, width: int, carry: tuple) -> tuple:
                window = Window(row, column, count, width)
                window_sums = self.kernels.sums(
                    operands, window, padded.pairs, exclude=exclude, columns=columns, maxima=maxima
                )
                return tuple(
                    None if acc is None else _combine_rows(combine, acc, update, first)
                    for acc, update, first in zip(carry, window_sums, (row, column), strict=True)
                )

            return loop_over_slices(cols, size[1], column_window, carry)

        accs = tuple(
            constant((n,), init, jnp.float32, varying_like=operands.x) if needed else None
            for n, needed in ((rows, True), (cols, columns))
        )
        return loop_over_slices(rows, size[0], row_window, accs)

    def _gradients(
        self,
        operands: Operands,
        padded: Padded,
        weights: Weights,
        acc: "_Accumulators",
        *,
        exclude: bool,
        moments: bool,
    ) -> "_Accumulators":
        """Accumulates gradients over column panels, and row windows within each."""
        weights = padded.weights(weights)
        rows, cols = operands.x.shape[0], operands.y.shape[0]
        limit = _largest_window(rows, cols, padded, acc)
        size = self._window(acc.x[0].shape[0] if acc.x else rows, cols, limit, padded.width)
        panel = max(size[1], PANEL // (4 * padded.width) // size[1] * size[1])
        like = functools.partial(constant, varying_like=operands.x)

        def add_rows(
            row: Array, count: int, ordered_row: Array, column_slices: list, d_x: Array | None, acc: _Accumulators
        ) -> tuple:
            """Adds the windows of some rows and all `column_slices` to the gradients."""
            d_y = list(acc.y)
            for i, (column, width) in enumerate(column_slices):
                window = Window(ordered_row, column, count, width)
                d_s, row_moment, column_moment = self.kernels.weights(
                    operands,
                    weights,
                    window,
                    padded.pairs,
                    exclude=exclude,
                    terms=padded.num_ds_terms,
                    moments=moments,
                )
                if d_x is not None:
                    d_x = d_x + _product(d_s, operands.y, column, width, 1, padded)
                if d_y[i] is not None:
                    d_y[i] = d_y[i] + _product(d_s, operands.x, row, count, 0, padded)
                if moments:
                    acc = acc.with_moments(row_moment, column_moment, row, column)
                # Serializes the windows: several dS would otherwise be in memory at once. The barrier includes the
                # accumulated sums, not only the GEMMs.
                d_x, d_y[i] = lax.optimization_barrier((d_x, d_y[i]))
                ordered_row = row + zero_after((d_x, d_y[i]))
            return d_x, acc._replace(y=tuple(d_y))

        def add_row_slice(
            first: int, column_slices: list, d_x_slice: Array | None, acc: _Accumulators, previous: tuple
        ) -> tuple:
            """Adds all windows of the rows of `d_x_slice`, after slice `previous`."""
            count = rows if d_x_slice is None else d_x_slice.shape[0]
            if d_x_slice is not None and d_x_slice.dtype == jnp.float32 and count <= size[0]:
                # The GEMMs accumulate in place.
                ordered_row = first + zero_after((previous, acc.y)) if previous else jnp.int32(first)
                return add_rows(jnp.int32(first), count, ordered_row, column_slices, d_x_slice, acc)

            def row_window(row: Array, count: int, state: tuple) -> tuple:
                d_x_slice, acc = state
                d_x = None if d_x_slice is None else like((count, padded.width), 0, jnp.float32)
                d_x, acc = add_rows(first + row, count, first + row, column_slices, d_x, acc)
                return None if d_x_slice is None else _combine_rows(jnp.add, d_x_slice, d_x, row), acc

            return loop_over_slices(count, size[0], row_window, (d_x_slice, acc))

        def panel_step(first: Array, width: int, acc: _Accumulators) -> _Accumulators:
            x, y = acc.x, acc.y
            column_slices = [(first + c, min(size[1], width - c)) for c in range(0, width, size[1])]
            d_y = (
                None if y is None else _rows(y, column, count).astype(jnp.float32) for column, count in column_slices
            )
            acc, row = acc._replace(x=None, y=tuple(d_y)), 0
            d_x_slices: tuple = ()
            for d_x in x or (None,):
                d_x, acc = add_row_slice(row, column_slices, d_x, acc, d_x_slices[-1:])
                d_x_slices, row = (*d_x_slices, d_x), row + (0 if d_x is None else d_x.shape[0])
            for d, (column, _) in zip(acc.y, column_slices, strict=True) if y is not None else ():
                y = update_rows(y, d, column)
            return acc._replace(x=x and d_x_slices, y=y)

        init = acc._replace(
            row_moment=like((rows,), 0, jnp.float32) if moments else None,
            column_moment=like((cols,), 0, jnp.float32) if moments and weights.column is not None else None,
        )
        return loop_over_slices(cols, panel, panel_step, init)

    def _window(self, rows: int, columns: int, limit: int, width: int) -> tuple[int, int]:
        """Chooses the rows and columns of a window by estimated time.

        There are as few windows of at most `limit` pairs as possible, with GEMMs that fill the GPU.
        """
        tile_rows, tile_columns = self.kernels.tile

        def split(length: int, windows: int, tile: int) -> int:
            return round_up(-(-length // windows), tile)

        def time(size: tuple[int, int]) -> float:
            products = [(size[0], size[1]), (size[1], size[0])]
            work = sum(_waves(count, width) * depth for count, depth in products)
            return -(-rows // size[0]) * -(-columns // size[1]) * (work + WINDOW_COST)

        sizes = []
        for windows in range(1, max(2, columns // tile_columns + 1)):
            window_columns = split(columns, windows, tile_columns)
            window_rows = max(tile_rows, limit // window_columns // tile_rows * tile_rows)
            sizes.append((split(rows, -(-rows // window_rows), tile_rows), window_columns))
            if window_columns <= min(columns, 4096):
                break
        return min((s for s in sizes if s[0] * s[1] <= limit or s == sizes[-1]), key=time)

    def _positives(self, block: Block, padded: Padded) -> Array:
        """Computes each row's positive, 0 if it is in another block."""
        bx, by = block.x.shape[0], block.y.shape[0]
        if block.labels is None:
            return jnp.zeros_like(block.x[:, 0], jnp.float32)
        labels = padded.labels(block)
        padded_rows = padded.x.shape[0]
        size = min(padded_rows, POSITIVES)
        positive = constant((padded_rows,), 0, jnp.float32, varying_like=padded.x)

        def rows(first: Array, count: int, positive: Array) -> Array:
            x = lax.dynamic_slice_in_dim(padded.x, first, count)
            row_labels = lax.dynamic_slice_in_dim(labels, first, count)
            update = self.kernels.positives(x, jnp.take(padded.y, row_labels, axis=0, mode="clip"), padded.pairs)
            return lax.dynamic_update_slice_in_dim(positive, update, first, 0)

        positive = loop_over_slices(padded_rows, size, rows, positive)[:bx] * padded.gain
        return jnp.where((block.labels >= 0) & (block.labels < by), positive, jnp.zeros_like(positive))


# Rows whose positives are gathered at a time.
POSITIVES = 1 << 15
# Launch overhead of one window, as the depth of a GEMM of one wave.
WINDOW_COST = 512


class _Accumulators(NamedTuple):
    """Padded accumulators; None for gradients that are not needed.

    Attributes:
      x: row gradients, in row slices.
      y: column gradients.
      row_moment: fp32 `sum_j er_ij s_ij` of each row.
      column_moment: fp32 `sum_i ec_ij s_ij` of each column.
    """

    x: tuple[Array, ...] | None
    y: Any
    row_moment: Array | None = None
    column_moment: Array | None = None

    def with_moments(self, row: Array, column: Array | None, first_row: Array, first_column: Array) -> "_Accumulators":
        """Adds the moments of one window."""
        return self._replace(
            row_moment=_combine_rows(jnp.add, self.row_moment, row, first_row),
            column_moment=None if column is None else _combine_rows(jnp.add, self.column_moment, column, first_column),
        )


def _largest_window(rows: int, columns: int, padded: Padded, acc: _Accumulators) -> int:
    """Returns the maximum number of pairs in a window of dS."""
    limit = WINDOW if rows + columns < LARGE else WINDOW // 2
    if padded.num_terms > 1:
        return limit // PRECISE
    fp32_accumulators = any(a is not None and a.dtype == jnp.float32 for a in (*(acc.x or ()), acc.y))
    return min(WINDOW // 2, RING_WINDOW * rows * padded.width) if fp32_accumulators else limit


def _finite_shift(sums: LogSum | None) -> Array | None:
    return None if sums is None else finite_shift(sums.shift)


def _waves(rows: int, width: int) -> int:
    """Number of GEMM waves on the GPU for a result `[rows, width]`."""
    return -(-(-(-rows // GEMM_TILE[0]) * -(-width // GEMM_TILE[1])) // SM_COUNT)


def _product(d_s: Array, features: Array, first: Array, count: int, axis: int, padded: Padded) -> Array:
    """Computes the GEMM of a window of dS with features, in fp32.

    The result is `dS @ y` (axis 1) or `dS.T @ x` (axis 0), with `count` rows of the features from row `first`.
    """
    rows = lax.dynamic_slice_in_dim(features, first, count)
    terms = [rows[:, p * padded.width : (p + 1) * padded.width] for p in range(padded.num_terms)]
    length = d_s.shape[1] // padded.num_ds_terms
    products = (
        matmul(d_s[:, p * length : (p + 1) * length], terms[q], contract=(axis, 0)) for p, q in padded.gradient_pairs
    )
    return functools.reduce(jnp.add, products)


def _combine_rows(combine: Any, acc: Array, update: Array, first: Array) -> Array:
    """Combines `update` with the rows of `acc` from row `first`."""
    if acc.shape == update.shape:
        return combine(acc, update.astype(acc.dtype))
    old = lax.dynamic_slice_in_dim(acc, first, update.shape[0])
    new = combine(old.astype(update.dtype), update).astype(acc.dtype)
    return lax.dynamic_update_slice_in_dim(acc, new, first, 0)


def _rows(array: Array, first: Array, count: int) -> Array:
    return array if array.shape[0] == count else lax.dynamic_slice_in_dim(array, first, count)
