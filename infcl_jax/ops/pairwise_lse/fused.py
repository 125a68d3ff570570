"""The backend around fused GPU kernels: any block, window by window, in constant memory.

The kernels know tiles of bf16 operands (`kernels`, made by `padding`); this module keeps the exponentials in range,
cuts a block into windows and turns what comes back into `tiles.Sums` and `tiles.Gradient`.
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
    Sums,
    Wanted,
    constant,
    finite_reference,
    matmul,
    no_gradient,
    round_up,
    zero_after,
)
from infcl_jax.ops.pairwise_lse.chunking import march, written
from infcl_jax.ops.pairwise_lse.fused_kernel_api import Kernels, Operands, Weights, Window
from infcl_jax.ops.pairwise_lse.fused_operands import LOG2E, Padded
from infcl_jax.ops.pairwise_lse.stabilization import against, factor, is_shared, shared_reference, within_range

# Pairs of a window: 256 MiB of dS in bf16, and as much for partial sums at most (one per 128 columns).
WINDOW, FORWARD_WINDOW = 1 << 27, 1 << 32
# Rows and columns beyond which the vectors that belong to them take half of that place.
LARGE = 1 << 18
# How much smaller windows are with fp32 features: tensor cores truncate as they add, which shows in long products.
PRECISE = 8
# Accumulators in fp32 travel with bf16 features: in a ring a window takes half that place, and at most so many elements
# for each of the rows' features.
TRAVELLING = 6
# In a ring rows are taken in so many parts at most, of so many rows, each with its accumulators, without a loop around
# them: XLA moves transfers beside products, not beside loops.
IN_LINE, IN_LINE_ROWS = 4, 1 << 14
# Bytes of the columns' fp32 gradient that are kept while the rows go by.
PANEL = 128 << 20
# Multiprocessors, and rows and columns of the tiles of library products, by which windows are chosen.
BLOCKS, LIBRARY_TILE = 132, (128, 256)


@dataclasses.dataclass(frozen=True)
class Fused:
    """Compares a block with fused kernels.

    Attributes:
      kernels: for the device at hand.
    """

    kernels: Kernels

    def forward(self, block: Block, *, exclude: bool, columns: bool) -> Sums:
        """See `tiles.Backend.forward`."""
        padded = Padded.of(block, self.kernels)
        bx, by = block.x.shape[0], block.y.shape[0]
        usual = shared_reference(block.x_scale), None if block.y_scale is None else shared_reference(block.y_scale)
        row, column = self._sweep(padded.operands(block, *usual), padded, exclude, columns)
        references = usual
        if not is_shared(block):
            exact = within_range(row[:bx], block.x_mask, by)
            if columns:
                exact &= within_range(column[:by], block.y_mask, bx)
            row, column, *references = lax.cond(
                exact, lambda: (row, column, *usual), lambda: self._against_maxima(block, padded, exclude, columns)
            )
        elif columns:
            references = usual[0], usual[0]
        return Sums(
            against(references[0], row[:bx]),
            against(references[1], column[:by]) if columns else None,
            self._positives(block, padded),
        )

    def accumulators(self, block: Block, wanted: Wanted, dtype: jnp.dtype) -> Gradient:
        """See `tiles.Backend.accumulators`: padded, and none for a shared scale, see `gradient`."""
        shared = is_shared(block)
        padded = Padded.of(block, self.kernels)
        x = wanted.x or (shared and wanted.x_scale and not wanted.y)
        kept = Wanted(x, wanted.y, wanted.x_scale and not shared, wanted.y_scale)
        features = [a[:, : padded.width] for a in (padded.x, padded.y)]
        found = no_gradient(block._replace(x=features[0], y=features[1]), kept, dtype)
        if found.x is None:
            return found
        rows = part = found.x.shape[0]
        if padded.parts == 1 and dtype == jnp.float32 and rows <= IN_LINE * IN_LINE_ROWS:
            part = max(round_up(-(-rows // IN_LINE), self.kernels.tile[0]), IN_LINE_ROWS // 2)
        return found._replace(x=tuple(found.x[n : n + part] for n in range(0, rows, part)))

    def backward(self, block: Block, cotangents: Cotangents, into: Gradient, *, exclude: bool) -> Gradient:
        """See `tiles.Backend.backward`."""
        padded = Padded.of(block, self.kernels)
        row_weight, column_weight = factor(cotangents.row, cotangents.row_weight), None
        if cotangents.column is not None:
            column_weight = factor(cotangents.column, cotangents.column_weight)
        if is_shared(block):
            operands = padded.operands(block, shared_reference(block.x_scale), None)
            scales = block.x_scale, block.x_scale
        else:
            operands = padded.operands(block, _reference(cotangents.row), _reference(cotangents.column))
            scales = block.x_scale, block.y_scale
        weights = Weights(
            scales[0] * row_weight,
            None if column_weight is None else scales[1] * column_weight,
            None if block.labels is None else cotangents.positive_weight,
        )
        moments = into.x_scale is not None or into.y_scale is not None
        found = self._gradients(operands, padded, weights, _Found(into.x, into.y), exclude=exclude, moments=moments)
        into = into._replace(x=found.x, y=found.y)
        if into.x_scale is not None:
            into = into._replace(x_scale=into.x_scale + found.row_moment[: padded.bx] * row_weight)
        if into.y_scale is not None:
            into = into._replace(y_scale=into.y_scale + found.column_moment[: padded.by] * column_weight)
        return into

    def gradient(self, block: Block, cotangents: Cotangents, found: Gradient, wanted: Wanted) -> Gradient:
        """See `tiles.Backend.gradient`: the gradient of a shared scale comes from those of the features."""
        padded = Padded.of(block, self.kernels)
        scale, x_scale = block.x_scale, found.x_scale
        if found.x is not None:
            found = found._replace(x=jnp.concatenate(found.x))
        if wanted.x_scale and is_shared(block):
            # sum_ij dS_ij s_ij, without the positives' own weights, is scale times the gradient of the scale.
            features, d = (padded.x, found.x) if found.x is not None else (padded.y, found.y)
            here = (block.labels >= 0) & (block.labels < block.y.shape[0])
            positive = jnp.where(
                here, cotangents.positive_weight * cotangents.positive, jnp.zeros_like(here, scale.dtype)
            )
            x_scale = (padded.dot(features, d) - positive.sum()) / scale
        return Gradient(
            found.x[: padded.bx, : padded.features] if wanted.x else None,
            found.y[: padded.by, : padded.features] if wanted.y else None,
            x_scale,
            found.y_scale,
        )

    def _against_maxima(self, block: Block, padded: Padded, exclude: bool, columns: bool) -> tuple[Array | None, ...]:
        """Sums of rows and columns against the maximum of each, and these references."""
        unshifted = padded.operands(block, jnp.zeros_like(block.x_scale), jnp.zeros_like(block.y[:, 0], jnp.float32))
        maxima = self._sweep(unshifted, padded, exclude, columns, maxima=True)
        top = [None if t is None else finite_reference(t) / LOG2E for t in maxima]
        top = [None if t is None else t[:n] for t, n in zip(top, (padded.bx, padded.by), strict=True)]
        row, column = self._sweep(padded.operands(block, *top), padded, exclude, columns)
        return row, column, *top

    def _sweep(
        self, operands: Operands, padded: Padded, exclude: bool, columns: bool, maxima: bool = False
    ) -> tuple[Array, Array | None]:
        """Sums, or maxima, of all exponentials over columns and over rows."""
        combine = jnp.maximum if maxima else jnp.add
        start = -jnp.inf if maxima else 0.0
        limit = FORWARD_WINDOW // len(padded.pairs)
        rows, cols = operands.x.shape[0], operands.y.shape[0]
        size = self._window(rows, cols, limit, padded.width)

        def row_window(row: Array, count: int, carry: tuple) -> tuple:
            def column_window(column: Array, width: int, carry: tuple) -> tuple:
                window = Window(row, column, count, width)
                found = self.kernels.sums(
                    operands, window, padded.pairs, exclude=exclude, columns=columns, maxima=maxima
                )
                return tuple(
                    None if total is None else _combined(combine, total, part, at)
                    for total, part, at in zip(carry, found, (row, column), strict=True)
                )

            return march(cols, size[1], column_window, carry)

        empty = tuple(
            constant((n,), start, jnp.float32, varying_like=operands.x) if kept else None
            for n, kept in ((rows, True), (cols, columns))
        )
        return march(rows, size[0], row_window, empty)

    def _gradients(
        self, operands: Operands, padded: Padded, weights: Weights, found: "_Found", *, exclude: bool, moments: bool
    ) -> "_Found":
        """Adds up gradients, panel after panel of columns, and in each window after window of rows."""
        weights = padded.weights(weights)
        rows, cols = operands.x.shape[0], operands.y.shape[0]
        limit = _largest_window(rows, cols, padded, found)
        size = self._window(found.x[0].shape[0] if found.x else rows, cols, limit, padded.width)
        panel = max(size[1], PANEL // (4 * padded.width) // size[1] * size[1])
        like = functools.partial(constant, varying_like=operands.x)

        def add_row(row: Array, count: int, turn: Array, places: list, d_x: Array | None, found: _Found) -> tuple:
            """Adds what the windows at all `places` of the columns make of some rows."""
            d_y = list(found.y)
            for i, (column, width) in enumerate(places):
                window = Window(turn, column, count, width)
                d_s, row_moment, column_moment = self.kernels.weights(
                    operands,
                    weights,
                    window,
                    padded.pairs,
                    exclude=exclude,
                    parts=padded.d_s_parts,
                    moments=moments,
                )
                if d_x is not None:
                    d_x = d_x + _product(d_s, operands.y, column, width, 1, padded)
                if d_y[i] is not None:
                    d_y[i] = d_y[i] + _product(d_s, operands.x, row, count, 0, padded)
                if moments:
                    found = found.with_moments(row_moment, column_moment, row, column)
                # One window after the other, or their dS would be in memory together; with the sums, not only products.
                d_x, d_y[i] = lax.optimization_barrier((d_x, d_y[i]))
                turn = row + zero_after((d_x, d_y[i]))
            return d_x, found._replace(y=tuple(d_y))

        def add_part(first: int, places: list, part: Array | None, found: _Found, before: tuple) -> tuple:
            """Adds what all windows make of the rows whose accumulators `part` is, after those `before`."""
            count = rows if part is None else part.shape[0]
            if part is not None and part.dtype == jnp.float32 and count <= size[0]:
                # The products go straight into the accumulators.
                turn = first + zero_after((before, found.y)) if before else jnp.int32(first)
                return add_row(jnp.int32(first), count, turn, places, part, found)

            def row_window(row: Array, count: int, state: tuple) -> tuple:
                part, found = state
                d_x = None if part is None else like((count, padded.width), 0, jnp.float32)
                d_x, found = add_row(first + row, count, first + row, places, d_x, found)
                return None if part is None else _combined(jnp.add, part, d_x, row), found

            return march(count, size[0], row_window, (part, found))

        def panel_step(first: Array, width: int, found: _Found) -> _Found:
            x, y = found.x, found.y
            places = [(first + c, min(size[1], width - c)) for c in range(0, width, size[1])]
            d_y = (None if y is None else _rows(y, place, part).astype(jnp.float32) for place, part in places)
            found, row = found._replace(x=None, y=tuple(d_y)), 0
            parts: tuple = ()
            for part in x or (None,):
                part, found = add_part(row, places, part, found, parts[-1:])
                parts, row = (*parts, part), row + (0 if part is None else part.shape[0])
            for d, (place, _) in zip(found.y, places, strict=True) if y is not None else ():
                y = written(y, d, place)
            return found._replace(x=x and parts, y=y)

        start = found._replace(
            row_moment=like((rows,), 0, jnp.float32) if moments else None,
            column_moment=like((cols,), 0, jnp.float32) if moments and weights.column is not None else None,
        )
        return march(cols, panel, panel_step, start)

    def _window(self, rows: int, columns: int, limit: int, width: int) -> tuple[int, int]:
        """Rows and columns of a window: as few windows of at most `limit` pairs as can be, filling the device."""
        tile_rows, tile_columns = self.kernels.tile

        def split(total: int, parts: int, tile: int) -> int:
            return round_up(-(-total // parts), tile)

        def time(size: tuple[int, int]) -> float:
            products = [(size[0], size[1]), (size[1], size[0])]
            work = sum(_waves(count, width) * depth for count, depth in products)
            return -(-rows // size[0]) * -(-columns // size[1]) * (work + WINDOW_COST)

        sizes = []
        for parts in range(1, max(2, columns // tile_columns + 1)):
            wide = split(columns, parts, tile_columns)
            tall = max(tile_rows, limit // wide // tile_rows * tile_rows)
            sizes.append((split(rows, -(-rows // tall), tile_rows), wide))
            if wide <= min(columns, 4096):
                break
        return min((s for s in sizes if s[0] * s[1] <= limit or s == sizes[-1]), key=time)

    def _positives(self, block: Block, padded: Padded) -> Array:
        """Each row's similarity with its positive, 0 for a row whose positive is elsewhere."""
        bx, by = block.x.shape[0], block.y.shape[0]
        if block.labels is None:
            return jnp.zeros_like(block.x[:, 0], jnp.float32)
        labels = padded.labels(block)
        total = padded.x.shape[0]
        size = min(total, POSITIVES)
        found = constant((total,), 0, jnp.float32, varying_like=padded.x)

        def rows(first: Array, count: int, found: Array) -> Array:
            x = lax.dynamic_slice_in_dim(padded.x, first, count)
            at = lax.dynamic_slice_in_dim(labels, first, count)
            part = self.kernels.positives(x, jnp.take(padded.y, at, axis=0, mode="clip"), padded.pairs)
            return lax.dynamic_update_slice_in_dim(found, part, first, 0)

        found = march(total, size, rows, found)[:bx] * padded.gain
        return jnp.where((block.labels >= 0) & (block.labels < by), found, jnp.zeros_like(found))


