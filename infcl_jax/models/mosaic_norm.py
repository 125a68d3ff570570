"""LayerNorm for Hopper GPUs, in Pallas Mosaic GPU: every array is read or written once.

A program owns a range of rows, which come through shared memory in tiles of a few rows. Each of its four warps takes
whole rows, so that statistics are sums within a warp, and adds up its part of the gradients of scale and bias in
registers.
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
DTYPES = tuple(jnp.dtype(name) for name in ("bfloat16", "float16", "float32"))


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


# For arrays up to a width each. As many programs as registers allow, with enough bytes in flight to hide the latency.
FORWARD = (
    (512, Tiling(rows=8, stages=4, programs=6)),
    (768, Tiling(rows=4, stages=6, programs=5)),
    (1024, Tiling(rows=4, stages=4, programs=4)),
    (1280, Tiling(rows=4, stages=4, programs=3)),
)
BACKWARD = (
    (512, Tiling(rows=4, stages=4, programs=3)),
    (1280, Tiling(rows=4, stages=3, programs=2)),
)
WIDEST = 1280
DEPTH = 128  # of which widths are multiples
FEWEST = max(tiling.rows for _, tiling in FORWARD + BACKWARD)  # rows


def accepts(rows: int, width: int, *dtypes: Any) -> bool:
    """Whether the kernels take [rows, width] arrays of these dtypes."""
    known = all(jnp.dtype(d) in DTYPES for d in dtypes)
    return known and rows >= FEWEST and width % DEPTH == 0 and 0 < width <= WIDEST


@functools.partial(jax.jit, static_argnames=("dtype", "epsilon", "cores", "tiling"))
def forward(
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    *,
    dtype: Any,
    epsilon: float,
    cores: int,
    tiling: Tiling | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """LayerNorm over the last axis.

    Args:
      x: [rows, width], see `accepts`.
      scale: float32 [width].
      bias: float32 [width].
      dtype: of the result.
      epsilon: added to the variance.
      cores: multiprocessors of the device.
      tiling: of the rows; None for the best for this width.

    Returns:
      [rows, width] in `dtype`, and float32 [rows] mean and inverse standard deviation of each row.
    """
    rows, width = x.shape
    stream = _Stream.of(tiling or _tiling(FORWARD, width), rows, cores, {"x": x})
    tile, _, column = _layouts(width, x.dtype, dtype)

    def kernel(*refs: Any) -> None:
        x, scale, bias, y, means, inverses, *shared = refs
        gain, shift = (plgpu.load(r, layout=column, optimized=False) for r in (scale, bias))

        def body(at: _Tile, carry: tuple) -> tuple:
            for group in range(0, stream.tiling.rows, WARPS):
                wide = at.load("x", group, tile)
                mean = wide.sum(1) * (1 / width)
                centered = wide - _spread(mean, 0, width)
                inverse = lax.rsqrt((centered * centered).sum(1) * (1 / width) + epsilon)
                normal = centered * _spread(inverse, 0, width)
                place = pl.ds(at.first + group, WARPS)
                y[place] = (normal * _spread(gain, 1, width) + _spread(shift, 1, width)).astype(dtype)
                means[place], inverses[place] = mean, inverse
            return carry

        stream.run({"x": x}, shared, body, ())

    of_rows = jax.ShapeDtypeStruct((rows,), jnp.float32)
    out = (jax.ShapeDtypeStruct((rows, width), dtype), of_rows, of_rows)
    y, mean, inverse = stream.call(kernel, out, x, scale, bias)
    return y, mean, inverse


@functools.partial(jax.jit, static_argnames=("cores", "tiling"))
def backward(
    x: jax.Array,
    mean: jax.Array,
    inverse: jax.Array,
    scale: jax.Array,
    of_y: jax.Array,
    of_x: jax.Array | None = None,
    *,
    cores: int,
    tiling: Tiling | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of LayerNorm.

    Args:
      x: [rows, width], as for `forward`.
      mean: float32 [rows], of `forward`.
      inverse: float32 [rows], likewise.
      scale: float32 [width].
      of_y: [rows, width] cotangent of the result.
      of_x: [rows, width] cotangent of `x` from its other uses, to be added; None for none.
      cores: multiprocessors of the device.
      tiling: of the rows; None for the best for this width.

    Returns:
      The cotangents of x, in its dtype, rounded once, and of scale and bias, float32, added up in the same order every
      time.
    """
    rows, width = x.shape
    streamed = {"x": x, "y": of_y} | ({} if of_x is None else {"residual": of_x})
    stream = _Stream.of(tiling or _tiling(BACKWARD, width), rows, cores, streamed)
    tile, row, column = _layouts(width, *(a.dtype for a in streamed.values()))

    def kernel(*refs: Any) -> None:
        names = [*streamed, "mean", "inverse", "scale", "of_x", "of_scale", "of_bias"]
        named, shared = dict(zip(names, refs[: len(names)], strict=True)), refs[len(names) :]
        gain = plgpu.load(named["scale"], layout=column, optimized=False)

        def statistics(at: _Tile) -> list[jax.Array]:
            return [
                plgpu.load(named[name].at[pl.ds(at.first + group, WARPS)], layout=row, optimized=False)
                for group in range(0, stream.tiling.rows, WARPS)
                for name in ("mean", "inverse")
            ]

        def body(at: _Tile, carry: tuple) -> tuple:
            of_scale, of_bias, known = carry
            ahead = statistics(at.after())  # long before they are needed
            for number, group in enumerate(range(0, stream.tiling.rows, WARPS)):
                mean, inverse = known[2 * number : 2 * number + 2]
                cotangent = at.load("y", group, tile)
                scaled_mean = _spread(mean * inverse, 0, width)
                spread_inverse = _spread(inverse, 0, width)
                normal = at.load("x", group, tile) * spread_inverse - scaled_mean
                counted = _spread(at.counted(group, row), 0, width)
                product = cotangent * normal
                of_scale, of_bias = of_scale + product * counted, of_bias + cotangent * counted
                slope = cotangent * _spread(gain, 1, width)
                along = (product * _spread(gain, 1, width)).sum(1) * (inverse * (1 / width))
                level = slope.sum(1) * (inverse * (1 / width))
                found = slope * spread_inverse - (normal * _spread(along, 0, width) + _spread(level, 0, width))
                if of_x is not None:
                    found = found + at.load("residual", group, tile)
                named["of_x"][pl.ds(at.first + group, WARPS)] = found.astype(x.dtype)
            return of_scale, of_bias, ahead

        zeros = plgpu.layout_cast(jnp.zeros((WARPS, width), jnp.float32), tile)
        begin = zeros, zeros, statistics(stream.tile(jnp.int32(0)))
        of_scale, of_bias, _ = stream.run({name: named[name] for name in streamed}, shared, body, begin)
        program = lax.axis_index("program")
        named["of_scale"][program], named["of_bias"][program] = of_scale, of_bias

    sums = jax.ShapeDtypeStruct((stream.programs, WARPS, width), jnp.float32)
    out = jax.ShapeDtypeStruct(x.shape, x.dtype), sums, sums
    found, of_scale, of_bias = stream.call(kernel, out, *streamed.values(), mean, inverse, scale)
    return found, of_scale.sum((0, 1)), of_bias.sum((0, 1))


