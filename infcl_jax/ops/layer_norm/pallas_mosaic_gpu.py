"""LayerNorm on Hopper GPUs, in Pallas Mosaic GPU.

Each warp processes whole rows, so row statistics are reductions within a warp. Each warp accumulates its terms of the
gradients of scale and bias in registers. Every array of rows is read or written once.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32

from infcl_jax.ops.common.gpu import WARPS
from infcl_jax.ops.common.row_pipeline import RowStream, RowTile, Tiling, broadcast, layouts, store

DTYPES = tuple(jnp.dtype(name) for name in ("bfloat16", "float16", "float32"))

# Tilings by largest width. Each has as many CTAs per SM as registers allow, and enough bytes in flight to hide the
# latency of global memory.
FORWARD = (
    (512, Tiling(rows=8, stages=4, ctas_per_sm=6)),
    (768, Tiling(rows=4, stages=6, ctas_per_sm=5)),
    (1024, Tiling(rows=4, stages=4, ctas_per_sm=4)),
    (1280, Tiling(rows=4, stages=4, ctas_per_sm=3)),
)
BACKWARD = (
    (512, Tiling(rows=4, stages=4, ctas_per_sm=3)),
    (1280, Tiling(rows=4, stages=3, ctas_per_sm=2)),
)
WIDEST = 1280  # largest supported width
WIDTH_MULTIPLE = 128  # supported widths are multiples of it
FEWEST = max(tiling.rows for _, tiling in FORWARD + BACKWARD)  # rows; every CTA needs a whole tile

SUPPORTED = (
    f"bf16, fp16 or fp32, widths in multiples of {WIDTH_MULTIPLE} up to {WIDEST} and at least {FEWEST} rows per device"
)


def has_layout(width: int, *dtypes: Any) -> bool:
    """Return whether rows of this width and these dtypes have a layout."""
    return all(jnp.dtype(d) in DTYPES for d in dtypes) and width % WIDTH_MULTIPLE == 0 and 0 < width <= WIDEST


@functools.partial(jax.jit, static_argnames=("dtype", "epsilon", "sm_count", "tiling"))
def forward(
    x: Float[Array, "rows width"],
    scale: Float32[Array, "width"],
    bias: Float32[Array, "width"],
    *,
    dtype: Any,
    epsilon: float,
    sm_count: int,
    tiling: Tiling | None = None,
) -> tuple[Float[Array, "rows width"], Float32[Array, "rows"], Float32[Array, "rows"]]:
    """LayerNorm over the last axis.

    Returns:
      The result [rows, width] in `dtype`, and the mean and inverse standard deviation of each row, float32 [rows].

    Raises:
      ValueError: the kernels do not support the shape or a dtype.
    """
    rows, width = x.shape
    if rows < FEWEST or not has_layout(width, x.dtype, dtype):
        raise ValueError(
            f"expected {SUPPORTED} for LayerNorm 'mosaic_gpu', got {x.shape} in {x.dtype} and a result in "
            f"{jnp.dtype(dtype)}; use 'xla' or None"
        )
    stream = RowStream.of(tiling or _tiling(FORWARD, width), rows, sm_count, {"x": x})
    tile_layout, _, column_layout = layouts(width, x.dtype, dtype)

    def kernel(*refs: Any) -> None:
        x, scale, bias, y, means, inv_stds, *smem = refs
        gain, shift = (plgpu.load(r, layout=column_layout, optimized=False) for r in (scale, bias))

        def body(tile: RowTile, carry: tuple) -> tuple:
            for group in range(0, stream.tiling.rows, WARPS):
                x32 = tile.load("x", group, tile_layout)
                mean = x32.sum(1) * (1 / width)
                centered = x32 - broadcast(mean, 0, width)
                inv_std = lax.rsqrt((centered * centered).sum(1) * (1 / width) + epsilon)
                x_hat = centered * broadcast(inv_std, 0, width)
                rows = pl.ds(tile.first + group, WARPS)
                y[rows] = (x_hat * broadcast(gain, 1, width) + broadcast(shift, 1, width)).astype(dtype)
                store(means.at[rows], mean)
                store(inv_stds.at[rows], inv_std)
            return carry

        stream.run({"x": x}, smem, body, ())

    row_statistic = jax.ShapeDtypeStruct((rows,), jnp.float32)
    out = (jax.ShapeDtypeStruct((rows, width), dtype), row_statistic, row_statistic)
    y, mean, inv_std = stream.call(kernel, out, x, scale, bias)
    return y, mean, inv_std


@functools.partial(jax.jit, static_argnames=("sum_rows", "sm_count", "tiling"))
def backward(
    x: Float[Array, "rows width"],
    mean: Float32[Array, "rows"],
    inv_std: Float32[Array, "rows"],
    scale: Float32[Array, "width"],
    dy: Float[Array, "rows width"],
    dx_residual: Float[Array, "rows width"] | None = None,
    *,
    sum_rows: bool = False,
    sm_count: int,
    tiling: Tiling | None = None,
) -> tuple[
    Float[Array, "rows width"], Float32[Array, "width"], Float32[Array, "width"], Float32[Array, "width"] | None
]:
    """Gradients of LayerNorm.

    Returns:
      The cotangent of `x` in its dtype, rounded once. The float32 [width] cotangents of scale and bias. The float32
      [width] sum over rows of the unrounded cotangent of `x`, None without `sum_rows`. All sums have a fixed order, so
      results are deterministic.
    """
    rows, width = x.shape
    streamed = {"x": x, "y": dy} | ({} if dx_residual is None else {"residual": dx_residual})
    stream = RowStream.of(tiling or _tiling(BACKWARD, width), rows, sm_count, streamed)
    tile_layout, row_layout, column_layout = layouts(width, *(a.dtype for a in streamed.values()))
    sum_count = 3 if sum_rows else 2

    def kernel(*refs: Any) -> None:
        names = [*streamed, "mean", "inv_std", "scale", "dx", "sums"]
        named, smem = dict(zip(names, refs[: len(names)], strict=True)), refs[len(names) :]
        gain = plgpu.load(named["scale"], layout=column_layout, optimized=False)

        def statistics(tile: RowTile) -> list[jax.Array]:
            return [
                plgpu.load(named[name].at[pl.ds(tile.first + group, WARPS)], layout=row_layout, optimized=False)
                for group in range(0, stream.tiling.rows, WARPS)
                for name in ("mean", "inv_std")
            ]

        def body(tile: RowTile, carry: tuple) -> tuple:
            *sums, current = carry
            following = statistics(tile.next_tile())  # prefetched one tile ahead to hide the latency of global memory
            for number, group in enumerate(range(0, stream.tiling.rows, WARPS)):
                mean, inv_std = current[2 * number : 2 * number + 2]
                dy = tile.load("y", group, tile_layout)
                scaled_mean = broadcast(mean * inv_std, 0, width)
                inv_std_tile = broadcast(inv_std, 0, width)
                x_hat = tile.load("x", group, tile_layout) * inv_std_tile - scaled_mean
                is_new = broadcast(tile.is_new(group, row_layout), 0, width)
                dy_x_hat = dy * x_hat
                terms = [dy_x_hat, dy]
                dx_hat = dy * broadcast(gain, 1, width)
                projection = (dy_x_hat * broadcast(gain, 1, width)).sum(1) * (inv_std * (1 / width))
                mean_dx_hat = dx_hat.sum(1) * (inv_std * (1 / width))
                dx = dx_hat * inv_std_tile - (
                    x_hat * broadcast(projection, 0, width) + broadcast(mean_dx_hat, 0, width)
                )
                if dx_residual is not None:
                    dx = dx + tile.load("residual", group, tile_layout)
                if sum_rows:
                    terms.append(dx)
                # Overlapping tiles share rows, which must be summed once.
                sums = [acc + term * is_new for acc, term in zip(sums, terms, strict=True)]
                named["dx"][pl.ds(tile.first + group, WARPS)] = dx.astype(x.dtype)
            return *sums, following

        zeros = plgpu.layout_cast(jnp.zeros((WARPS, width), jnp.float32), tile_layout)
        begin = *(zeros for _ in range(sum_count)), statistics(stream.tile(jnp.int32(0)))
        *sums, _ = stream.run({name: named[name] for name in streamed}, smem, body, begin)
        for number, acc in enumerate(sums):
            store(named["sums"].at[lax.axis_index("program"), number], acc)

    partial_sums = jax.ShapeDtypeStruct((stream.programs, sum_count, WARPS, width), jnp.float32)
    out = jax.ShapeDtypeStruct(x.shape, x.dtype), partial_sums
    dx, sums = stream.call(kernel, out, *streamed.values(), mean, inv_std, scale)
    d_scale, d_bias, *row_sum = sums.sum((0, 2))  # a single reduction for all of them
    return dx, d_scale, d_bias, row_sum[0] if sum_rows else None


def _tiling(choices: tuple[tuple[int, Tiling], ...], width: int) -> Tiling:
    return next(tiling for widest, tiling in choices if width <= widest)
