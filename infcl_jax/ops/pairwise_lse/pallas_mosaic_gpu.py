"""Fused Pallas Mosaic GPU kernels for Hopper: epilogues of the similarity tiles.

Forward: one sweep over the tiles reduces one exponential to row and column sums. Backward: the tiles are recomputed and
converted to dS, followed by two GEMMs with the features.
"""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from infcl_jax.ops.common.gpu import SM_COUNT
from infcl_jax.ops.pairwise_lse.base import Array
from infcl_jax.ops.pairwise_lse.fused_kernel_api import Operands, Pairs, Weights, Window
from infcl_jax.ops.pairwise_lse.pallas_mosaic_gpu_mainloop import DEPTH, PIECE, TILE, Loop, Place, Tiles, run, spread

# Tile sizes were measured on an H200, see docs/benchmarks.md.
FORWARD = Tiles()
BACKWARD = ((512, Tiles(pieces=1)), (math.inf, Tiles(pieces=2)))
PER_SAMPLE = Tiles(columns=64, pieces=2)


def _traced_once(method: Callable) -> Callable:
    """Shares one trace and one lowering between windows of equal size.

    Non-array arguments are static.
    """
    static = {"self", "pairs", "exclude", "columns", "maxima", "terms", "moments"}
    return jax.jit(method, static_argnames=[name for name in inspect.signature(method).parameters if name in static])


