"""Kernels of distillation for Hopper GPUs: epilogues of the similarity tiles of both models.

Each tile takes two GEMMs: the student's, then the teacher's.

Budget of a CTA, with 64 x 128 tiles for each of the two compute warpgroups:

    registers of a thread, of 255: 64 for each model's accumulator; forward 64 for each term, e between the two GEMMs, f
      and f (t - z) after both; backward 32 for a 64 x 64 subtile of dS and 16 for each column vector of a subtile
    SMEM, of 227 KiB: 192 KiB for all stages, 384 features of 128 rows and 128 columns; forward 4 KiB for each of
      two warpgroups to reduce two terms over rows, backward 8 KiB for each of two store slots of a warpgroup
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import BFloat16, Float32

from infcl_jax.ops.pairwise.base import Array
from infcl_jax.ops.pairwise.distillation.kernel_api import (
    BothPairs,
    DistillationOperands,
    DistillationWeights,
    KernelSums,
)
from infcl_jax.ops.pairwise.distillation.mosaic_columns import scratch, store_column_sums
from infcl_jax.ops.pairwise.kernel_api import Window
from infcl_jax.ops.pairwise.mosaic import (
    BACKWARD_OF_TWO,
    FORWARD_OF_TWO,
    MosaicKernels,
    SubtileStore,
    named_operands,
    subtile_offsets,
    traced_once,
)
from infcl_jax.ops.pairwise.mosaic_mainloop import run
from infcl_jax.ops.pairwise.mosaic_schedule import SUBTILE, Tiles, TileSchedule, WorkTile, broadcast

# Steps of two slices keep the loading warpgroup less busy. The forward pass has no registers left for them.
BACKWARD = dataclasses.replace(BACKWARD_OF_TWO, stages=3, slices=2, lag=2, delay=0)
ROW_SHIFTS = ("row_shift", "teacher_row_shift")
ROW_WEIGHTS = ("row_weight", "teacher_row_weight")
COLUMN_WEIGHTS = ("column_weight", "teacher_column_weight")


@dataclasses.dataclass(frozen=True)
class DistillationMosaic(MosaicKernels):
    """`Kernels` of both models for Hopper GPUs."""

    forward: Tiles = FORWARD_OF_TWO
    backward: tuple[tuple[float, Tiles], ...] = ((math.inf, BACKWARD),)

    @traced_once
    def sums(self, operands: DistillationOperands, window: Window, pairs: BothPairs) -> tuple[KernelSums, KernelSums]:
        """Implement `Kernels.sums`."""
        schedule = self._schedule(self.forward, operands, window, pairs)

        def student_sums(work: WorkTile, s: Array, prefetched: _Prefetched) -> None:
            def terms(i: int, j: int) -> dict[str, Array]:
                return {"negatives": _student_term(work, _subtile(s, i, j), prefetched, i, j)}

            _store_sums(work, terms)

        def epilogue(work: WorkTile, s: Array, u: Array, prefetched: _Prefetched, carry: tuple) -> tuple:
            def terms(i: int, j: int) -> dict[str, Array]:
                return _teacher_terms(work, _subtile(s, i, j), _subtile(u, i, j), prefetched, i, j)

            _store_sums(work, terms)
            return carry

        shapes = {
            "row": (schedule.column_tiles, window.rows),
            "column": (window.rows // SUBTILE, window.columns),
        }
        partials = run(
            schedule,
            named_operands(operands, window),
            {
                f"{side}_{name}": jax.ShapeDtypeStruct(shape, jnp.float32)
                for side, shape in shapes.items()
                for name in KernelSums._fields
            },
            init=lambda work: (),
            prefetch=functools.partial(_prefetch, rows=ROW_SHIFTS, columns=()),
            epilogue=epilogue,
            finalize=lambda work, carry: None,
            between=student_sums,
            scratch={"column_scratch": scratch(2, self.forward.columns)},
        )
        row, column = (
            KernelSums(*(partials[f"{side}_{name}"].sum(0) for name in KernelSums._fields)) for side in shapes
        )
        return row, column

    @traced_once
    def ds(
        self,
        operands: DistillationOperands,
        weights: DistillationWeights,
        window: Window,
        pairs: BothPairs,
        *,
        terms: int,
        moments: bool,
    ) -> tuple[BFloat16[Array, "{window.rows} {terms*window.columns}"], Float32[Array, "{window.rows}"] | None, None]:
        """Implement `Kernels.ds`."""
        tiles = self.backward_tiles(operands.x, pairs[0])
        schedule = self._schedule(tiles, operands, window, pairs)

        def epilogue(work: WorkTile, s: Array, u: Array, prefetched: _Prefetched, carry: tuple) -> tuple:
            store = SubtileStore(work, terms)
            for i in subtile_offsets(tiles.rows):
                moment = None
                for j in subtile_offsets(tiles.columns):
                    s_ij = _subtile(s, i, j)
                    ds = _gradient(work, s_ij, _subtile(u, i, j), prefetched, i, j)
                    if moments:
                        reduced = (ds * s_ij).sum(1)
                        moment = reduced if moment is None else moment + reduced
                    store(ds, i, j)
                if moments:
                    work.refs["moment"][work.column_tile, pl.ds(work.row + i, SUBTILE)] = moment
            return carry

        results = {"ds": jax.ShapeDtypeStruct((window.rows, terms * window.columns), jnp.bfloat16)}
        if moments:
            results["moment"] = jax.ShapeDtypeStruct((schedule.column_tiles, window.rows), jnp.float32)
        named = {f"{name}_weight": w for name, w in weights._asdict().items() if w is not None}
        out = run(
            schedule,
            named_operands(operands, window) | named,
            results,
            init=lambda work: (),
            prefetch=functools.partial(_prefetch, rows=ROW_SHIFTS + ROW_WEIGHTS, columns=COLUMN_WEIGHTS),
            epilogue=epilogue,
            finalize=lambda work, carry: None,
        )
        return out["ds"], out["moment"].sum(0) if moments else None, None

    def _schedule(self, tiles: Tiles, operands: DistillationOperands, window: Window, pairs: BothPairs) -> TileSchedule:
        other = "teacher_x", "teacher_y"
        return self.schedule_of_two(tiles, window, operands.x, pairs[0], other, operands.teacher_x, pairs[1])


def _subtile(a: Array, i: int, j: int) -> Array:
    """Subtile at `[i, j]` of a tile."""
    return a[i : i + SUBTILE, j : j + SUBTILE]


class _Prefetched(NamedTuple):
    """Values loaded before the GEMMs of a tile, to hide their latency.

    Attributes:
      rows: row vectors of each subtile of rows, by name.
      columns: column vectors of the first subtile of columns, by name.
      may_match: for each subtile of rows, whether the tile may contain positives; empty for a block without positives.
    """

    rows: list[dict[str, Array]]
    columns: dict[str, Array]
    may_match: list[Array]


def _prefetch(work: WorkTile, rows: tuple[str, ...], columns: tuple[str, ...]) -> _Prefetched:
    """Load the named vectors of a tile."""
    offsets, may_match = subtile_offsets(work.schedule.tiles.rows), []
    if "labels" in work.refs:
        may_match = [work.may_contain_positives(i, work.first_column) for i in offsets]
    return _Prefetched(
        [{name: work.load_rows(name, i) for name in rows} for i in offsets],
        {name: work.load_columns(name, 0) for name in columns},
        may_match,
    )


def _load_mask(work: WorkTile, j: int) -> Array | None:
    """Load the shift of masked columns; None without masked columns."""
    return broadcast(work.load_columns("column_masked", j), 1) if "column_masked" in work.refs else None


def _exponential(logits: Array, row_shift: Array, mask: Array | None) -> Array:
    """Compute the exponentials of a subtile; 0 for masked pairs."""
    shift = broadcast(row_shift, 0)
    return jnp.exp2(logits - (shift if mask is None else shift + mask))


def _replace_positives(
    work: WorkTile, prefetched: _Prefetched, values: Array, i: int, j: int, replacement: Callable[[Array], Array]
) -> Array:
    """Replace the values of a subtile at its positives."""
    if not prefetched.may_match:
        return values

    def replaced(values: Array) -> Array:
        return jnp.where(work.is_positive(i, j, work.first_column), replacement(values), values)

    return lax.cond(prefetched.may_match[i // SUBTILE], replaced, lambda values: values, values)


def _store_sums(work: WorkTile, terms: Callable[[int, int], dict[str, Array]]) -> None:
    """Store the sums over columns and over rows of the terms of a tile.

    Args:
      work: tile of the warpgroup.
      terms: `terms(i, j)` of the subtile at `[i, j]`, by name in `KernelSums`.
    """
    tiles = work.schedule.tiles
    for i in subtile_offsets(tiles.rows):
        subtiles = [terms(i, j) for j in subtile_offsets(tiles.columns)]
        names = list(subtiles[0])
        for name in names:
            row_sum = functools.reduce(operator.add, [subtile[name].sum(1) for subtile in subtiles])
            work.refs[f"row_{name}"][work.column_tile, pl.ds(work.row + i, SUBTILE)] = row_sum
        partial, columns = lax.div(work.row + i, SUBTILE), pl.ds(work.column, tiles.columns)
        store_column_sums(
            [[subtile[name] for subtile in subtiles] for name in names],
            work.refs["column_scratch"].at[work.warpgroup],
            [work.refs[f"column_{name}"].at[partial, columns] for name in names],
        )


def _student_term(work: WorkTile, s: Array, prefetched: _Prefetched, i: int, j: int) -> Array:
    """Compute e of the negatives in a subtile."""
    e = _exponential(s * work.refs["scale"][0], prefetched.rows[i // SUBTILE]["row_shift"], _load_mask(work, j))
    return _replace_positives(work, prefetched, e, i, j, jnp.zeros_like)


def _teacher_terms(work: WorkTile, s: Array, u: Array, prefetched: _Prefetched, i: int, j: int) -> dict[str, Array]:
    """Compute f and f (t - z) of a subtile."""
    t = u * work.refs["teacher_scale"][0]
    f = _exponential(t, prefetched.rows[i // SUBTILE]["teacher_row_shift"], _load_mask(work, j))
    return {"teacher": f, "difference": f * (t - s * work.refs["scale"][0])}


def _gradient(work: WorkTile, s: Array, u: Array, prefetched: _Prefetched, i: int, j: int) -> Array:
    """Compute dS of a subtile, in fp32: two softmaxes that almost agree cancel."""
    rows = prefetched.rows[i // SUBTILE]
    columns = {name: work.load_columns(name, j) for name in COLUMN_WEIGHTS} if j else prefetched.columns
    mask = _load_mask(work, j)
    e = _exponential(s * work.refs["scale"][0], rows["row_shift"], mask)
    f = _exponential(u * work.refs["teacher_scale"][0], rows["teacher_row_shift"], mask)
    student, teacher = (
        value * (broadcast(rows[row], 0) + broadcast(columns[column], 1))
        for value, row, column in zip((e, f), ROW_WEIGHTS, COLUMN_WEIGHTS, strict=True)
    )

    def positive_weight(_: Array) -> Array:
        return broadcast(work.load_rows("positive_weight", i), 0)

    return _replace_positives(work, prefetched, student, i, j, positive_weight) - teacher


KERNELS = DistillationMosaic
