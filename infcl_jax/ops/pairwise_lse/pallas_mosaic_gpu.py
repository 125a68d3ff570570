"""Fused Pallas Mosaic GPU kernels for Hopper: epilogues of the similarity tiles.

Forward: the epilogue reduces the exponentials of a tile to row and column sums. Backward: it converts the recomputed
tile to dS, which two cuBLAS GEMMs multiply with the features.
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
from jaxtyping import BFloat16, Float32

from infcl_jax.ops.common.gpu import SM_COUNT
from infcl_jax.ops.pairwise_lse.base import Array
from infcl_jax.ops.pairwise_lse.fused_kernel_api import Operands, Pairs, Weights, Window, term_width
from infcl_jax.ops.pairwise_lse.pallas_mosaic_gpu_mainloop import run
from infcl_jax.ops.pairwise_lse.pallas_mosaic_gpu_positives import ds_by_id, named_weights, positive_sums
from infcl_jax.ops.pairwise_lse.pallas_mosaic_gpu_schedule import (
    SUBTILE,
    TILE_K,
    WGMMA_LAYOUT,
    Tiles,
    TileSchedule,
    WorkTile,
    broadcast,
    window_multiples,
)

# The fastest tile sizes on an H200, see docs/benchmarks.md.
FORWARD = Tiles()
BACKWARD = ((512, Tiles(store_slots=1)), (math.inf, Tiles(store_slots=2)))
PER_SAMPLE = Tiles(columns=64, store_slots=2)


def _traced_once(method: Callable) -> Callable:
    """Share one trace and one lowering between windows of equal size.

    Non-array arguments are static.
    """
    static = {"self", "pairs", "exclude", "columns", "maxima", "terms", "moments"}
    return jax.jit(method, static_argnames=[name for name in inspect.signature(method).parameters if name in static])


@dataclasses.dataclass(frozen=True)
class MosaicGpu:
    """`fused_kernel_api.Kernels` for Hopper GPUs.

    Attributes:
      forward: tile sizes of the sums with a shared scale.
      backward: (largest feature width, tile sizes) of dS with a shared scale, in increasing order of width.
      per_sample: tile sizes of both with per-sample scales, which need more registers.
      sm_count: number of SMs.
      persistent: whether CTAs are persistent, see `TileSchedule`.
    """

    forward: Tiles = FORWARD
    backward: tuple[tuple[float, Tiles], ...] = BACKWARD
    per_sample: Tiles = PER_SAMPLE
    sm_count: int = SM_COUNT
    persistent: bool = True

    @property
    def tile(self) -> tuple[int, int]:
        """Row and column multiples of every window."""
        return window_multiples((self.forward, self.per_sample, *(t for _, t in self.backward)))

    @property
    def depth(self) -> int:
        """Multiple to which the number of features is padded."""
        return TILE_K

    @_traced_once
    def sums(
        self, operands: Operands, window: Window, pairs: Pairs, *, exclude: bool, columns: bool, maxima: bool
    ) -> tuple[Float32[Array, "{window.rows}"], Float32[Array, "{window.columns}"] | None]:
        """Implement `Kernels.sums`."""
        schedule = self._schedule(self.forward, operands, window, pairs)
        combine, reduce = (jnp.maximum, jnp.max) if maxima else (jnp.add, jnp.sum)
        identity = -jnp.inf if maxima else 0.0
        per_sample, positives = operands.column_scale is not None, exclude and operands.labels is not None
        names = _column_names(operands)

        def init(work: WorkTile) -> tuple[Array, ...]:
            return _column_accumulators(schedule, identity) if columns else ()

        def epilogue(work: WorkTile, s: Array, rows: list[dict], carry: tuple[Array, ...]) -> tuple[Array, ...]:
            column_acc = list(carry)
            for i, row_vectors in _with_offsets(rows):
                row_acc = None
                for j, load_vectors in _with_offsets(_column_loaders(work, names)):
                    column_vectors = load_vectors()
                    row, column = _exponents(s[i : i + SUBTILE, j : j + SUBTILE], row_vectors, column_vectors)
                    if positives:
                        row, column = _without_positives(work, row, column, i, j)
                    if not maxima:
                        row, column = _exponentials(row, column)
                    reduced = reduce(row, 1)
                    row_acc = reduced if row_acc is None else combine(row_acc, reduced)
                    if columns:
                        column_acc[j // SUBTILE] = combine(column_acc[j // SUBTILE], row if column is None else column)
                work.refs["row"][work.column_tile, pl.ds(work.row + i, SUBTILE)] = row_acc
            return tuple(column_acc)

        def finalize(work: WorkTile, column_acc: tuple[Array, ...]) -> None:
            if columns:
                _store_columns(work, "column", column_acc, maxima)

        shapes = {"row": (schedule.column_tiles, window.rows)}
        if columns:
            shapes["column"] = (schedule.column_partials, window.columns)
        partials = run(
            schedule,
            _named_operands(operands, window, exclude),
            {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()},
            init=init,
            prefetch=lambda work: _row_vectors(work, per_sample),
            epilogue=epilogue,
            finalize=finalize,
        )
        return reduce(partials["row"], 0), reduce(partials["column"], 0) if columns else None

    @_traced_once
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
        """Implement `Kernels.ds`."""
        width = term_width(operands.x, pairs)
        tiles = next(t for widest, t in self.backward if width <= widest)
        schedule = self._schedule(tiles, operands, window, pairs)
        per_sample = operands.column_scale is not None
        columns, positives = weights.column is not None, operands.labels is not None
        column_moment = moments and columns
        # Overwriting dS at the positives excludes them and takes no registers. Moments need exponentials of zero there.
        overwrite = exclude and not moments
        names = _column_names(operands) + ["column_weight"] * columns

        def init(work: WorkTile) -> tuple:
            return _preload_columns(work, names), _column_accumulators(schedule, 0.0) if column_moment else ()

        def epilogue(work: WorkTile, s: Array, rows: list[tuple], carry: tuple) -> tuple:
            preloaded, moment_acc = carry
            moment_acc, store = list(moment_acc), SubtileStore(work, terms)
            for i, (row_vectors, row_weight) in _with_offsets(rows):
                row_moment = None
                for j, load_vectors in _with_offsets(_column_loaders(work, names, preloaded)):
                    column_vectors = load_vectors()
                    column_weight = column_vectors.pop("column_weight", None)
                    s_ij = s[i : i + SUBTILE, j : j + SUBTILE]
                    row, column = _exponents(s_ij, row_vectors, column_vectors)
                    if exclude and positives and moments:
                        row, column = _without_positives(work, row, column, i, j)
                    row, column = _exponentials(row, column)
                    if moments:
                        moment = (row * s_ij).sum(1)
                        row_moment = moment if row_moment is None else row_moment + moment
                    if column_moment:
                        moment_acc[j // SUBTILE] = moment_acc[j // SUBTILE] + column * s_ij
                    weigh = functools.partial(_weighted, row_weight=row_weight, column_weight=column_weight)
                    if weights.by_id is not None:
                        ds = ds_by_id(work, weigh, (row, column), s_ij, i, j, overwrite=exclude)
                    else:
                        ds = weigh(row, column)
                    if positives and weights.by_id is None:
                        ds = work.where_positive(ds, i, j, functools.partial(_with_weight, work, i, overwrite))
                    store(ds, i, j)
                if moments:
                    work.refs["row_moment"][work.column_tile, pl.ds(work.row + i, SUBTILE)] = row_moment
            return preloaded, tuple(moment_acc)

        def finalize(work: WorkTile, carry: tuple) -> None:
            if column_moment:
                _store_columns(work, "column_moment", carry[1])

        results = {"ds": jax.ShapeDtypeStruct((window.rows, terms * window.columns), jnp.bfloat16)}
        if moments:
            results["row_moment"] = jax.ShapeDtypeStruct((schedule.column_tiles, window.rows), jnp.float32)
        if column_moment:
            shape = (schedule.column_partials, window.columns)
            results["column_moment"] = jax.ShapeDtypeStruct(shape, jnp.float32)
        named = _named_operands(operands, window, positives)
        named |= named_weights(weights)

        def prefetch(work: WorkTile) -> list[tuple]:
            return [(v, work.load_rows("row_weight", i)) for i, v in _with_offsets(_row_vectors(work, per_sample))]

        out = run(schedule, named, results, init=init, prefetch=prefetch, epilogue=epilogue, finalize=finalize)
        row = out["row_moment"].sum(0) if moments else None
        return out["ds"], row, out["column_moment"].sum(0) if column_moment else None

    @_traced_once
    def positives(
        self, x: BFloat16[Array, "rows k"], y: BFloat16[Array, "rows k"], pairs: Pairs
    ) -> Float32[Array, "rows"]:
        """Implement `Kernels.positives`."""
        tiles = dataclasses.replace(self.forward, columns=self.forward.rows)
        width = term_width(x, pairs)
        schedule = TileSchedule(
            tiles, x.shape[0], y.shape[0], width, pairs, self.sm_count, self.persistent, diagonal=True
        )

        def epilogue(work: WorkTile, s: Array, vectors: tuple, carry: tuple) -> tuple:
            @pl.when(lax.div(lax.rem(work.column, tiles.cta_rows), tiles.rows) == work.warpgroup)
            def _() -> None:
                row, column = (plgpu.broadcasted_iota(jnp.int32, s.shape, axis, layout=WGMMA_LAYOUT) for axis in (0, 1))
                s_ii = jnp.where(row == column, s, jnp.zeros_like(s)).sum(1)
                work.refs["positive"][pl.ds(work.row, tiles.rows)] = s_ii

            return carry

        out = run(
            schedule,
            {"x": x, "y": y} | window_start(Window(jnp.int32(0), jnp.int32(0), *x.shape)),
            {"positive": jax.ShapeDtypeStruct((x.shape[0],), jnp.float32)},
            init=lambda work: (),
            prefetch=lambda work: (),
            epilogue=epilogue,
            finalize=lambda work, carry: None,
        )
        return out["positive"]

    @_traced_once
    def positive_sums(
        self, operands: Operands, pairs: Pairs, *, maxima: bool
    ) -> tuple[Float32[Array, "bx"], Float32[Array, "bx"], Float32[Array, "bx"]]:
        """Implement `Kernels.positive_sums`."""
        tiles = dataclasses.replace(self.forward, cluster=1, lag=0)
        return positive_sums(tiles, operands, pairs, self.sm_count, self.persistent, maxima=maxima)

    def _schedule(self, tiles: Tiles, operands: Operands, window: Window, pairs: Pairs) -> TileSchedule:
        tiles = tiles if operands.column_scale is None else self.per_sample
        width = term_width(operands.x, pairs)
        return TileSchedule(tiles, window.rows, window.columns, width, pairs, self.sm_count, self.persistent)


class SubtileStore:
    """Writer of bf16 subtiles of dS through SMEM.

    Attributes:
      work: tile of the warpgroup.
      terms: number of bf16 terms of dS; each rounds the residual of the ones before.
      stored: number of copies to global memory started for this tile.
    """

    def __init__(self, work: WorkTile, terms: int) -> None:
        """Start with all SMEM slots free."""
        self.work, self.terms, self.stored = work, terms, 0

    def __call__(self, ds: Array, i: int, j: int) -> None:
        """Store the subtile at `[i, j]` of the tile."""
        work, num_slots = self.work, self.work.schedule.tiles.store_slots
        for term in range(self.terms):
            slot = self.stored % num_slots
            rounded = ds.astype(jnp.bfloat16)
            plgpu.wait_smem_to_gmem(num_slots - 1, wait_read_only=True)
            work.refs["store_slots"][work.warpgroup, slot] = rounded
            plgpu.commit_smem()
            column = term * work.schedule.columns + work.column + j
            plgpu.copy_smem_to_gmem(
                work.refs["store_slots"].at[work.warpgroup, slot],
                work.refs["ds"].at[pl.ds(work.row + i, SUBTILE), pl.ds(column, SUBTILE)],
            )
            self.stored += 1
            if term + 1 < self.terms:
                ds = ds - rounded.astype(jnp.float32)


def _named_operands(operands: Operands, window: Window, labels: bool) -> dict[str, Array]:
    """Return kernel operands by name; labels and their ranges only if `labels`."""
    skipped = () if labels else ("labels", "lowest", "highest", "last")
    present = {name: a for name, a in operands._asdict().items() if a is not None and name not in skipped}
    return window_start(window) | present


def window_start(window: Window) -> dict[str, Array]:
    """Return the first row and column of a window as kernel operands, by name."""
    return {
        f"first_{axis}": jnp.asarray(first, jnp.int32).reshape(1)
        for axis, first in (("row", window.row), ("column", window.column))
    }


def _with_offsets(per_subtile: list) -> list[tuple[int, Any]]:
    """Pairs each element with the first row or column of its subtile."""
    return [(SUBTILE * index, element) for index, element in enumerate(per_subtile)]


def _row_vectors(work: WorkTile, per_sample: bool) -> list[dict[str, Array]]:
    names = ["row_scale", "row_shift"] + ["row_masked"] * per_sample
    return [{name: work.load_rows(name, i) for name in names} for i in range(0, work.schedule.tiles.rows, SUBTILE)]


def _column_names(operands: Operands) -> list[str]:
    names = ("column_shift", "column_scale", "column_masked")
    return [name for name in names if getattr(operands, name) is not None]


def _preload_columns(work: WorkTile, names: list[str]) -> list[dict[str, Array]]:
    """Load a column vector of each subtile for a whole task.

    Returns an empty list if there is more than one vector, because registers hold only one.
    """
    if len(names) > 1:
        return []
    return [{name: work.load_columns(name, j) for name in names} for j in _subtile_columns(work.schedule)]


def _column_loaders(
    work: WorkTile, names: list[str], preloaded: list[dict[str, Array]] | None = None
) -> list[Callable[[], dict[str, Array]]]:
    """Return a loader of the column vectors for each subtile.

    A loader returns the `preloaded` vectors if there are any. Otherwise it loads them from global memory.
    """
    if preloaded:
        return [functools.partial(dict, vectors) for vectors in preloaded]

    def load(j: int) -> dict[str, Array]:
        return {name: work.load_columns(name, j) for name in names}

    return [functools.partial(load, j) for j in _subtile_columns(work.schedule)]


def _subtile_columns(schedule: TileSchedule) -> range:
    """First column of each subtile."""
    return range(0, schedule.tiles.columns, SUBTILE)


def _exponents(s: Array, rows: dict[str, Array], columns: dict[str, Array]) -> tuple[Array, Array | None]:
    """Compute the exponents of the row sums and of the column sums.

    The second result is None if both are equal (shared scale).
    """
    rows = {name: broadcast(v, 0) for name, v in rows.items()}
    columns = {name: broadcast(v, 1) for name, v in columns.items()}
    scaled, shift = s * rows["row_scale"], rows["row_shift"]
    if "column_scale" in columns:
        row = scaled - (shift + columns["column_masked"])
        return row, s * columns["column_scale"] - (columns["column_shift"] + rows["row_masked"])
    return scaled - (shift + columns["column_shift"] if columns else shift), None


def _without_positives(work: WorkTile, row: Array, column: Array | None, i: int, j: int) -> tuple[Array, Array | None]:
    return work.where_positive((row, column), i, j, lambda z: jnp.full_like(z, -jnp.inf))


def _exponentials(row: Array, column: Array | None) -> tuple[Array, Array | None]:
    return jnp.exp2(row), None if column is None else jnp.exp2(column)


def _weighted(row: Array, column: Array | None, row_weight: Array, column_weight: Array | None) -> Array:
    """Compute dS of a subtile without the positives' weights."""
    row_weight = broadcast(row_weight, 0)
    if column_weight is None:
        return row * row_weight
    if column is None:
        return row * (row_weight + broadcast(column_weight, 1))
    return row * row_weight + column * broadcast(column_weight, 1)


def _with_weight(work: WorkTile, i: int, overwrite: bool, ds: Array) -> Array:
    """Add the positives' weights to a subtile of dS, or overwrite it with them."""
    weight = broadcast(work.load_rows("positive_weight", i), 0)
    return weight if overwrite else ds + weight


def _column_accumulators(schedule: TileSchedule, value: float) -> tuple[Array, ...]:
    """Return initial accumulators of the column reduction, one per subtile of columns.

    An accumulator is a whole subtile in registers, reduced elementwise over subtiles of rows. Its rows are reduced
    once, at the end of the task.
    """
    acc = jnp.full((SUBTILE, SUBTILE), value, jnp.float32)
    return tuple(plgpu.layout_cast(acc, WGMMA_LAYOUT) for _ in _subtile_columns(schedule))


def _store_columns(work: WorkTile, name: str, column_acc: tuple[Array, ...], maxima: bool = False) -> None:
    """Reduce column accumulators over rows and store the partial result."""
    with work.serialized():
        reduced = [acc.max(0) if maxima else acc.sum(0) for acc in column_acc]
    for j, partial in _with_offsets(reduced):
        work.refs[name][work.column_partial, pl.ds(work.column + j, SUBTILE)] = partial
