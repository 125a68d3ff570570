"""Sums over the rows of a tile for the Hopper kernels of distillation, in Mosaic GPU.

Each of the four warps has 16 of the 64 rows of a tile. A thread has two of these and a quarter of the columns: four
threads are side by side, eight below each other. Pallas reduces each column in a full butterfly, after which all eight
have the same sums. Here each step halves the columns of a thread. That takes 28 shuffles instead of 96 for 128 columns,
and an eighth of the SMEM to add the sums of the four warps.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, vector

from infcl_jax.ops.common.gpu import LANES, WARPS
from infcl_jax.ops.pairwise.base import Array
from infcl_jax.ops.pairwise.mosaic_schedule import SUBTILE, WARPGROUPS, WGMMA_LAYOUT

THREADS = WARPS * LANES
BLOCK = 8  # columns; each of four threads holds two, see `Layout.WGMMA`


def scratch(terms: int, columns: int) -> Any:
    """Return the SMEM of `store_column_sums`: `[warpgroups, warps, terms, columns]`."""
    return plgpu.SMEM((WARPGROUPS, WARPS, terms, columns), jnp.float32)


def store_column_sums(terms: Sequence[Sequence[Array]], smem: Any, results: Sequence[Any]) -> None:
    """Sum terms over the rows of a tile, and store the sums.

    Args:
      terms: for each term its fp32 subtiles `[SUBTILE, SUBTILE]`, from left to right.
      smem: SMEM of this warpgroup, fp32 `[WARPS, at least len(terms), columns]`.
      results: for each term the fp32 `[columns]` in global memory that receives its sums.
    """
    layouts = jax.tree.map(lambda _: WGMMA_LAYOUT, tuple(map(tuple, terms)))
    references = tuple(plgpu.RefType() for _ in results)

    @plgpu.inline_mgpu(arg_types=(layouts, plgpu.RefType(), references))
    def store(_: Any, terms: Any, smem: ir.Value, results: Sequence[ir.Value]) -> None:
        _store(terms, smem, results)

    store(tuple(map(tuple, terms)), smem, tuple(results))


def _store(terms: Sequence[Sequence[mgpu.FragmentedArray]], smem: ir.Value, results: Sequence[ir.Value]) -> None:
    columns, thread = len(terms[0]) * SUBTILE, arith.remui(mgpu.utils.thread_idx(), _i32(THREADS))
    warp, lane = arith.divui(thread, _i32(LANES)), arith.remui(thread, _i32(LANES))
    mgpu.utils.warpgroup_barrier()  # the last sums have been read
    for index, subtiles in enumerate(terms):
        rows = [pair for subtile in subtiles for pair in subtile.registers.reshape(-1, 2)]
        sums = _sum_over_warp([arith.addf(first, second) for first, second in rows], lane)
        for i, pair in enumerate(sums):
            # Threads one below the other have neighboring blocks of columns.
            block = arith.addi(arith.muli(arith.divui(lane, _i32(4)), _i32(len(sums))), _i32(i))
            column = arith.addi(arith.muli(block, _i32(BLOCK)), arith.muli(arith.remui(lane, _i32(4)), _i32(2)))
            vector.store(pair, smem, list(map(_index, (warp, _i32(index), column))))
    mgpu.utils.warpgroup_barrier()
    for first in range(0, columns, THREADS):
        column = arith.addi(_i32(first), arith.remui(thread, _i32(min(THREADS, columns - first))))
        for index, result in enumerate(results):
            warps = [memref.load(smem, list(map(_index, (_i32(warp), _i32(index), column)))) for warp in range(WARPS)]
            memref.store(functools.reduce(arith.addf, warps), result, [_index(column)])


def _sum_over_warp(values: list[ir.Value], lane: ir.Value) -> list[ir.Value]:
    """Sum values over the threads with equal columns, and distribute the sums over these threads.

    The first of them, from the top, gets the first eighth of the sums.
    """
    for distance in (16, 8, 4):
        half = len(values) // 2
        low = arith.cmpi(arith.CmpIPredicate.eq, arith.andi(lane, _i32(distance)), _i32(0))
        kept = [arith.select(low, *pair) for pair in zip(values[:half], values[half:], strict=True)]
        sent = [arith.select(low, *pair) for pair in zip(values[half:], values[:half], strict=True)]
        values = [arith.addf(k, mgpu.utils.shfl_bfly(s, distance)) for k, s in zip(kept, sent, strict=True)]
    return values


def _i32(value: int) -> ir.Value:
    return mgpu.c(value, ir.IntegerType.get_signless(32))


def _index(value: ir.Value) -> ir.Value:
    return arith.index_cast(ir.IndexType.get(), value)
