"""Kernels of `pairwise_lse` for Hopper GPUs: epilogues of the similarity tiles."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import BFloat16, Float32

from infcl_jax.ops.pairwise.base import Array
from infcl_jax.ops.pairwise.kernel_api import Pairs, Window
from infcl_jax.ops.pairwise.lse.kernel_api import LseOperands, LseWeights
from infcl_jax.ops.pairwise.lse.mosaic_positives import ds_by_id, named_weights, positive_sums
from infcl_jax.ops.pairwise.mosaic import (
    BACKWARD_OF_TWO,
    FORWARD_OF_TWO,
    MosaicKernels,
    SubtileStore,
    named_operands,
    subtile_offsets,
    traced_once,
    with_offsets,
)
from infcl_jax.ops.pairwise.mosaic_mainloop import run
from infcl_jax.ops.pairwise.mosaic_schedule import SUBTILE, WGMMA_LAYOUT, Tiles, TileSchedule, WorkTile, broadcast

PER_SAMPLE = Tiles(columns=64, store_slots=2)
GUIDED_PER_SAMPLE = dataclasses.replace(BACKWARD_OF_TWO, columns=64, store_slots=1)


@dataclasses.dataclass(frozen=True)
class LseMosaic(MosaicKernels):
    """`LseKernels` for Hopper GPUs.

    Attributes:
      per_sample: tile sizes of sums and dS with per-sample scales, which need more registers.
      guided: tile sizes of sums, and of dS, with a guide.
      guided_per_sample: tile sizes of both with a guide and per-sample scales.
    """

    per_sample: Tiles = PER_SAMPLE
    guided: tuple[Tiles, Tiles] = (FORWARD_OF_TWO, BACKWARD_OF_TWO)
    guided_per_sample: Tiles = GUIDED_PER_SAMPLE

    @property
    def all_tiles(self) -> tuple[Tiles, ...]:
        """Tile sizes of all kernels."""
        return *super().all_tiles, self.per_sample, *self.guided, self.guided_per_sample

    def _schedule(
        self, operands: LseOperands, window: Window, pairs: Pairs, guide_pairs: Pairs, *, backward: bool
    ) -> TileSchedule:
        x, guide, per_sample = operands.x, operands.guide_x, operands.column_scale is not None
        if guide is not None:
            tiles, other = self.guided_per_sample if per_sample else self.guided[backward], ("guide_x", "guide_y")
            return self.schedule_of_two(tiles, window, x, pairs, other, guide, guide_pairs, longest_segment=1)
        tiles = self.backward_tiles(x, pairs) if backward else self.forward
        return self.schedule(self.per_sample if per_sample else tiles, window, x, pairs)

    @traced_once
    def sums(
        self,
        operands: LseOperands,
        window: Window,
        pairs: Pairs,
        *,
        exclude: bool,
        columns: bool,
        maxima: bool,
        guide_pairs: Pairs = (),
    ) -> tuple[Float32[Array, "{window.rows}"], Float32[Array, "{window.columns}"] | None]:
        """Implement `Kernels.sums`."""
        schedule = self._schedule(operands, window, pairs, guide_pairs, backward=False)
        combine, reduce = (jnp.maximum, jnp.max) if maxima else (jnp.add, jnp.sum)
        identity = -jnp.inf if maxima else 0.0
        positives = exclude and operands.labels is not None
        names = _column_names(operands)

        def init(work: WorkTile) -> tuple[Array, ...]:
            return _column_accumulators(schedule, identity) if columns else ()

        def epilogue(work: WorkTile, s: Array, *rest: Any) -> tuple[Array, ...]:
            *guide, rows, carry = rest
            column_acc = list(carry)
            for i, row_vectors in with_offsets(rows):
                row_acc = None
                for j, load_vectors in with_offsets(_column_loaders(work, names)):
                    column_vectors = load_vectors()
                    row, column = _exponents(s[i : i + SUBTILE, j : j + SUBTILE], row_vectors, column_vectors)
                    if positives:
                        row, column = _without_positives(work, row, column, i, j)
                    if not maxima:
                        row, column = _exponentials(row, column)
                    if guide:
                        kept = _kept(work, guide[0], i, j)
                        column = _where_kept(row if column is None else column, kept[1], identity)
                        row = _where_kept(row, kept[0], identity)
                    if columns:
                        column_acc[j // SUBTILE] = combine(column_acc[j // SUBTILE], row if column is None else column)
                    reduced = reduce(row, 1)
                    row_acc = reduced if row_acc is None else combine(row_acc, reduced)
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
            named_operands(operands if exclude else _without_labels(operands), window),
            {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()},
            init=init,
            prefetch=_row_vectors,
            epilogue=epilogue,
            finalize=finalize,
        )
        return reduce(partials["row"], 0), reduce(partials["column"], 0) if columns else None

    @traced_once
    def ds(
        self,
        operands: LseOperands,
        weights: LseWeights,
        window: Window,
        pairs: Pairs,
        *,
        exclude: bool,
        terms: int,
        moments: bool,
        guide_pairs: Pairs = (),
    ) -> tuple[
        BFloat16[Array, "{window.rows} {terms*window.columns}"],
        Float32[Array, "{window.rows}"] | None,
        Float32[Array, "{window.columns}"] | None,
    ]:
        """Implement `Kernels.ds`."""
        schedule = self._schedule(operands, window, pairs, guide_pairs, backward=True)
        columns, positives = weights.column is not None, operands.labels is not None
        column_moment = moments and columns
        # Overwriting dS at the positives excludes them and takes no registers. Moments need exponentials of zero there.
        overwrite = exclude and not moments
        names = _column_names(operands) + ["column_weight"] * columns

        def init(work: WorkTile) -> tuple:
            return _preload_columns(work, names), _column_accumulators(schedule, 0.0) if column_moment else ()

        def epilogue(work: WorkTile, s: Array, *rest: Any) -> tuple:
            *guide, rows, carry = rest
            preloaded, moment_acc = carry
            moment_acc, store = list(moment_acc), SubtileStore(work, terms)
            for i, (row_vectors, row_weight) in with_offsets(rows):
                row_moment = None
                for j, load_vectors in with_offsets(_column_loaders(work, names, preloaded)):
                    column_vectors = load_vectors()
                    column_weight = column_vectors.pop("column_weight", None)
                    s_ij = s[i : i + SUBTILE, j : j + SUBTILE]
                    row, column = _exponents(s_ij, row_vectors, column_vectors)
                    if exclude and positives and moments:
                        row, column = _without_positives(work, row, column, i, j)
                    row, column = _exponentials(row, column)
                    kept = _kept(work, guide[0], i, j) if guide else (None, None)
                    if moments:
                        moment = (_where_kept(row, kept[0]) * s_ij).sum(1)
                        row_moment = moment if row_moment is None else row_moment + moment
                    if column_moment:
                        moment_acc[j // SUBTILE] = moment_acc[j // SUBTILE] + _where_kept(column, kept[1]) * s_ij
                    weigh = functools.partial(_weighted, row_weight=row_weight, column_weight=column_weight, kept=kept)
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
        named = named_operands(operands, window) | named_weights(weights)

        def prefetch(work: WorkTile) -> list[tuple]:
            return [(v, work.load_rows("row_weight", i)) for i, v in with_offsets(_row_vectors(work))]

        out = run(schedule, named, results, init=init, prefetch=prefetch, epilogue=epilogue, finalize=finalize)
        row = out["row_moment"].sum(0) if moments else None
        return out["ds"], row, out["column_moment"].sum(0) if column_moment else None

    @traced_once
    def positive_sums(
        self, operands: LseOperands, pairs: Pairs, *, maxima: bool
    ) -> tuple[Float32[Array, "bx"], Float32[Array, "bx"], Float32[Array, "bx"]]:
        """Implement `LseKernels.positive_sums`."""
        tiles = dataclasses.replace(self.forward, cluster=1, lag=0)
        return positive_sums(self, tiles, operands, pairs, maxima=maxima)


def _without_labels(operands: LseOperands) -> LseOperands:
    return operands._replace(labels=None, lowest=None, highest=None, last=None)


def _row_vectors(work: WorkTile) -> list[dict[str, Array]]:
    names = ["row_scale", "row_shift"] + ["row_masked"] * ("row_masked" in work.refs)
    return [{name: work.load_rows(name, i) for name in names} for i in subtile_offsets(work.schedule.tiles.rows)]


def _column_names(operands: LseOperands) -> list[str]:
    names = ("column_shift", "column_scale", "column_masked")
    return [name for name in names if getattr(operands, name) is not None]


def _preload_columns(work: WorkTile, names: list[str]) -> list[dict[str, Array]]:
    """Load a column vector of each subtile for a whole task.

    Returns an empty list if there is more than one vector, because registers hold only one.
    """
    if len(names) > 1:
        return []
    return [{name: work.load_columns(name, j) for name in names} for j in subtile_offsets(work.schedule.tiles.columns)]


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

    return [functools.partial(load, j) for j in subtile_offsets(work.schedule.tiles.columns)]


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
    return scaled - (shift + columns["column_shift"] if "column_shift" in columns else shift), None


def _without_positives(work: WorkTile, row: Array, column: Array | None, i: int, j: int) -> tuple[Array, Array | None]:
    return work.where_positive((row, column), i, j, lambda z: jnp.full_like(z, -jnp.inf))


def _exponentials(row: Array, column: Array | None) -> tuple[Array, Array | None]:
    return jnp.exp2(row), None if column is None else jnp.exp2(column)


def _kept(work: WorkTile, t: Array, i: int, j: int) -> tuple[Array, Array | None]:
    """Return which pairs of a subtile the guide's similarities `t` leave in the row sums and in the column sums."""
    t = t[i : i + SUBTILE, j : j + SUBTILE]
    row = t <= broadcast(work.load_rows("row_threshold", i), 0)
    if "column_threshold" not in work.refs:
        return row, None
    return row, t <= broadcast(work.load_columns("column_threshold", j), 1)


