"""LayerNorm for Hopper GPUs, in Pallas Mosaic GPU: every array is read or written once.

Statistics are sums within a warp, which takes whole rows; gradients of scale and bias are added up in its registers.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from infcl_jax.ops.common.row_pipeline import WARPS, RowStream, RowTile, Tiling, layouts, spread

DTYPES = tuple(jnp.dtype(name) for name in ("bfloat16", "float16", "float32"))

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
    stream = RowStream.of(tiling or _tiling(FORWARD, width), rows, cores, {"x": x})
    tile, _, column = layouts(width, x.dtype, dtype)

    def kernel(*refs: Any) -> None:
        x, scale, bias, y, means, inverses, *shared = refs
        gain, shift = (plgpu.load(r, layout=column, optimized=False) for r in (scale, bias))

        def body(at: RowTile, carry: tuple) -> tuple:
            for group in range(0, stream.tiling.rows, WARPS):
                wide = at.load("x", group, tile)
                mean = wide.sum(1) * (1 / width)
                centered = wide - spread(mean, 0, width)
                inverse = lax.rsqrt((centered * centered).sum(1) * (1 / width) + epsilon)
                normal = centered * spread(inverse, 0, width)
                place = pl.ds(at.first + group, WARPS)
                y[place] = (normal * spread(gain, 1, width) + spread(shift, 1, width)).astype(dtype)
                means[place], inverses[place] = mean, inverse
            return carry

        stream.run({"x": x}, shared, body, ())

    of_rows = jax.ShapeDtypeStruct((rows,), jnp.float32)
    out = (jax.ShapeDtypeStruct((rows, width), dtype), of_rows, of_rows)
    y, mean, inverse = stream.call(kernel, out, x, scale, bias)
    return y, mean, inverse


@functools.partial(jax.jit, static_argnames=("sum_rows", "cores", "tiling"))
def backward(
    x: jax.Array,
    mean: jax.Array,
    inverse: jax.Array,
    scale: jax.Array,
    of_y: jax.Array,
    of_x: jax.Array | None = None,
    *,
    sum_rows: bool = False,
    cores: int,
    tiling: Tiling | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Gradients of LayerNorm.

    Args:
      x: [rows, width], as for `forward`.
      mean: float32 [rows], of `forward`.
      inverse: float32 [rows], likewise.
      scale: float32 [width].
      of_y: [rows, width] cotangent of the result.
      of_x: [rows, width] cotangent of `x` from its other uses, to be added; None for none.
      sum_rows: whether to add up the rows of the first result.
      cores: multiprocessors of the device.
      tiling: of the rows; None for the best for this width.

    Returns:
      The cotangents of x, in its dtype, rounded once, and of scale and bias, float32, added up in the same order every
      time; likewise the sum of the rows of the first one, before they are rounded, None if it was not asked for.
    """
    rows, width = x.shape
    streamed = {"x": x, "y": of_y} | ({} if of_x is None else {"residual": of_x})
    stream = RowStream.of(tiling or _tiling(BACKWARD, width), rows, cores, streamed)
    tile, row, column = layouts(width, *(a.dtype for a in streamed.values()))
    sums = 3 if sum_rows else 2

    def kernel(*refs: Any) -> None:
        names = [*streamed, "mean", "inverse", "scale", "of_x", "sums"]
        named, shared = dict(zip(names, refs[: len(names)], strict=True)), refs[len(names) :]
        gain = plgpu.load(named["scale"], layout=column, optimized=False)

        def statistics(at: RowTile) -> list[jax.Array]:
            return [
                plgpu.load(named[name].at[pl.ds(at.first + group, WARPS)], layout=row, optimized=False)
                for group in range(0, stream.tiling.rows, WARPS)
                for name in ("mean", "inverse")
            ]

        def body(at: RowTile, carry: tuple) -> tuple:
            *totals, known = carry
            ahead = statistics(at.after())  # long before they are needed
            for number, group in enumerate(range(0, stream.tiling.rows, WARPS)):
                mean, inverse = known[2 * number : 2 * number + 2]
                cotangent = at.load("y", group, tile)
                scaled_mean = spread(mean * inverse, 0, width)
                spread_inverse = spread(inverse, 0, width)
                normal = at.load("x", group, tile) * spread_inverse - scaled_mean
                counted = spread(at.counted(group, row), 0, width)
                product = cotangent * normal
                terms = [product, cotangent]
                slope = cotangent * spread(gain, 1, width)
                along = (product * spread(gain, 1, width)).sum(1) * (inverse * (1 / width))
                level = slope.sum(1) * (inverse * (1 / width))
                found = slope * spread_inverse - (normal * spread(along, 0, width) + spread(level, 0, width))
                if of_x is not None:
                    found = found + at.load("residual", group, tile)
                if sum_rows:
                    terms.append(found)
                totals = [total + term * counted for total, term in zip(totals, terms, strict=True)]
                named["of_x"][pl.ds(at.first + group, WARPS)] = found.astype(x.dtype)
            return *totals, ahead

        zeros = plgpu.layout_cast(jnp.zeros((WARPS, width), jnp.float32), tile)
        begin = *(zeros for _ in range(sums)), statistics(stream.tile(jnp.int32(0)))
        *totals, _ = stream.run({name: named[name] for name in streamed}, shared, body, begin)
        for number, total in enumerate(totals):
            named["sums"][lax.axis_index("program"), number] = total

    of_warps = jax.ShapeDtypeStruct((stream.programs, sums, WARPS, width), jnp.float32)
    out = jax.ShapeDtypeStruct(x.shape, x.dtype), of_warps
    found, of_programs = stream.call(kernel, out, *streamed.values(), mean, inverse, scale)
    of_scale, of_bias, *of_rows = of_programs.sum((0, 2))  # in one go
    return found, of_scale, of_bias, of_rows[0] if sum_rows else None


def _tiling(choices: tuple[tuple[int, Tiling], ...], width: int) -> Tiling:
    return next(tiling for widest, tiling in choices if width <= widest)