@dataclasses.dataclass(frozen=True)
class MosaicGpu:
    """Implements `fused_kernel_api.Kernels` for Hopper GPUs.

    Attributes:
      forward: tile sizes of the sums.
      backward: (largest feature width, tile sizes) of dS, in increasing order of width.
      per_sample: tile sizes of both with per-sample scales, which need more registers.
      sm_count: number of SMs.
      persistent: whether CTAs are persistent, see `Loop`.
    """

    forward: Tiles = FORWARD
    backward: tuple[tuple[float, Tiles], ...] = BACKWARD
    per_sample: Tiles = PER_SAMPLE
    sm_count: int = SM_COUNT
    persistent: bool = True

    @property
    def tile(self) -> tuple[int, int]:
        """Row and column multiples of every window."""
        tiles = (self.forward, self.per_sample, *(t for _, t in self.backward))
        return max(t.block_rows for t in tiles), max(t.cluster_columns for t in tiles)

    @property
    def depth(self) -> int:
        """Multiple to which the number of features is padded."""
        return DEPTH

    @_traced_once
    def sums(
        self, operands: Operands, window: Window, pairs: Pairs, *, exclude: bool, columns: bool, maxima: bool
    ) -> tuple[Array, Array | None]:
        """Implements `Kernels.sums`."""
        loop = self._loop(self.forward, operands, window, pairs)
        combine = jnp.maximum if maxima else jnp.add
        start = -jnp.inf if maxima else 0.0
        per_sample, positives = operands.column_scale is not None, exclude and operands.labels is not None
        names = _column_names(operands)

        def begin(at: Place) -> tuple[Array, ...]:
            return _fold(loop, start) if columns else ()

        def finish(at: Place, s: Array, rows: list[dict], carry: tuple[Array, ...]) -> tuple[Array, ...]:
            fold = list(carry)
            for i, of_rows in _pieces(rows):
                total = None
                for j, of_columns in _pieces(_columns(at, names)):
                    of_columns = of_columns()
                    row, column = _exponents(s[i : i + PIECE, j : j + PIECE], of_rows, of_columns)
                    if positives:
                        row, column = _without_positives(at, row, column, i, j)
                    if not maxima:
                        row, column = _exponentials(row, column)
                    part = row.max(1) if maxima else row.sum(1)
                    total = part if total is None else combine(total, part)
                    if columns:
                        fold[j // PIECE] = combine(fold[j // PIECE], row if column is None else column)
                at.refs["row"][at.panel, pl.ds(at.row + i, PIECE)] = total
            return tuple(fold)

        def end(at: Place, fold: tuple[Array, ...]) -> None:
            if columns:
                _store_fold(at, "column", fold, maxima)

        results = {"row": (loop.panels, window.rows)}
        if columns:
            results["column"] = (loop.folds, window.columns)
        found = run(
            loop,
            _named(operands, window, exclude),
            {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in results.items()},
            begin=begin,
            prepare=lambda at: _row_vectors(at, per_sample),
            finish=finish,
            end=end,
        )
        reduce = jnp.max if maxima else jnp.sum
        return reduce(found["row"], 0), reduce(found["column"], 0) if columns else None

    @_traced_once
    def weights(
        self,
        operands: Operands,
        weights: Weights,
        window: Window,
        pairs: Pairs,
        *,
        exclude: bool,
        terms: int,
        moments: bool,
    ) -> tuple[Array, Array | None, Array | None]:
        """Implements `Kernels.weights`."""
        width = operands.x.shape[1] // (1 + max(p for p, _ in pairs))
        tiles = next(t for widest, t in self.backward if width <= widest)
        loop = self._loop(tiles, operands, window, pairs)
        per_sample = operands.column_scale is not None
        columns, positives = weights.column is not None, operands.labels is not None
        column_moment = moments and columns
        # Replacing dS at the positives excludes them without more registers. Moments need exact zeros instead.
        replace = exclude and not moments
        names = _column_names(operands) + ["column_weight"] * columns

        def begin(at: Place) -> tuple:
            return _carried(at, names), _fold(loop, 0.0) if column_moment else ()

        def finish(at: Place, s: Array, prepared: list[tuple], carry: tuple) -> tuple:
            vectors, fold = carry
            fold, store = list(fold), _Store(at, terms)
            for i, (of_rows, row_weight) in _pieces(prepared):
                moment = None
                for j, of_columns in _pieces(_columns(at, names, vectors)):
                    of_columns = of_columns()
                    column_weight = of_columns.pop("column_weight", None)
                    piece = s[i : i + PIECE, j : j + PIECE]
                    row, column = _exponents(piece, of_rows, of_columns)
                    if exclude and positives and moments:
                        row, column = _without_positives(at, row, column, i, j)
                    row, column = _exponentials(row, column)
                    if moments:
                        part = (row * piece).sum(1)
                        moment = part if moment is None else moment + part
                    if column_moment:
                        fold[j // PIECE] = fold[j // PIECE] + column * piece
                    d_s = _weighted(row, column, spread(row_weight, 0), column_weight)
                    if positives:
                        d_s = at.where_positive(d_s, i, j, functools.partial(_with_weight, at, i, replace))
                    store(d_s, i, j)
                if moments:
                    at.refs["row_moment"][at.panel, pl.ds(at.row + i, PIECE)] = moment
            return vectors, tuple(fold)

        def end(at: Place, carry: tuple) -> None:
            if column_moment:
                _store_fold(at, "column_moment", carry[1])

        results = {"d_s": jax.ShapeDtypeStruct((window.rows, terms * window.columns), jnp.bfloat16)}
        if moments:
            results["row_moment"] = jax.ShapeDtypeStruct((loop.panels, window.rows), jnp.float32)
        if column_moment:
            shape = (loop.folds, window.columns)
            results["column_moment"] = jax.ShapeDtypeStruct(shape, jnp.float32)
        named = _named(operands, window, positives)
        named |= {f"{name}_weight": w for name, w in weights._asdict().items() if w is not None}
        found = run(
            loop,
            named,
            results,
            begin=begin,
            prepare=lambda at: [(v, at.rows("row_weight", i)) for i, v in _pieces(_row_vectors(at, per_sample))],
            finish=finish,
            end=end,
        )
        row = found["row_moment"].sum(0) if moments else None
        return found["d_s"], row, found["column_moment"].sum(0) if column_moment else None

    @_traced_once
    def positives(self, x: Array, y: Array, pairs: Pairs) -> Array:
        """Implements `Kernels.positives`."""
        tiles = dataclasses.replace(self.forward, columns=self.forward.rows)
        parts = 1 + max(p for p, _ in pairs)
        depth = x.shape[1] // parts
        loop = Loop(tiles, x.shape[0], y.shape[0], depth, pairs, self.sm_count, self.persistent, diagonal=True)

        def finish(at: Place, s: Array, prepared: Any, carry: Any) -> Any:
            @pl.when(lax.div(lax.rem(at.column, tiles.block_rows), tiles.rows) == at.warpgroup)
            def _() -> None:
                row, column = (plgpu.broadcasted_iota(jnp.int32, s.shape, axis, layout=TILE) for axis in (0, 1))
                found = jnp.where(row == column, s, jnp.zeros_like(s)).sum(1)
                at.refs["positive"][pl.ds(at.row, tiles.rows)] = found

            return carry

        found = run(
            loop,
            {"x": x, "y": y} | _first(Window(jnp.int32(0), jnp.int32(0), *x.shape)),
            {"positive": jax.ShapeDtypeStruct((x.shape[0],), jnp.float32)},
            begin=lambda at: (),
            prepare=lambda at: (),
            finish=finish,
            end=lambda at, carry: None,
        )
        return found["positive"]

    def _loop(self, tiles: Tiles, operands: Operands, window: Window, pairs: Pairs) -> Loop:
        tiles = tiles if operands.column_scale is None else self.per_sample
        depth = operands.x.shape[1] // (1 + max(p for p, _ in pairs))
        return Loop(tiles, window.rows, window.columns, depth, pairs, self.sm_count, self.persistent)


class _Store:
    """Rounds and stores a tile of dS through SMEM, piece by piece.

    Attributes:
      at: position of the warpgroup.
      parts: bf16 parts to store; each is the rounding residual of the ones before.
    """

    def __init__(self, at: Place, parts: int) -> None:
        """Starts with all SMEM slots free."""
        self.at, self.parts, self.stored = at, parts, 0

    def __call__(self, d_s: Array, i: int, j: int) -> None:
        """Stores the piece of the tile at `[i, j]`."""
        at, slots = self.at, self.at.loop.tiles.pieces
        for part in range(self.parts):
            slot = self.stored % slots
            rounded = d_s.astype(jnp.bfloat16)
            plgpu.wait_smem_to_gmem(slots - 1, wait_read_only=True)
            at.refs["pieces"][at.warpgroup, slot] = rounded
            plgpu.commit_smem()
            column = part * at.loop.columns + at.column + j
            plgpu.copy_smem_to_gmem(
                at.refs["pieces"].at[at.warpgroup, slot],
                at.refs["d_s"].at[pl.ds(at.row + i, PIECE), pl.ds(column, PIECE)],
            )
            self.stored += 1
            if part + 1 < self.parts:
                d_s = d_s - rounded.astype(jnp.float32)


def _named(operands: Operands, window: Window, labels: bool) -> dict[str, Array]:
    """Names the kernel operands; those of labels only if `labels`."""
    skipped = () if labels else ("labels", "lowest", "highest")
    return _first(window) | {name: a for name, a in operands._asdict().items() if a is not None and name not in skipped}


def _first(window: Window) -> dict[str, Array]:
    return {
        f"first_{axis}": jnp.asarray(a, jnp.int32).reshape(1)
        for axis, a in (("row", window.row), ("column", window.column))
    }


def _pieces(per_piece: list) -> list[tuple[int, Any]]:
    """Pairs each element with the first row or column of its piece."""
    return [(PIECE * number, own) for number, own in enumerate(per_piece)]


def _row_vectors(at: Place, per_sample: bool) -> list[dict[str, Array]]:
    names = ["row_scale", "row_reference"] + ["row_masked"] * per_sample
    return [{name: at.rows(name, i) for name in names} for i in range(0, at.loop.tiles.rows, PIECE)]


def _column_names(operands: Operands) -> list[str]:
    names = ("column_reference", "column_scale", "column_masked")
    return [name for name in names if getattr(operands, name) is not None]


def _carried(at: Place, names: list[str]) -> list[dict[str, Array]]:
    """Loads column vectors that fit in registers for a whole task.

    The list has one dict per piece, and is empty if there are too many vectors.
    """
    if len(names) > 1:
        return []
    return [{name: at.columns(name, j) for name in names} for j in range(0, at.loop.tiles.columns, PIECE)]


def _columns(
    at: Place, names: list[str], carried: list[dict[str, Array]] | None = None
) -> list[Callable[[], dict[str, Array]]]:
    """Returns a loader of the column vectors for each piece.

    Loaders return `carried` registers if there are any, else they load on demand.
    """
    if carried:
        return [functools.partial(dict, own) for own in carried]
    places = range(0, at.loop.tiles.columns, PIECE)

    def load(j: int) -> dict[str, Array]:
        return {name: at.columns(name, j) for name in names}

    return [functools.partial(load, j) for j in places]


def _exponents(s: Array, rows: dict[str, Array], columns: dict[str, Array]) -> tuple[Array, Array | None]:
    """Computes the exponents of the row sums and of the column sums.

    The second result is None if both are equal (shared scale).
    """
    rows = {name: spread(v, 0) for name, v in rows.items()}
    columns = {name: spread(v, 1) for name, v in columns.items()}
    scaled, reference = s * rows["row_scale"], rows["row_reference"]
    if "column_scale" in columns:
        row = scaled - (reference + columns["column_masked"])
        return row, s * columns["column_scale"] - (columns["column_reference"] + rows["row_masked"])
    return scaled - (reference + columns["column_reference"] if columns else reference), None


def _without_positives(at: Place, row: Array, column: Array | None, i: int, j: int) -> tuple[Array, Array | None]:
    return at.where_positive((row, column), i, j, lambda z: jnp.full_like(z, -jnp.inf))


def _exponentials(row: Array, column: Array | None) -> tuple[Array, Array | None]:
    return jnp.exp2(row), None if column is None else jnp.exp2(column)


def _weighted(row: Array, column: Array | None, row_weight: Array, column_weight: Array | None) -> Array:
    """Computes dS of a piece without the positives' weights."""
    if column_weight is None:
        return row * row_weight
    if column is None:
        return row * (row_weight + spread(column_weight, 1))
    return row * row_weight + column * spread(column_weight, 1)


def _with_weight(at: Place, i: int, replace: bool, d_s: Array) -> Array:
    """Adds the positives' weights to a piece, or replaces it (`replace`)."""
    weight = spread(at.rows("positive_weight", i), 0)
    return weight if replace else d_s + weight


def _fold(loop: Loop, value: float) -> tuple[Array, ...]:
    """Returns the initial value of the column reduction.

    Rows of successive tiles are reduced elementwise in registers first.
    """
    piece = jnp.full((PIECE, PIECE), value, jnp.float32)
    return tuple(plgpu.layout_cast(piece, TILE) for _ in range(0, loop.tiles.columns, PIECE))


def _store_fold(at: Place, name: str, fold: tuple[Array, ...], maxima: bool = False) -> None:
    with at.alone():
        totals = [piece.max(0) if maxima else piece.sum(0) for piece in fold]
    for j, total in _pieces(totals):
        at.refs[name][at.fold, pl.ds(at.column + j, PIECE)] = total
