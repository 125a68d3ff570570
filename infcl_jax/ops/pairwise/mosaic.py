"""Common part of the kernels for Hopper GPUs, in Pallas Mosaic GPU.

A loss adds the epilogues of its similarity tiles, see `mosaic_mainloop`. Forward: an epilogue reduces a tile to row and
column sums. Backward: it converts the recomputed tile to dS, which two cuBLAS GEMMs multiply with the features.
"""

import dataclasses
import inspect
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import BFloat16, Float32

from infcl_jax.ops.common.gpu import SM_COUNT
from infcl_jax.ops.pairwise.base import Array
from infcl_jax.ops.pairwise.kernel_api import Pairs, Window, term_width
from infcl_jax.ops.pairwise.mosaic_mainloop import run
from infcl_jax.ops.pairwise.mosaic_schedule import (
    SUBTILE,
    TILE_K,
    WGMMA_LAYOUT,
    Product,
    Tiles,
    TileSchedule,
    WorkTile,
    window_multiples,
)


def traced_once(method: Callable) -> Callable:
    """Share one trace and one lowering between windows of equal size.

    Non-array arguments are static.
    """
    static = {"self", "pairs", "guide_pairs", "exclude", "columns", "maxima", "terms", "moments"}
    return jax.jit(method, static_argnames=[name for name in inspect.signature(method).parameters if name in static])


# Tiles of two GEMMs, the largest whose accumulators fit in the registers, and as many stages as SMEM holds. The lag is
# close to the number of stages, because an epilogue overlaps with the other warpgroup's GEMM for that many steps. The
# lags and GROUP_BYTES are the fastest measured, see docs/archive/measurements.md.
FORWARD_OF_TWO = Tiles(rows=64, columns=128, stages=6, lag=5, delay=1)
BACKWARD_OF_TWO = Tiles(rows=64, columns=128, stages=6, lag=4, delay=1, store_slots=2)
# Bytes of the column features of a group of tiles: a sixth of the L2 of an H100 or H200, 50 MB (NVIDIA H100 Tensor Core
# GPU Architecture).
GROUP_BYTES = 8 << 20
FORWARD = Tiles()
BACKWARD = ((512, Tiles(store_slots=1)), (math.inf, Tiles(store_slots=2)))


@dataclasses.dataclass(frozen=True)
class MosaicKernels:
    """Common part of the `kernel_api.Kernels` for Hopper GPUs.

    The default tile sizes are the fastest on an H200, see docs/archive/measurements.md.

    Attributes:
      forward: tile sizes of the sums.
      backward: (largest feature width, tile sizes) of dS, in increasing order of width.
      sm_count: number of SMs.
      persistent: whether CTAs are persistent, see `TileSchedule`.
      group_bytes: most bytes of the column features of a group of tiles of two GEMMs, see `TileSchedule.group`.
    """

    forward: Tiles = FORWARD
    backward: tuple[tuple[float, Tiles], ...] = BACKWARD
    sm_count: int = SM_COUNT
    persistent: bool = True
    group_bytes: int = GROUP_BYTES

    @property
    def all_tiles(self) -> tuple[Tiles, ...]:
        """Tile sizes of all kernels."""
        return self.forward, *(tiles for _, tiles in self.backward)

    @property
    def tile(self) -> tuple[int, int]:
        """Row and column multiples of every window."""
        return window_multiples(self.all_tiles)

    @property
    def depth(self) -> int:
        """Multiple to which the number of features is padded."""
        return TILE_K * max(tiles.slices for tiles in self.all_tiles)

    def backward_tiles(self, x: Array, pairs: Pairs) -> Tiles:
        """Return the tile sizes of dS for row features `x`."""
        width = term_width(x, pairs)
        return next(tiles for widest, tiles in self.backward if width <= widest)

    def schedule(self, tiles: Tiles, window: Window, x: Array, pairs: Pairs, **options: Any) -> TileSchedule:
        """Return the schedule of a window; `options` are further fields of `TileSchedule`."""
        width = term_width(x, pairs)
        return TileSchedule(tiles, window.rows, window.columns, width, pairs, self.sm_count, self.persistent, **options)

    def schedule_of_two(
        self,
        tiles: Tiles,
        window: Window,
        x: Array,
        pairs: Pairs,
        other: tuple[str, str],
        other_x: Array,
        other_pairs: Pairs,
        **options: Any,
    ) -> TileSchedule:
        """Return the schedule of a window whose tiles take the GEMM of `x` and the one of the operands `other`."""
        row_bytes = (x.shape[1] + other_x.shape[1]) * x.dtype.itemsize
        product = Product(*other, term_width(other_x, other_pairs), other_pairs, tiles.slices)
        group = max(1, self.group_bytes // (tiles.cluster_columns * row_bytes))
        return self.schedule(tiles, window, x, pairs, others=(product,), group=group, **options)

    @traced_once
    def positives(
        self, x: BFloat16[Array, "rows k"], y: BFloat16[Array, "rows k"], pairs: Pairs
    ) -> Float32[Array, "rows"]:
        """Implement `LseKernels.positives`."""
        tiles = dataclasses.replace(self.forward, columns=self.forward.rows)
        window = Window(jnp.int32(0), jnp.int32(0), len(x), len(y))
        schedule = self.schedule(tiles, window, x, pairs, diagonal=True)

        def epilogue(work: WorkTile, s: Array, vectors: tuple, carry: tuple) -> tuple:
            @pl.when(lax.div(lax.rem(work.column, tiles.cta_rows), tiles.rows) == work.warpgroup)
            def _() -> None:
                row, column = (plgpu.broadcasted_iota(jnp.int32, s.shape, axis, layout=WGMMA_LAYOUT) for axis in (0, 1))
                s_ii = jnp.where(row == column, s, jnp.zeros_like(s)).sum(1)
                work.refs["positive"][pl.ds(work.row, tiles.rows)] = s_ii

            return carry

        out = run(
            schedule,
            {"x": x, "y": y} | window_start(window),
            {"positive": jax.ShapeDtypeStruct((x.shape[0],), jnp.float32)},
            init=lambda work: (),
            prefetch=lambda work: (),
            epilogue=epilogue,
            finalize=lambda work, carry: None,
        )
        return out["positive"]


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


def window_start(window: Window) -> dict[str, Array]:
    """Return the first row and column of a window as kernel operands, by name."""
    return {
        f"first_{axis}": jnp.asarray(first, jnp.int32).reshape(1)
        for axis, first in (("row", window.row), ("column", window.column))
    }


def with_offsets(per_subtile: Iterable[Any]) -> list[tuple[int, Any]]:
    """Pair each element with the first row or column of its subtile."""
    return [(SUBTILE * index, element) for index, element in enumerate(per_subtile)]


def subtile_offsets(length: int) -> range:
    """Return the first row or column of each subtile."""
    return range(0, length, SUBTILE)


def named_operands(operands: Any, window: Window) -> dict[str, Array]:
    """Return the arrays of a named tuple by name, without those that are None, and the start of a window."""
    return window_start(window) | {name: a for name, a in operands._asdict().items() if a is not None}
