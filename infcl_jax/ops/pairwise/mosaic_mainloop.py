"""Warp-specialized main loop of the Hopper kernels, in Pallas Mosaic GPU.

One loop over similarity tiles serves every kernel. A producer warpgroup streams feature tiles into SMEM with TMA. Two
compute warpgroups run `wgmma` and the epilogue of each tile in registers. CTAs work in clusters of two that share row
tiles by multicast. Persistent CTAs stay on the GPU until all tiles are done. The second warpgroup starts a few steps
after the first, so that the epilogue of one overlaps with the GEMM of the other.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from infcl_jax.ops.common.gpu import SWIZZLE_BYTES, WARPGROUP_REGISTERS
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

PRODUCER = WARPGROUPS  # index of the producer warpgroup
PRODUCER_REGISTERS, COMPUTE_REGISTERS = WARPGROUP_REGISTERS[WARPGROUPS]

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
    multicast = "member" if t.cluster > 1 else None
    scratch = scratch or {}

    def kernel(*refs: Any) -> None:
        *arrays, x_s, y_s, store_slots, full, empty, started, reduction_order = refs
        named = dict(zip([*operands, *results, *scratch], arrays, strict=True))
        named |= {"store_slots": store_slots, "reduction_order": reduction_order}
        warpgroup, member, cluster = (lax.axis_index(a) for a in ("warpgroup", "member", "cluster"))
        tasks = lax.div(schedule.tasks - cluster + schedule.grid_clusters - 1, schedule.grid_clusters)

        def task_of(i: Array) -> WorkTile:
            """Return the i-th task of this CTA, without a row tile."""
            task = cluster + i * schedule.grid_clusters
            if schedule.band:
                return WorkTile(schedule, named, warpgroup, task, named["band_first"][task], task, task)
            segment, cluster_tile = schedule.segment_and_columns(task)
            column_tile = cluster_tile * t.cluster + member
            column_partial, first_row_tile = segment * WARPGROUPS + warpgroup, segment * schedule.segment
            return WorkTile(schedule, named, warpgroup, column_partial, column_tile, first_row_tile)

        def produce() -> None:
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")

            def load_tile(i: Array, r: Array, step: Array) -> Array:
                work = task_of(i).tile(r)
                for product, p, q in [(gemm, *pair) for gemm in schedule.products for pair in gemm.pairs]:

                    def load(k: Array, step: Array, product: Product = product, p: int = p, q: int = q) -> Array:
                        slot = lax.rem(step, t.stages)

                        @pl.when(step >= t.stages)
                        def _() -> None:
                            plgpu.barrier_wait(empty.at[slot])

                        def features(term: int) -> Any:
                            return pl.ds(term * product.width + k * TILE_K, TILE_K)

                        rows = pl.ds(window_offset(named, 0) + work.row_tile * t.cta_rows, t.cta_rows)
                        columns = pl.ds(window_offset(named, 1) + work.column, t.columns)
                        x, y = named[product.x].at[rows, features(p)], named[product.y].at[columns, features(q)]
                        plgpu.copy_gmem_to_smem(x, x_s.at[slot], full.at[slot], collective_axes=multicast)
                        plgpu.copy_gmem_to_smem(y, y_s.at[slot], full.at[slot])
                        return step + 1

                    step = lax.fori_loop(0, product.width // TILE_K, load, step)
                return step

            def load_task(i: Array, step: Array) -> Array:
                num_tiles = task_of(i).num_tiles if schedule.band else schedule.segment
                return lax.fori_loop(0, num_tiles, functools.partial(load_tile, i), step)

            steps = lax.fori_loop(0, tasks, load_task, jnp.int32(0))

            @pl.loop(jnp.maximum(steps - t.stages, 0), steps)
            def _(step: Array) -> None:
                # The peer CTA may still multicast tiles to this CTA or signal its barriers. Exit only after that.
                plgpu.barrier_wait(empty.at[lax.rem(step, t.stages)])

        def compute() -> None:
            plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")

            @pl.when((warpgroup == 1) & (tasks > 0) & (lag > 0))
            def _() -> None:
                plgpu.barrier_wait(started)

            @pl.when(warpgroup == 1)
            def _() -> None:
                plgpu.barrier_arrive(reduction_order.at[0])  # warpgroup 0 reduces first, see `WorkTile.serialized`

            def multiply(acc: Any, k: Array, step: Array) -> Array:
                slot = lax.rem(step, t.stages)
                plgpu.barrier_wait(full.at[slot])
                rows = pl.ds(warpgroup * t.rows, t.rows)
                plgpu.wgmma(acc, x_s.at[slot, rows], y_s.at[slot].T)
                plgpu.wgmma_wait(1)
                plgpu.barrier_arrive(empty.at[lax.rem(step + t.stages - 1, t.stages)], predicate=k > 0)
                if lag:

                    @pl.when((step == lag - 1) & (warpgroup == 0))
                    def _() -> None:
                        plgpu.barrier_arrive(started)

                return step + 1

            def compute_tile(task: WorkTile, r: Array, state: tuple[Array, Any]) -> tuple[Array, Any]:
                step, carry = state
                work = task.tile(r)
                vectors = prefetch(work)

                def multiply_all(product: Product, step: Array, use: Callable[[Array], Any]) -> tuple[Array, Any]:
                    """Compute one similarity tile and return `use` of it."""

                    def scope(acc: Any) -> tuple[Array, Any]:
                        next_step = lax.fori_loop(0, product.steps, functools.partial(multiply, acc), step)
                        s = acc[...]
                        plgpu.barrier_arrive(empty.at[lax.rem(next_step - 1, t.stages)])
                        return next_step, use(s)

                    return pl.run_scoped(scope, plgpu.ACC((t.rows, t.columns), jnp.float32))

                *first, last = schedule.products
                tiles: list[Array] = []
                for product in first:
                    step, s = multiply_all(product, step, lambda s: s)
                    if between is not None:
                        between(work, s, vectors)
                    tiles.append(s)
                return multiply_all(last, step, lambda s: epilogue(work, *tiles, s, vectors, carry))

            def compute_task(i: Array, step: Array) -> Array:
                task = task_of(i)
                body = functools.partial(compute_tile, task)
                step, carry = lax.fori_loop(0, task.num_tiles, body, (step, init(task)))
                finalize(task, carry)
                return step

            lax.fori_loop(0, tasks, compute_task, jnp.int32(0))
            plgpu.wait_smem_to_gmem(0)

            @pl.when(warpgroup == 0)
            def _() -> None:
                plgpu.barrier_wait(reduction_order.at[0])  # every arrival needs a wait

        lax.cond(warpgroup == PRODUCER, produce, compute)

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
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=t.reduction_bytes),
    )(*operands.values())
    return dict(zip(results, out, strict=True))