# Rows whose positives are gathered at a time.
POSITIVES = 1 << 15
# What starting the kernels of a window costs, in products of one wave.
WINDOW_COST = 512


class _Found(NamedTuple):
    """Gradients as they accumulate, padded; None for what is not wanted. Those of the rows in parts."""

    x: tuple[Array, ...] | None
    y: Any
    row_moment: Array | None = None
    column_moment: Array | None = None

    def with_moments(self, row: Array, column: Array | None, first_row: Array, first_column: Array) -> "_Found":
        """Adds the moments of one window."""
        return self._replace(
            row_moment=_combined(jnp.add, self.row_moment, row, first_row),
            column_moment=None if column is None else _combined(jnp.add, self.column_moment, column, first_column),
        )


def _largest_window(rows: int, columns: int, padded: Padded, found: _Found) -> int:
    """Most pairs of a window of dS."""
    limit = WINDOW if rows + columns < LARGE else WINDOW // 2
    if padded.parts > 1:
        return limit // PRECISE
    travelling = any(a is not None and a.dtype == jnp.float32 for a in (*(found.x or ()), found.y))
    return min(WINDOW // 2, TRAVELLING * rows * padded.width) if travelling else limit


def _reference(sums: LogSum | None) -> Array | None:
    return None if sums is None else finite_reference(sums.reference)


def _waves(rows: int, width: int) -> int:
    """How many tiles of a product `[rows, width]` follow each other on a multiprocessor."""
    return -(-(-(-rows // LIBRARY_TILE[0]) * -(-width // LIBRARY_TILE[1])) // BLOCKS)


def _product(d_s: Array, features: Array, first: Array, count: int, axis: int, padded: Padded) -> Array:
    """`dS @ y` (axis 1) or `dS.T @ x` (axis 0) of a window, fp32: `count` rows of the features from `first` on."""
    rows = lax.dynamic_slice_in_dim(features, first, count)
    parts = [rows[:, p * padded.width : (p + 1) * padded.width] for p in range(padded.parts)]
    length = d_s.shape[1] // padded.d_s_parts
    products = (
        matmul(d_s[:, p * length : (p + 1) * length], parts[q], contract=(axis, 0)) for p, q in padded.gradient_pairs
    )
    return functools.reduce(jnp.add, products)


def _combined(combine: Any, whole: Array, part: Array, first: Array) -> Array:
    """`whole` with `part` added (or otherwise combined) from row `first`; simply `part` if that is all of it."""
    if whole.shape == part.shape:
        return combine(whole, part.astype(whole.dtype))
    before = lax.dynamic_slice_in_dim(whole, first, part.shape[0])
    after = combine(before.astype(part.dtype), part).astype(whole.dtype)
    return lax.dynamic_update_slice_in_dim(whole, after, first, 0)


def _rows(whole: Array, first: Array, count: int) -> Array:
    return whole if whole.shape[0] == count else lax.dynamic_slice_in_dim(whole, first, count)
