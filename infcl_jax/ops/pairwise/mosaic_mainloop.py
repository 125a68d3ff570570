"""Main loop of the Hopper kernels, in Pallas Mosaic GPU.

One loop over similarity tiles serves every kernel. Two warpgroups run `wgmma` and the epilogue of each tile in
registers. CTAs work in clusters of two that share row tiles by multicast. Persistent CTAs stay on the GPU until all
tiles are done. The second warpgroup starts a few steps after the first, so that the epilogue of one overlaps with the
GEMM of the other. It also streams the feature tiles into SMEM with TMA: a slot is free once both have read it, and the
second is the last to do so. A third warpgroup for the transfers would need `setmaxnreg` to leave enough registers to
the other two, which nvJitLink, the assembler of JAX 0.12, ignores.
"""

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

State = tuple[Array, tuple[Array, Array]]  # step of this warpgroup, and origin of the tile that was loaded last

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
      scratch: SMEM by name, beyond that of `schedule.tiles`, which is in `work.refs` too.

    Returns:
      The results by name.
    """
    t = schedule.tiles
    lag = min(t.lag, schedule.products[0].steps)
    steps = sum(product.steps for product in schedule.products)  # of a tile
    multicast = "member" if t.cluster > 1 else None
    scratch = scratch or {}

    def kernel(*refs: Any) -> None:
        *arrays, x_s, y_s, store_slots, full, empty, started, reduction_order = refs
        named = dict(zip([*operands, *results, *scratch], arrays, strict=True))
        named |= {"store_slots": store_slots, "reduction_order": reduction_order}
        warpgroup, member, cluster = (lax.axis_index(a) for a in ("warpgroup", "member", "cluster"))
        tasks = lax.div(schedule.tasks - cluster + schedule.grid_clusters - 1, schedule.grid_clusters)
        total = tasks * schedule.segment * steps  # except in a band

        def task_of(i: Array) -> WorkTile:
            """Return the i-th task of this CTA, without a row tile."""
            task = cluster + i * schedule.grid_clusters
            if schedule.band:
                return WorkTile(schedule, named, warpgroup, task, named["band_first"][task], task, task)
            segment, cluster_tile = schedule.segment_and_columns(task)
            column_tile = cluster_tile * t.cluster + member
            column_partial, first_row_tile = segment * WARPGROUPS + warpgroup, segment * schedule.segment
            return WorkTile(schedule, named, warpgroup, column_partial, column_tile, first_row_tile)

        def origin_of(work: WorkTile) -> tuple[Array, Array]:
            """Return the first row and column of a tile in the operands, whose window starts in global memory."""
            return window_offset(named, 0) + work.row_tile * t.cta_rows, work.first_column

        def load(step: Array, first: Array, limit: Array, origin: tuple[Array, Array]) -> tuple[Array, Array]:
            """Load the features of a step from `first` to before `limit`, once its slot is free.

            `origin` is the first row and column of the tile that was loaded last. Returns that of this step's tile.
            """

            def start() -> tuple[Array, Array]:
                slot, position = lax.rem(step, t.stages), lax.rem(step, steps)
                row, column = origin
                if not schedule.band:
                    tile = lax.div(step, steps)
                    task, r = lax.div(tile, schedule.segment), lax.rem(tile, schedule.segment)
                    row, column = lax.cond(position == 0, lambda: origin_of(task_of(task).tile(r)), lambda: origin)

                @pl.when(step >= t.stages)
                def _() -> None:
                    plgpu.barrier_wait(empty.at[slot])

                rows = pl.ds(pl.multiple_of(row, SUBTILE), t.cta_rows)
                columns = pl.ds(pl.multiple_of(column, SUBTILE), t.columns)
                begin = 0
                for product in schedule.products:

                    @pl.when((position >= begin) & (position < begin + product.steps))
                    def _(product: Product = product, index: Array = position - begin) -> None:
                        x_features, y_features = product.features(index)
                        x, y = named[product.x].at[rows, x_features], named[product.y].at[columns, y_features]
                        plgpu.copy_gmem_to_smem(x, x_s.at[slot], full.at[slot], collective_axes=multicast)
                        plgpu.copy_gmem_to_smem(y, y_s.at[slot], full.at[slot])

                    begin += product.steps
                return row, column

            return lax.cond((warpgroup == LOADER) & (step >= first) & (step < limit), start, lambda: origin)

        def load_first(first: Array, limit: Array, origin: tuple[Array, Array]) -> tuple[Array, Array]:
            """Load the first steps, as many as there are slots."""
            return lax.fori_loop(0, t.stages, lambda i, origin: load(first + i, first, limit, origin), origin)

        def release(step: Array, first: Array, limit: Array, origin: tuple[Array, Array]) -> tuple[Array, Array]:
            """Free the slot of a step that this warpgroup has multiplied, and load a step into one freed before."""
            plgpu.barrier_arrive(empty.at[lax.rem(step, t.stages)])
            return load(step - t.delay + t.stages, first, limit, origin)

        def multiply(acc: Any, first: Array, limit: Array, k: Array, state: State) -> State:
            step, origin = state
            slot = lax.rem(step, t.stages)
            plgpu.barrier_wait(full.at[slot])
            rows = pl.ds(warpgroup * t.rows, t.rows)
            plgpu.wgmma(acc, x_s.at[slot, rows], y_s.at[slot].T)
            plgpu.wgmma_wait(1)
            origin = lax.cond(k > 0, lambda: release(step - 1, first, limit, origin), lambda: origin)
            if lag:

                @pl.when((step == lag - 1) & (warpgroup == 0))
                def _() -> None:
                    plgpu.barrier_arrive(started)

            return step + 1, origin

        def compute_tile(task: WorkTile, r: Array, carried: tuple[State, Any]) -> tuple[State, Any]:
            (step, origin), carry = carried
            work = task.tile(r)
            first, limit = jnp.int32(t.stages), total
            if schedule.band:  # the next tile is not known
                first, limit, origin = step + t.stages, step + steps, origin_of(work)
                origin = load_first(step, limit, origin)
            vectors = prefetch(work)

            def multiply_all(product: Product, state: State, use: Callable[[Array], Any]) -> tuple[State, Any]:
                """Compute one similarity tile and return `use` of it."""

                def scope(acc: Any) -> tuple[State, Any]:
                    step, origin = lax.fori_loop(
                        0, product.steps, functools.partial(multiply, acc, first, limit), state
                    )
                    s = acc[...]
                    return (step, release(step - 1, first, limit, origin)), use(s)

                return pl.run_scoped(scope, plgpu.ACC((t.rows, t.columns), jnp.float32))

            *others, last = schedule.products
            tiles: list[Array] = []
            state = step, origin
            for product in others:
                state, s = multiply_all(product, state, lambda s: s)
                if between is not None:
                    between(work, s, vectors)
                tiles.append(s)
            return multiply_all(last, state, lambda s: epilogue(work, *tiles, s, vectors, carry))

        def compute_task(i: Array, state: State) -> State:
            task = task_of(i)
            body = functools.partial(compute_tile, task)
            state, carry = lax.fori_loop(0, task.num_tiles, body, (state, init(task)))
            finalize(task, carry)
            return state

        origin = jnp.int32(0), jnp.int32(0)
        if not schedule.band:
            origin = load_first(jnp.int32(0), total, origin)

        @pl.when((warpgroup == 1) & (tasks > 0) & (lag > 0))
        def _() -> None:
            plgpu.barrier_wait(started)

        @pl.when(warpgroup == 1)
        def _() -> None:
            plgpu.barrier_arrive(reduction_order.at[0])  # warpgroup 0 reduces first, see `WorkTile.serialized`

        end, _ = lax.fori_loop(0, tasks, compute_task, (jnp.int32(0), origin))
        plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == 0)
        def _() -> None:
            plgpu.barrier_wait(reduction_order.at[0])  # every arrival needs a wait

        @pl.when(warpgroup == LOADER)
        def _() -> None:
            @pl.loop(jnp.maximum(end - t.stages, 0), end)
            def _(step: Array) -> None:
                # The peer CTA may still multicast tiles to this CTA or signal its barriers. Exit only after that.
                plgpu.barrier_wait(empty.at[lax.rem(step, t.stages)])

    smem = functools.partial(plgpu.SMEM, dtype=jnp.bfloat16, transforms=_TRANSFORMS)
    empty: Any = {"num_arrivals": WARPGROUPS, "num_barriers": t.stages}
    out = plgpu.kernel(
        kernel,
        out_type=[r.update(manual_axis_type=jax.typeof(operands["x"]).manual_axis_type) for r in results.values()],
        scratch_types=[
            *scratch.values(),
            smem((t.stages, t.cta_rows, TILE_K)),
            smem((t.stages, t.columns, TILE_K)),
            smem((WARPGROUPS, t.store_slots, SUBTILE, SUBTILE)) if t.store_slots else plgpu.Barrier(),  # placeholder
            plgpu.Barrier(num_arrivals=2, num_barriers=t.stages),
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
