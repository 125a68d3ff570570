"""Bias and activation on Hopper GPUs, in Pallas Mosaic GPU.

Each row is split into four quarters, one for each warp of a CTA. A warp therefore always processes the same columns. It
loads their biases once and accumulates their bias gradients in registers. Every array of rows is read or written once.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32

from infcl_jax.ops.common.gpu import WARPS
from infcl_jax.ops.common.row_pipeline import RowStream, RowTile, Tiling, layouts, store

DTYPES = tuple(jnp.dtype(name) for name in ("bfloat16", "float16"))
WIDTH_MULTIPLE = 256  # supported widths are multiples of it, so that a lane accesses at least 4 bytes of bf16
WIDEST = 5120  # largest supported width
# Tilings count quarters of rows.
FORWARD = Tiling(rows=8, stages=3, ctas_per_sm=4)
BACKWARD = Tiling(rows=4, stages=4, ctas_per_sm=3)
FEWEST = max(FORWARD.rows, BACKWARD.rows) // WARPS  # rows; every CTA needs a whole tile

SUPPORTED = (
    f"bf16 or fp16, widths in multiples of {WIDTH_MULTIPLE} up to {WIDEST} and at least {FEWEST} rows per device"
)


def has_layout(width: int, dtype: Any) -> bool:
    """Return whether rows of this width and dtype have a layout."""
    return jnp.dtype(dtype) in DTYPES and width % WIDTH_MULTIPLE == 0 and 0 < width <= WIDEST


@functools.partial(jax.jit, static_argnames=("name", "sm_count", "tiling"))
def forward(
    x: Float[Array, "rows width"], bias: Float32[Array, "width"], *, name: str, sm_count: int, tiling: Tiling = FORWARD
) -> Float[Array, "rows width"]:
    """Apply an activation to `x + bias`.

    Raises:
      ValueError: the kernels do not support the shape or the dtype.
    """
    if len(x) < FEWEST or not has_layout(x.shape[1], x.dtype):
        raise ValueError(
            f"expected {SUPPORTED} for activations 'mosaic_gpu', got {x.shape} in {x.dtype}; use 'xla' or None"
        )
    quarters = _quarters(x)
    stream = RowStream.of(tiling, len(quarters), sm_count, {"x": quarters}, WARPS)
    tile_layout, *_ = layouts(quarters.shape[1], x.dtype)

    def kernel(x: Any, bias: Any, y: Any, *smem: Any) -> None:
        shift = plgpu.load(bias, layout=tile_layout, optimized=False)

        def body(tile: RowTile, carry: tuple) -> tuple:
            for group in range(0, tiling.rows, WARPS):
                value, _ = _ACTIVATIONS[name](tile.load("x", group, tile_layout) + shift)
                y[pl.ds(tile.first + group, WARPS)] = value.astype(y.dtype)
            return carry

        stream.run({"x": x}, smem, body, ())

    out = (jax.ShapeDtypeStruct(quarters.shape, x.dtype),)
    (y,) = stream.call(kernel, out, quarters, bias.reshape(WARPS, -1), approximate=True)
    return y.reshape(x.shape)


@functools.partial(jax.jit, static_argnames=("name", "sm_count", "tiling"))
def backward(
    x: Float[Array, "rows width"],
    bias: Float32[Array, "width"],
    dy: Float[Array, "rows width"],
    *,
    name: str,
    sm_count: int,
    tiling: Tiling = BACKWARD,
) -> tuple[Float[Array, "rows width"], Float32[Array, "width"]]:
    """Gradients of the biased activation.

    Returns:
      The cotangent of `x` in its dtype, and the float32 [width] cotangent of the bias. The sum over rows has a fixed
      order, so results are deterministic.
    """
    streamed = {"x": _quarters(x), "y": _quarters(dy)}
    quarters = streamed["x"]
    stream = RowStream.of(tiling, len(quarters), sm_count, streamed, WARPS)
    tile_layout, row_layout, _ = layouts(quarters.shape[1], x.dtype)

    def kernel(x: Any, dy: Any, bias: Any, dx: Any, d_bias: Any, *smem: Any) -> None:
        shift = plgpu.load(bias, layout=tile_layout, optimized=False)

        def body(tile: RowTile, sums: jax.Array) -> jax.Array:
            for group in range(0, tiling.rows, WARPS):
                _, derivative = _ACTIVATIONS[name](tile.load("x", group, tile_layout) + shift)
                dx_tile = tile.load("y", group, tile_layout) * derivative()
                dx[pl.ds(tile.first + group, WARPS)] = dx_tile.astype(dx.dtype)
                is_new = tile.is_new(group, row_layout)  # overlapping tiles share rows, which must be summed once
                sums = sums + dx_tile * lax.broadcast_in_dim(is_new, dx_tile.shape, [0])
            return sums

        zeros = plgpu.layout_cast(jnp.zeros(bias.shape, jnp.float32), tile_layout)
        store(d_bias.at[lax.axis_index("program")], stream.run({"x": x, "y": dy}, smem, body, zeros))

    out = (
        jax.ShapeDtypeStruct(quarters.shape, x.dtype),
        jax.ShapeDtypeStruct((stream.programs, WARPS, quarters.shape[1]), jnp.float32),
    )
    dx, d_bias = stream.call(kernel, out, *streamed.values(), bias.reshape(WARPS, -1), approximate=True)
    return dx.reshape(x.shape), d_bias.sum(0).reshape(bias.shape)


def _quarters(x: jax.Array) -> jax.Array:
    """Reshape [rows, width] to [4 rows, width / 4]."""
    return x.reshape(WARPS * x.shape[0], -1)


# Returns the value, and a function that computes the derivative from shared subexpressions.
_Activation = Callable[[jax.Array], tuple[jax.Array, Callable[[], jax.Array]]]


def _gelu(x: jax.Array) -> tuple[jax.Array, Callable[[], jax.Array]]:
    """Exact GELU with an approximate error function.

    The absolute error of the error function is 1.5e-7. Source: Abramowitz & Stegun, 7.1.26. The reciprocal in
    the formula is rsqrt squared, without a division.
    """
    magnitude = jnp.abs(x)
    root = lax.rsqrt(1.0 + 0.3275911 * math.sqrt(0.5) * magnitude)
    t = root * root
    series = 1.421413741 + t * (-1.453152027 + t * 1.061405429)
    series = t * (0.254829592 + t * (-0.284496736 + t * series))
    bell = jnp.exp2(x * x * (-0.5 * math.log2(math.e)))
    tail = 0.5 * series * bell  # probability of a standard normal variable above |x|

    def derivative() -> jax.Array:
        return jnp.where(x > 0, 1.0 - tail, tail) + x * bell * (1 / math.sqrt(2 * math.pi))

    return jnp.maximum(x, 0.0) - magnitude * tail, derivative


def _quick_gelu(x: jax.Array) -> tuple[jax.Array, Callable[[], jax.Array]]:
    """QuickGELU, whose sigmoid is rsqrt squared, without a division."""
    root = lax.rsqrt(1.0 + jnp.exp2(x * (-1.702 * math.log2(math.e))))
    sigmoid = root * root
    return x * sigmoid, lambda: sigmoid * (1.0 + 1.702 * x * (1.0 - sigmoid))


def _gelu_tanh(x: jax.Array) -> tuple[jax.Array, Callable[[], jax.Array]]:
    """GELU with a tanh, as `x * sigmoid(2 a (x + c x^3))`; the sigmoid is rsqrt squared, without a division."""
    a, c = math.sqrt(2 / math.pi), 0.044715
    root = lax.rsqrt(1.0 + jnp.exp2(x * (1.0 + c * x * x) * (-2 * a * math.log2(math.e))))
    sigmoid = root * root
    return x * sigmoid, lambda: sigmoid * (1.0 + (1.0 - sigmoid) * x * (2 * a + 6 * a * c * x * x))


_ACTIVATIONS: dict[str, _Activation] = {"gelu": _gelu, "gelu_tanh": _gelu_tanh, "quick_gelu": _quick_gelu}