@dataclasses.dataclass(frozen=True)
class _Stream:
    """Row tiles of arrays on their way through shared memory.

    Attributes:
      tiling: of the rows.
      rows: of the arrays, at least those of a tile.
      programs: in all, each with a range of about as many rows, at least those of a tile.
      arrays: [rows, width] by name.
    """

    tiling: Tiling
    rows: int
    programs: int
    arrays: dict[str, jax.ShapeDtypeStruct]

    @classmethod
    def of(cls, tiling: Tiling, rows: int, cores: int, arrays: dict[str, jax.Array]) -> "_Stream":
        """As many stages as fit."""
        bytes_of_tile = sum(tiling.rows * a.shape[1] * a.dtype.itemsize for a in arrays.values())
        room = SHARED_MEMORY // tiling.programs - RESERVED
        tiling = dataclasses.replace(tiling, stages=max(1, min(tiling.stages, room // bytes_of_tile)))
        programs = min(tiling.programs * cores, rows // tiling.rows)
        return cls(tiling, rows, programs, {n: jax.ShapeDtypeStruct(a.shape, a.dtype) for n, a in arrays.items()})

    def call(self, kernel: Callable, out: tuple[jax.ShapeDtypeStruct, ...], *operands: jax.Array) -> list[jax.Array]:
        """Runs the kernel, which is given operands, results and what `run` needs."""
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
            compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True, reduction_scratch_bytes=0),
        )(*operands)

    def run(self, refs: dict[str, Any], shared: Any, body: Callable[["_Tile", Any], Any], carry: Any) -> Any:
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

    def tile(self, number: jax.Array) -> "_Tile":
        """Where a tile is. The last one overlaps the one before rather than the next program's rows."""
        begin, count = self._range
        wanted = number * self.tiling.rows
        first = jnp.maximum(jnp.minimum(wanted, count - self.tiling.rows), 0)
        return _Tile(self, number, begin + first, begin + wanted)

    @property
    def _range(self) -> tuple[jax.Array, jax.Array]:
        """First row of the program and how many it has."""
        program = lax.axis_index("program")
        each, more = divmod(self.rows, self.programs)
        return program * each + jnp.minimum(program, more), each + (program < more).astype(jnp.int32)

    @property
    def _tiles(self) -> jax.Array:
        return lax.div(self._range[1] + self.tiling.rows - 1, self.tiling.rows)


@dataclasses.dataclass(frozen=True)
class _Tile:
    """A tile of rows.

    Attributes:
      stream: that it is of.
      number: in the program.
      first: row.
      new: first row that no tile before had.
      refs: in shared memory, by name.
    """

    stream: _Stream
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

    def after(self) -> "_Tile":
        """The next tile, or again the last one."""
        return self.stream.tile(self.number + 1)


def _tiling(choices: tuple[tuple[int, Tiling], ...], width: int) -> Tiling:
    return next(tiling for widest, tiling in choices if width <= widest)


def _layouts(width: int, *dtypes: Any) -> tuple[Any, Any, Any]:
    """Of four rows, one to each warp, and of what belongs to rows and to columns: lanes have up to 16 bytes in turn."""
    widest = max(jnp.dtype(d).itemsize for d in dtypes)
    vector = math.gcd(width // LANES, 16 // widest)
    tiling = plgpu.Tiling(((WARPS, LANES * vector), (vector,)))
    tile = plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)
    return tile, tile.reduce(1), tile.reduce(0)


def _spread(vector: jax.Array, axis: int, width: int) -> jax.Array:
    """A vector of the rows (axis 0) or the columns (axis 1) over four rows."""
    return lax.broadcast_in_dim(vector, (WARPS, width), [axis])
