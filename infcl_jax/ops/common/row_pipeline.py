"""Pipeline of row tiles through Hopper SMEM, for Pallas Mosaic GPU kernels.

A program is a CTA of one warpgroup. It processes a range of rows in tiles. Each of its four warps processes whole rows,
so that reductions along a row stay within a warp and sums over rows stay in registers.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from infcl_jax.ops.common.gpu import LANES, RESERVED_BYTES, SHARED_MEMORY, WARPS


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Tile sizes of a kernel over rows.

    Attributes:
      rows: rows of a tile, a multiple of `WARPS`.
      stages: pipeline stages in SMEM; `RowStream.of` reduces them to fit.
      ctas_per_sm: CTAs per SM.
    """

    rows: int
    stages: int
    ctas_per_sm: int

    def __post_init__(self) -> None:
        if self.rows < WARPS or self.rows % WARPS:
            raise ValueError(f"expected a multiple of {WARPS} rows per tile, got {self.rows}")


@dataclasses.dataclass(frozen=True)
class RowStream:
    """Stream of row tiles of several arrays through SMEM.

    Attributes:
      tiling: tile sizes.
      rows: rows of the arrays, at least the rows of a tile.
      programs: number of CTAs. Each has a range of nearly equally many rows, at least the rows of a tile.
      arrays: shapes `[rows, width]` and dtypes by name.
      unit: alignment of ranges and tiles in rows. It divides `rows` and the rows of a tile.
    """

    tiling: Tiling
    rows: int
    programs: int
    arrays: dict[str, jax.ShapeDtypeStruct]
    unit: int = 1

    @classmethod
    def of(cls, tiling: Tiling, rows: int, sm_count: int, arrays: dict[str, jax.Array], unit: int = 1) -> "RowStream":
        """Create a stream with at most `tiling.stages` stages, as many as fit in SMEM."""
        tile_bytes = sum(tiling.rows * a.shape[1] * a.dtype.itemsize for a in arrays.values())
        available = SHARED_MEMORY // tiling.ctas_per_sm - RESERVED_BYTES
        tiling = dataclasses.replace(tiling, stages=max(1, min(tiling.stages, available // tile_bytes)))
        programs = min(tiling.ctas_per_sm * sm_count, rows // tiling.rows)
        shapes = {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in arrays.items()}
        return cls(tiling, rows, programs, shapes, unit)

    def call(
        self,
        kernel: Callable,
        out: tuple[jax.ShapeDtypeStruct, ...],
        *operands: jax.Array,
        approximate: bool = False,
    ) -> list[jax.Array]:
        """Launch the kernel with the operands, results and SMEM of `run`.

        Args:
          kernel: kernel function.
          out: shapes and dtypes of the results.
          *operands: arrays passed to the kernel.
          approximate: whether functions such as `exp2` are single instructions with an error of 2 units in the last
            place.
        """
        t = self.tiling
        manual = jax.typeof(operands[0]).manual_axis_type
        return plgpu.kernel(
            kernel,
            out_type=[a.update(manual_axis_type=manual) for a in out],
            scratch_types=[
                *(plgpu.SMEM((t.stages, t.rows, a.shape[1]), a.dtype) for a in self.arrays.values()),
                plgpu.Barrier(num_arrivals=len(self.arrays), num_barriers=t.stages),
            ],
            grid=(self.programs,),
            grid_names=("program",),
            compiler_params=plgpu.CompilerParams(
                approx_math=approximate, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
            ),
        )(*operands)

    def run(self, refs: dict[str, Any], smem: Any, body: Callable[["RowTile", Any], Any], carry: Any) -> Any:
        """Run `body(tile, carry) -> carry` on every tile of the program, inside the kernel.

        Args:
          refs: the arrays in global memory by name, in the order of `arrays`.
          smem: the SMEM that `call` passes to the kernel: a buffer per array and the barriers.
          body: function of a tile, whose `refs` are in SMEM, and the carry.
          carry: initial carry.
        """
        *buffers, full = smem
        stages = self.tiling.stages

        def fetch(index: jax.Array) -> None:
            slot = lax.rem(index, stages)
            rows = pl.ds(self.tile(index).first, self.tiling.rows)
            for ref, buffer in zip(refs.values(), buffers, strict=True):
                plgpu.copy_gmem_to_smem(
                    ref.at[rows], buffer.at[slot], full.at[slot], oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS
                )

        def step(index: jax.Array, carry: Any) -> Any:
            slot = lax.rem(index, stages)
            plgpu.barrier_wait(full.at[slot])
            tile_refs = {name: buffer.at[slot] for name, buffer in zip(refs, buffers, strict=True)}
            carry = body(dataclasses.replace(self.tile(index), refs=tile_refs), carry)
            plgpu.commit_smem()  # all warps have read the tile

            @pl.when(index + stages < self._tiles)
            def _() -> None:
                fetch(index + stages)

            return carry

        for index in range(stages):
            pl.when(index < self._tiles)(functools.partial(fetch, jnp.int32(index)))
        return lax.fori_loop(0, self._tiles, step, carry)

    def tile(self, index: jax.Array) -> "RowTile":
        """Return tile `index` of the program.

        The last tile ends with the program's last row, so it may overlap the tile before.
        """
        begin, count = self._range
        start = index * self.tiling.rows
        first = jnp.maximum(jnp.minimum(start, count - self.tiling.rows), 0)
        return RowTile(self, index, begin + first, begin + start)

    @property
    def _range(self) -> tuple[jax.Array, jax.Array]:
        """First row and number of rows of the program."""
        program = lax.axis_index("program")
        units, remainder = divmod(self.rows // self.unit, self.programs)
        first, count = (
            program * units + jnp.minimum(program, remainder),
            units + (program < remainder).astype(jnp.int32),
        )
        return first * self.unit, count * self.unit

    @property
    def _tiles(self) -> jax.Array:
        return lax.div(self._range[1] + self.tiling.rows - 1, self.tiling.rows)


@dataclasses.dataclass(frozen=True)
class RowTile:
    """Tile of rows.

    Attributes:
      stream: stream of the tile.
      index: index of the tile in the program.
      first: first row.
      first_new: first row that is not in an earlier tile.
      refs: SMEM references by name; None for a tile that is not in SMEM.
    """

    stream: RowStream
    index: jax.Array
    first: jax.Array
    first_new: jax.Array
    refs: dict[str, Any] | None = None

    def load(self, name: str, group: int, layout: Any) -> jax.Array:
        """Load four rows, from row `group` of the tile on, as fp32."""
        ref = self.refs[name].at[pl.ds(group, WARPS)]
        return plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)

    def is_new(self, group: int, layout: Any) -> jax.Array:
        """Return fp32 `[4]`: 1 for new rows, 0 for rows of earlier tiles."""
        row = plgpu.broadcasted_iota(jnp.int32, (WARPS,), 0, layout=layout) + (self.first + group)
        return (row >= self.first_new).astype(jnp.float32)

    def next_tile(self) -> "RowTile":
        """Return the next tile, or the last one again."""
        return self.stream.tile(self.index + 1)


def layouts(width: int, *dtypes: Any) -> tuple[Any, Any, Any]:
    """Layouts of `[4, width]` rows and of vectors `[4]` and `[width]`.

    Each warp holds one row. Its lanes hold vectors of up to 16 bytes in turn.
    """
    widest = max(jnp.dtype(d).itemsize for d in dtypes)
    vector = math.gcd(width // LANES, 16 // widest)
    tiling = plgpu.Tiling(((WARPS, LANES * vector), (vector,)))
    tile = plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)
    return tile, tile.reduce(1), tile.reduce(0)


def store(ref: Any, value: jax.Array) -> None:
    """Store float32 statistics or sums of rows to global memory.

    JAX 0.12 requires stores of less than a sector (32 bytes) per warp or of more than 16 bytes per lane to be marked as
    not optimized. JAX 0.11 neither requires nor has the mark.
    """
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value


def broadcast(vector: jax.Array, axis: int, width: int) -> jax.Array:
    """Broadcast a vector over the rows (`axis` 0) or columns (1) to four rows."""
    return lax.broadcast_in_dim(vector, (WARPS, width), [axis])
