"""Main loop of the Hopper kernels, in Pallas Mosaic GPU.

One loop over similarity tiles serves every kernel. Two warpgroups run `wgmma` and the epilogue of each tile in
registers. CTAs work in clusters of two that share row tiles by multicast. Persistent CTAs stay on the GPU until all
tiles are done. The second warpgroup starts a few steps after the first, so that the epilogue of one overlaps with the
GEMM of the other. It also streams the feature tiles into SMEM with TMA: a slot is free once both have read it, and the
second is the last to do so. A third warpgroup for the transfers would need `setmaxnreg` to leave enough registers to
the other two, which nvJitLink, the assembler of JAX 0.12, ignores.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from infcl_jax.ops.common.gpu import SWIZZLE_BYTES
from infcl_jax.ops.pairwise.base import Array
from infcl_jax.ops.pairwise.mosaic_schedule import (
    SUBTILE,
    TILE_K,
    WARPGROUPS,
    Product,
    TileSchedule,
    WorkTile,
    window_offset,
)

LOADER = WARPGROUPS - 1  # index of the warpgroup that loads the feature tiles

Origin = tuple[Array, Array]  # first row and column of a tile in the operands
State = tuple[Array, Origin]  # step of this warpgroup, and origin of the tile that was loaded last

_TRANSFORMS: Any = (plgpu.TilingTransform((8, TILE_K)), plgpu.SwizzleTransform(SWIZZLE_BYTES))  # type: ignore[abstract]


def run(
    schedule: TileSchedule,
    operands: dict[str, Array],
    results: dict[str, jax.ShapeDtypeStruct],
    *,
    init: Callable[[WorkTile], Any],
    prefetch: Callable[[WorkTile], Any],
    epilogue: Callable[..., Any],
    finalize: Callable[[WorkTile, Any], None],
    between: Callable[[WorkTile, Array, Any], None] | None = None,
    scratch: dict[str, Any] | None = None,
) -> dict[str, Array]:
    """Compute the tiles of `x @ y.T`, and of `schedule.others`, and call the epilogue on each.

    Args:
      schedule: tile schedule.
      operands: arrays by name, including "x" and "y" (concatenated bf16 terms of the features), and "first_row" and
        "first_column" of the window, int32 `[1]`.
      results: shapes and dtypes of the results by name.
      init: `init(work) -> carry` at the start of a task.
      prefetch: `prefetch(work) -> vectors` of a tile, before its GEMM.
      epilogue: `epilogue(work, *s, vectors, carry) -> carry` of a tile; `s` is fp32 `[rows, columns]` in registers, one
        array for each of `schedule.products`.
      finalize: `finalize(work, carry)` stores the carry at the end of a task.
      between: `between(work, s, vectors)` after each GEMM of a tile but the last. What it does instead of the epilogue
        overlaps with more of the other warpgroup's GEMMs.
      scratch: SMEM by name, beyond what `schedule.tiles` needs; it is in `work.refs` too.

    Returns:
      The results by name.
    """
    t = schedule.tiles
    scratch = scratch or {}

    def kernel(*refs: Any) -> None:
        *arrays, x_s, y_s, store_slots, full, empty, started, reduction_order = refs
        named = dict(zip([*operands, *results, *scratch], arrays, strict=True))
        named |= {"store_slots": store_slots, "reduction_order": reduction_order}
        warpgroup, member, cluster = (lax.axis_index(a) for a in ("warpgroup", "member", "cluster"))
        tasks = lax.div(schedule.tasks - cluster + schedule.grid_clusters - 1, schedule.grid_clusters)
        total = tasks * schedule.segment * sum(product.steps for product in schedule.products)
        window = window_offset(named, 0), window_offset(named, 1)
        pipeline = _Pipeline(schedule, named, window, x_s, y_s, full, empty, started, warpgroup, member, cluster, total)

        def compute_tile(task: WorkTile, r: Array, carried: tuple[State, Any]) -> tuple[State, Any]:
            state, carry = carried
            work = task.tile(r)
            state, range_to_load = pipeline.begin(work, state)
            vectors = prefetch(work)
            *before_last, last = schedule.products
            similarities: list[Array] = []
            for product in before_last:
                state, s = pipeline.multiply(product, range_to_load, state, lambda s: s)
                if between is not None:
                    between(work, s, vectors)
                similarities.append(s)
            return pipeline.multiply(
                last, range_to_load, state, lambda s: epilogue(work, *similarities, s, vectors, carry)
            )

        def compute_task(i: Array, state: State) -> State:
            task = pipeline.task(i)
            body = functools.partial(compute_tile, task)
            state, carry = lax.fori_loop(0, task.num_tiles, body, (state, init(task)))
            finalize(task, carry)
            return state

        state = pipeline.start()

        @pl.when(warpgroup == 1)
        def _() -> None:
            plgpu.barrier_arrive(reduction_order.at[0])  # warpgroup 0 reduces first, see `WorkTile.serialized`

        end, _ = lax.fori_loop(0, tasks, compute_task, state)
        plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == 0)
        def _() -> None:
            plgpu.barrier_wait(reduction_order.at[0])  # every arrival needs a wait

        pipeline.finish(end)

    smem = functools.partial(plgpu.SMEM, dtype=jnp.bfloat16, transforms=_TRANSFORMS)
    empty: Any = {"num_arrivals": WARPGROUPS, "num_barriers": t.stages}
    out = plgpu.kernel(
        kernel,
        out_type=[r.update(manual_axis_type=jax.typeof(operands["x"]).manual_axis_type) for r in results.values()],
        scratch_types=[
            *scratch.values(),
            smem((t.stages * t.slices, t.cta_rows, TILE_K)),
            smem((t.stages * t.slices, t.columns, TILE_K)),
            smem((WARPGROUPS, t.store_slots, SUBTILE, SUBTILE)) if t.store_slots else plgpu.Barrier(),  # placeholder
            plgpu.Barrier(num_arrivals=2 * t.slices, num_barriers=t.stages),  # of the copies of x and y
            plgpu.ClusterBarrier(collective_axes=("member",), **empty) if t.cluster > 1 else plgpu.Barrier(**empty),
            plgpu.Barrier(),
            plgpu.Barrier(num_barriers=WARPGROUPS),
        ],
        grid=(schedule.grid_clusters,),
        grid_names=("cluster",),
        cluster=(t.cluster,),
        cluster_names=("member",),
        num_threads=WARPGROUPS,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=t.reduction_bytes),
    )(*operands.values())
    return dict(zip(results, out, strict=True))


@dataclasses.dataclass(frozen=True)
class _Pipeline:
    """Pipeline of one warpgroup: feature tiles stream through the slots in SMEM, and wgmma multiplies them.

    Steps are counted over all tiles of a CTA, `steps` a tile; a step uses slot `step % stages`.

    Attributes:
      schedule: tile schedule.
      refs: operands, results and scratch by name.
      window: first row and column of the window, read from global memory once.
      x_s: slots of row features, `[stages * slices, rows, TILE_K]`.
      y_s: slots of column features, likewise.
      full: barriers of slots that hold the features of a step.
      empty: barriers of slots that all warpgroups that read them have multiplied.
      started: barrier of the start of the second warpgroup, see `Tiles.lag`.
      warpgroup: index of this warpgroup.
      member: index of this CTA in its cluster.
      cluster: index of the cluster.
      total: steps of all tasks of this CTA, except in a band; 0 without tasks.
    """

    schedule: TileSchedule
    refs: dict[str, Any]
    window: Origin
    x_s: Any
    y_s: Any
    full: Any
    empty: Any
    started: Any
    warpgroup: Array
    member: Array
    cluster: Array
    total: Array

    @property
    def steps(self) -> int:
        """Steps of a tile."""
        return sum(product.steps for product in self.schedule.products)

    @property
    def lag(self) -> int:
        """Steps by which the second warpgroup starts after the first."""
        return min(self.schedule.tiles.lag, self.schedule.products[0].steps)

    def task(self, i: Array) -> WorkTile:
        """Return the i-th task of this CTA, without a row tile."""
        schedule = self.schedule
        task = self.cluster + i * schedule.grid_clusters
        if schedule.band:
            first = self.refs["band_first"][task]
            return WorkTile(
                schedule,
                self.refs,
                self.warpgroup,
                column_partial=task,
                column_tile=first,
                first_row_tile=task,
                row_tile=task,
            )
        segment, cluster_tile = schedule.segment_and_columns(task)
        column_tile = cluster_tile * schedule.tiles.cluster + self.member
        column_partial, first_row_tile = segment * WARPGROUPS + self.warpgroup, segment * schedule.segment
        return WorkTile(schedule, self.refs, self.warpgroup, column_partial, column_tile, first_row_tile)

    def start(self) -> State:
        """Load the first steps, and let the second warpgroup wait for its start."""
        origin = jnp.int32(0), jnp.int32(0)
        if not self.schedule.band:
            origin = self._load_first(jnp.int32(0), self.total, origin)

        @pl.when((self.warpgroup == 1) & (self.total > 0) & (self.lag > 0))
        def _() -> None:
            plgpu.barrier_wait(self.started)

        return jnp.int32(0), origin

    def begin(self, work: WorkTile, state: State) -> tuple[State, tuple[Array, Array]]:
        """Begin a tile. Returns the range of steps that are loaded during its GEMMs, too."""
        stages, step = self.schedule.tiles.stages, state[0]
        if not self.schedule.band:
            return state, (jnp.int32(stages), self.total)
        first, limit = step + stages, step + self.steps  # the next tile is not known
        return (step, self._load_first(step, limit, self._origin(work))), (first, limit)

    def multiply(
        self, product: Product, range_to_load: tuple[Array, Array], state: State, use: Callable[[Array], Any]
    ) -> tuple[State, Any]:
        """Compute one similarity tile and return `use` of it."""
        t = self.schedule.tiles

        def scope(acc: Any) -> tuple[State, Any]:
            body = functools.partial(self._multiply_step, acc, range_to_load)
            step, origin = lax.fori_loop(0, product.steps, body, state)
            s = acc[...]
            return (step, self._release(step - 1, range_to_load, origin)), use(s)

        return pl.run_scoped(scope, plgpu.ACC((t.rows, t.columns), jnp.float32))

    def finish(self, end: Array) -> None:
        """Wait until every slot is free: the peer CTA may still multicast to this CTA or signal its barriers."""
        stages = self.schedule.tiles.stages

        @pl.when(self.warpgroup == LOADER)
        def _() -> None:
            @pl.loop(jnp.maximum(end - stages, 0), end)
            def _(step: Array) -> None:
                plgpu.barrier_wait(self.empty.at[lax.rem(step, stages)])

    def _multiply_step(self, acc: Any, range_to_load: tuple[Array, Array], k: Array, state: State) -> State:
        """Multiply the features of a step, and release the slot of the step before."""
        step, origin = state
        t = self.schedule.tiles
        slot = lax.rem(step, t.stages)
        plgpu.barrier_wait(self.full.at[slot])
        for i in self._slices(slot):
            plgpu.wgmma(acc, self.x_s.at[i, pl.ds(self.warpgroup * t.rows, t.rows)], self.y_s.at[i].T)
        plgpu.wgmma_wait(t.slices)
        origin = lax.cond(k > 0, lambda: self._release(step - 1, range_to_load, origin), lambda: origin)
        if self.lag:

            @pl.when((step == self.lag - 1) & (self.warpgroup == 0))
            def _() -> None:
                plgpu.barrier_arrive(self.started)

        return step + 1, origin

    def _release(self, step: Array, range_to_load: tuple[Array, Array], origin: Origin) -> Origin:
        """Free the slot of a step that this warpgroup has multiplied, and load a step into one freed before."""
        t = self.schedule.tiles
        plgpu.barrier_arrive(self.empty.at[lax.rem(step, t.stages)])
        return self._load(step - t.delay + t.stages, *range_to_load, origin)

    def _load_first(self, first: Array, limit: Array, origin: Origin) -> Origin:
        """Load the first steps, as many as there are slots."""
        stages = self.schedule.tiles.stages
        return lax.fori_loop(0, stages, lambda i, origin: self._load(first + i, first, limit, origin), origin)

    def _load(self, step: Array, first: Array, limit: Array, origin: Origin) -> Origin:
        """Load the features of a step from `first` to before `limit`, once its slot is free.

        `origin` belongs to the tile that was loaded last. Returns the origin of this step's tile.
        """

        def start() -> Origin:
            stages = self.schedule.tiles.stages
            slot, position = lax.rem(step, stages), lax.rem(step, self.steps)
            row, column = origin
            if not self.schedule.band:
                tile = lax.div(step, self.steps)
                task, r = lax.div(tile, self.schedule.segment), lax.rem(tile, self.schedule.segment)
                row, column = lax.cond(position == 0, lambda: self._origin(self.task(task).tile(r)), lambda: origin)

            @pl.when(step >= stages)
            def _() -> None:
                plgpu.barrier_wait(self.empty.at[slot])

            self._copy(slot, position, row, column)
            return row, column

        return lax.cond((self.warpgroup == LOADER) & (step >= first) & (step < limit), start, lambda: origin)

    def _copy(self, slot: Array, position: Array, row: Array, column: Array) -> None:
        """Copy the features of step `position` of the tile at `[row, column]` to a slot."""
        t = self.schedule.tiles
        rows, columns = (
            pl.ds(pl.multiple_of(row, SUBTILE), t.cta_rows),
            pl.ds(pl.multiple_of(column, SUBTILE), t.columns),
        )
        multicast = "member" if t.cluster > 1 else None
        begin = 0
        for product in self.schedule.products:

            @pl.when((position >= begin) & (position < begin + product.steps))
            def _(product: Product = product, index: Array = position - begin) -> None:
                for source, target in zip(self._slices(index), self._slices(slot), strict=True):
                    x_features, y_features = product.features(source)
                    x, y = self.refs[product.x].at[rows, x_features], self.refs[product.y].at[columns, y_features]
                    plgpu.copy_gmem_to_smem(x, self.x_s.at[target], self.full.at[slot], collective_axes=multicast)
                    plgpu.copy_gmem_to_smem(y, self.y_s.at[target], self.full.at[slot])

            begin += product.steps

    def _slices(self, step: Array) -> list[Array]:
        """Return the indices of a step's or slot's slices of `TILE_K` features."""
        slices = self.schedule.tiles.slices
        return [slices * step + i for i in range(slices)]

    def _origin(self, work: WorkTile) -> Origin:
        """Return the first row and column of a tile in the operands."""
        row, column = self.window
        return row + work.row_tile * self.schedule.tiles.cta_rows, column + work.column
