"""Activations of biased rows for Hopper GPUs, in Pallas Mosaic GPU: every array is read or written once.

A row is taken for four, its quarters, so that each warp of a program always has the same columns, whose biases it keeps
and whose gradients it adds up in registers.
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

from infcl_jax.ops.common.row_pipeline import WARPS, RowStream, RowTile, Tiling, layouts

DTYPES = tuple(jnp.dtype(name) for name in ("bfloat16", "float16"))
DEPTH = 128  # of which widths are multiples
WIDEST = 5120
# Of quarters of rows.
FORWARD = Tiling(rows=8, stages=3, programs=4)
BACKWARD = Tiling(rows=4, stages=4, programs=3)
FEWEST = max(FORWARD.rows, BACKWARD.rows) // WARPS  # rows


def accepts(rows: int, width: int, dtype: Any) -> bool:
    """Whether the kernels take [rows, width] arrays of this dtype."""
    return jnp.dtype(dtype) in DTYPES and rows >= FEWEST and width % DEPTH == 0 and 0 < width <= WIDEST


@functools.partial(jax.jit, static_argnames=("name", "cores", "tiling"))
def forward(x: jax.Array, bias: jax.Array, *, name: str, cores: int, tiling: Tiling = FORWARD) -> jax.Array:
    """The activation of `x + bias`.

    Args:
      x: [rows, width], see `accepts`.
      bias: float32 [width].
      name: of the activation, "gelu" or "quick_gelu".
      cores: multiprocessors of the device.
      tiling: of quarters of rows.

    Returns:
      [rows, width] in the dtype of `x`.
    """
    of_quarters = _quarters(x)
    stream = RowStream.of(tiling, len(of_quarters), cores, {"x": of_quarters}, WARPS)
    tile, *_ = layouts(of_quarters.shape[1], x.dtype)

    def kernel(x: Any, bias: Any, y: Any, *shared: Any) -> None:
        shift = plgpu.load(bias, layout=tile, optimized=False)

        def body(at: RowTile, carry: tuple) -> tuple:
            for group in range(0, tiling.rows, WARPS):
                value, _ = _ACTIVATIONS[name](at.load("x", group, tile) + shift)
                y[pl.ds(at.first + group, WARPS)] = value.astype(y.dtype)
            return carry

        stream.run({"x": x}, shared, body, ())

    out = (jax.ShapeDtypeStruct(of_quarters.shape, x.dtype),)
    (y,) = stream.call(kernel, out, of_quarters, bias.reshape(WARPS, -1), approximate=True)
    return y.reshape(x.shape)


@functools.partial(jax.jit, static_argnames=("name", "cores", "tiling"))
def backward(
    x: jax.Array, bias: jax.Array, of_y: jax.Array, *, name: str, cores: int, tiling: Tiling = BACKWARD
) -> tuple[jax.Array, jax.Array]:
    """Gradients of the activation.

    Args:
      x: [rows, width], as for `forward`.
      bias: float32 [width].
      of_y: [rows, width] cotangent of the result, in the dtype of `x`.
      name: of the activation.
      cores: multiprocessors of the device.
      tiling: of quarters of rows.

    Returns:
      The cotangents of `x`, in its dtype, and of the bias, float32, added up in the same order every time.
    """
    streamed = {"x": _quarters(x), "y": _quarters(of_y)}
    of_quarters = streamed["x"]
    stream = RowStream.of(tiling, len(of_quarters), cores, streamed, WARPS)
    tile, row, _ = layouts(of_quarters.shape[1], x.dtype)

    def kernel(x: Any, of_y: Any, bias: Any, of_x: Any, of_bias: Any, *shared: Any) -> None:
        shift = plgpu.load(bias, layout=tile, optimized=False)

        def body(at: RowTile, sums: jax.Array) -> jax.Array:
            for group in range(0, tiling.rows, WARPS):
                _, slope = _ACTIVATIONS[name](at.load("x", group, tile) + shift)
                found = at.load("y", group, tile) * slope()
                of_x[pl.ds(at.first + group, WARPS)] = found.astype(of_x.dtype)
                counted = at.counted(group, row)
                sums = sums + found * lax.broadcast_in_dim(counted, found.shape, [0])
            return sums

        zeros = plgpu.layout_cast(jnp.zeros(bias.shape, jnp.float32), tile)
        of_bias[lax.axis_index("program")] = stream.run({"x": x, "y": of_y}, shared, body, zeros)

    out = (
        jax.ShapeDtypeStruct(of_quarters.shape, x.dtype),
        jax.ShapeDtypeStruct((stream.programs, WARPS, of_quarters.shape[1]), jnp.float32),
    )
    of_x, of_bias = stream.call(kernel, out, *streamed.values(), bias.reshape(WARPS, -1), approximate=True)
    return of_x.reshape(x.shape), of_bias.sum(0).reshape(bias.shape)


def _quarters(x: jax.Array) -> jax.Array:
    return x.reshape(WARPS * x.shape[0], -1)


# The value, and a function that makes the slope out of what the value was made of.
_Activation = Callable[[jax.Array], tuple[jax.Array, Callable[[], jax.Array]]]


def _gelu(x: jax.Array) -> tuple[jax.Array, Callable[[], jax.Array]]:
    """With the error function of Abramowitz & Stegun, 7.1.26, whose absolute error is 1.5e-7."""
    size = jnp.abs(x)
    root = lax.rsqrt(1.0 + 0.3275911 * math.sqrt(0.5) * size)
    t = root * root
    series = 1.421413741 + t * (-1.453152027 + t * 1.061405429)
    series = t * (0.254829592 + t * (-0.284496736 + t * series))
    bell = jnp.exp2(x * x * (-0.5 * math.log2(math.e)))
    tail = 0.5 * series * bell  # of the normal distribution beyond |x|

    def slope() -> jax.Array:
        return jnp.where(x > 0, 1.0 - tail, tail) + x * bell * (1 / math.sqrt(2 * math.pi))

    return jnp.maximum(x, 0.0) - size * tail, slope


def _quick_gelu(x: jax.Array) -> tuple[jax.Array, Callable[[], jax.Array]]:
    root = lax.rsqrt(1.0 + jnp.exp2(x * (-1.702 * math.log2(math.e))))
    sigmoid = root * root
    return x * sigmoid, lambda: sigmoid * (1.0 + 1.702 * x * (1.0 - sigmoid))


_ACTIVATIONS: dict[str, _Activation] = {"gelu": _gelu, "quick_gelu": _quick_gelu}