def _where_kept(values: Array, kept: Array | None, otherwise: float = 0.0) -> Array:
    """Replace the values of pairs that the guide leaves out; None leaves out none."""
    return values if kept is None else jnp.where(kept, values, jnp.full_like(values, otherwise))


def _weighted(
    row: Array,
    column: Array | None,
    row_weight: Array,
    column_weight: Array | None,
    kept: tuple[Array | None, Array | None],
) -> Array:
    """Compute dS of a subtile without the positives' weights."""
    row_weight = _where_kept(broadcast(row_weight, 0), kept[0])
    if column_weight is None:
        return row * row_weight
    column_weight = _where_kept(broadcast(column_weight, 1), kept[1])
    if column is None:
        return row * (row_weight + column_weight)
    return row * row_weight + column * column_weight


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
    return tuple(plgpu.layout_cast(acc, WGMMA_LAYOUT) for _ in subtile_offsets(schedule.tiles.columns))


def _store_columns(work: WorkTile, name: str, column_acc: tuple[Array, ...], maxima: bool = False) -> None:
    """Reduce column accumulators over rows and store the partial result."""
    with work.serialized():
        reduced = [acc.max(0) if maxima else acc.sum(0) for acc in column_acc]
    for j, partial in with_offsets(reduced):
        work.refs[name][work.column_partial, pl.ds(work.column + j, SUBTILE)] = partial


KERNELS = LseMosaic
