"""Rows of arrays on their way through a Hopper GPU's shared memory, for Pallas Mosaic GPU kernels.

A program owns a range of rows, which come in tiles of a few rows. Each of its four warps takes whole rows, so that what
belongs to a row is found within a warp, and sums over rows are added up in registers.
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

WARPS = 4  # of a program, and rows that it works on at a time
LANES = 32
SHARED_MEMORY = 227 * 1024
RESERVED = 2048  # bytes of a program's shared memory that are not for tiles


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How a kernel goes through the rows.

    Attributes:
      rows: of a tile, a multiple of 4.
      stages: tiles in flight.
      programs: per multiprocessor.
    """

    rows: int
    stages: int
    programs: int

    def __post_init__(self) -> None:
        if self.rows < WARPS or self.rows % WARPS:
            raise ValueError(f"expected a multiple of {WARPS} rows per tile, got {self.rows}")


@dataclasses.dataclass(frozen=True)
class RowStream:
    """Row tiles of arrays on their way through shared memory.

    Attributes:
      tiling: of the rows.
      rows: of the arrays, at least those of a tile.
      programs: in all, each with a range of about as many rows, at least those of a tile.
      arrays: [rows, width] by name.
      unit: rows that stay together: ranges and tiles begin at multiples of it. It divides `rows` and those of a tile.
    """

    tiling: Tiling
    rows: int
    programs: int
    arrays: dict[str, jax.ShapeDtypeStruct]
    unit: int = 1

    @classmethod
    def of(cls, tiling: Tiling, rows: int, cores: int, arrays: dict[str, jax.Array], unit: int = 1) -> "RowStream":
        """As many stages as fit."""
        bytes_of_tile = sum(tiling.rows * a.shape[1] * a.dtype.itemsize for a in arrays.values())
        room = SHARED_MEMORY // tiling.programs - RESERVED
        tiling = dataclasses.replace(tiling, stages=max(1, min(tiling.stages, room // bytes_of_tile)))
        programs = min(tiling.programs * cores, rows // tiling.rows)
        shapes = {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in arrays.items()}
        return cls(tiling, rows, programs, shapes, unit)

    def call(
        self,
        kernel: Callable,
        out: tuple[jax.ShapeDtypeStruct, ...],
        *operands: jax.Array,
        approximate: bool = False,
    ) -> list[jax.Array]:
        """Runs the kernel, which is given operands, results and what `run` needs.

        Args:
          kernel: the function.
          out: shapes of its results.
          *operands: arrays that it is given.
          approximate: whether functions such as `exp2` are single instructions, in error by 2 units in the last place.
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

    def run(self, refs: dict[str, Any], shared: Any, body: Callable[["RowTile", Any], Any], carry: Any) -> Any:
        """Calls `body(tile, carry)` on every tile of the program."""
        *tiles, arrived = shared
        stages = self.tiling.stages

        def fetch(number: jax.Array) -> None:
            slot = lax.rem(number, stages)
            place = pl.ds(self.tile(number).first, self.tiling.rows)
            for ref, tile in zip(refs.values(), tiles, strict=True):
                plgpu.copy_gmem_to_smem(
                    ref.at[place], tile.at[slot], arrived.at[slot], oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS
                )

        def step(number: jax.Array, carry: Any) -> Any:
            slot = lax.rem(number, stages)
            plgpu.barrier_wait(arrived.at[slot])
            own = {name: tile.at[slot] for name, tile in zip(refs, tiles, strict=True)}
            carry = body(dataclasses.replace(self.tile(number), refs=own), carry)
            plgpu.commit_smem()  # all warps have read the tile

            @pl.when(number + stages < self._tiles)
            def _() -> None:
                fetch(number + stages)

            return carry

        for number in range(stages):
            pl.when(number < self._tiles)(functools.partial(fetch, jnp.int32(number)))
        return lax.fori_loop(0, self._tiles, step, carry)

    def tile(self, number: jax.Array) -> "RowTile":
        """Where a tile is. The last one overlaps the one before rather than the next program's rows."""
        begin, count = self._range
        wanted = number * self.tiling.rows
        first = jnp.maximum(jnp.minimum(wanted, count - self.tiling.rows), 0)
        return RowTile(self, number, begin + first, begin + wanted)

    @property
    def _range(self) -> tuple[jax.Array, jax.Array]:
        """First row of the program and how many it has."""
        program = lax.axis_index("program")
        each, more = divmod(self.rows // self.unit, self.programs)
        first, count = program * each + jnp.minimum(program, more), each + (program < more).astype(jnp.int32)
        return first * self.unit, count * self.unit

    @property
    def _tiles(self) -> jax.Array:
        return lax.div(self._range[1] + self.tiling.rows - 1, self.tiling.rows)


@dataclasses.dataclass(frozen=True)
class RowTile:
    """A tile of rows.

    Attributes:
      stream: that it is of.
      number: in the program.
      first: row.
      new: first row that no tile before had.
      refs: in shared memory, by name.
    """

    stream: RowStream
    number: jax.Array
    first: jax.Array
    new: jax.Array
    refs: dict[str, Any] | None = None

    def load(self, name: str, group: int, layout: Any) -> jax.Array:
        """Four rows, float32."""
        ref = self.refs[name].at[pl.ds(group, WARPS)]
        return plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)

    def counted(self, group: int, layout: Any) -> jax.Array:
        """For four rows, 1 where no tile before had them, else 0."""
        row = plgpu.broadcasted_iota(jnp.int32, (WARPS,), 0, layout=layout) + (self.first + group)
        return (row >= self.new).astype(jnp.float32)

    def after(self) -> "RowTile":
        """The next tile, or again the last one."""
        return self.stream.tile(self.number + 1)


def layouts(width: int, *dtypes: Any) -> tuple[Any, Any, Any]:
    """Of four rows, one to each warp, and of what belongs to rows and to columns: lanes have up to 16 bytes in turn."""
    widest = max(jnp.dtype(d).itemsize for d in dtypes)
    vector = math.gcd(width // LANES, 16 // widest)
    tiling = plgpu.Tiling(((WARPS, LANES * vector), (vector,)))
    tile = plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)
    return tile, tile.reduce(1), tile.reduce(0)


def spread(vector: jax.Array, axis: int, width: int) -> jax.Array:
    """A vector of the rows (axis 0) or the columns (axis 1) over four rows."""
    return lax.broadcast_in_dim(vector, (WARPS, width), [axis])
