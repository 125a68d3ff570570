"""Activations of an MLP's hidden layer with its bias: fused kernels on Hopper GPUs, or plain XLA."""

import functools
import math
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from infcl_jax.ops.common import gpu
from infcl_jax.ops.common.sharding import automatic_axes, on_each_device, rows_for_kernels
from infcl_jax.ops.layer_norm.api import along, flat_rows

Activation = Literal["gelu", "quick_gelu"]
ActivationImplementation = Literal["xla", "mosaic_gpu"]


def best_activation(x: jax.Array) -> ActivationImplementation:
    """The fastest way to activate [..., width] on the default device.

    Returns:
      "mosaic_gpu" with an argument that the kernels accept and of which each device has whole rows, see
      `rows_for_kernels`. Otherwise "xla", which the compiler can split.
    """
    rows = rows_for_kernels(x.shape)
    if rows is None:
        return "xla"
    from infcl_jax.ops.bias_activation import pallas_mosaic_gpu  # only GPUs need it

    return "mosaic_gpu" if pallas_mosaic_gpu.accepts(rows, x.shape[-1], x.dtype) else "xla"


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def activate(
    x: jax.Array, bias: jax.Array, name: Activation, implementation: ActivationImplementation | None = None
) -> jax.Array:
    """The activation of `x + bias`.

    Args:
      x: [..., width], floating; what the backward pass keeps.
      bias: [width].
      name: "gelu" (exact) or "quick_gelu" (`x * sigmoid(1.702 x)`), Hendrycks & Gimpel 2016, section 2.
      implementation: "xla", or "mosaic_gpu" for the kernels of Hopper GPUs; None for `best_activation`.

    Returns:
      [..., width] in the dtype of `x`; float32 throughout. The bias's gradient is a sum in float32.
    """
    if (implementation or best_activation(x)) == "mosaic_gpu":
        return _forward_kernel(x, bias, name)
    return _FUNCTIONS[name][0](_biased(x, bias)).astype(x.dtype)


def _backward(
    name: Activation,
    implementation: ActivationImplementation | None,
    saved: tuple[jax.Array, jax.Array],
    of_y: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    x, bias = saved
    kernels = (implementation or best_activation(x)) == "mosaic_gpu"
    of_x, of_bias = (_backward_kernel if kernels else _backward_xla)(x, bias, of_y, name)
    return of_x, of_bias.astype(bias.dtype)


activate.defvjp(lambda x, bias, *how: (activate(x, bias, *how), (x, bias)), _backward)


def _backward_xla(x: jax.Array, bias: jax.Array, of_y: jax.Array, name: Activation) -> tuple[jax.Array, jax.Array]:
    # Without the barrier the compiler keeps what both passes compute of `x`, in float32.
    wide = _biased(lax.optimization_barrier(x), bias)
    of_x = (of_y.astype(jnp.float32) * _FUNCTIONS[name][1](wide)).astype(x.dtype)
    return of_x, of_x.sum(tuple(range(x.ndim - 1)), dtype=jnp.float32)


def _forward_kernel(x: jax.Array, bias: jax.Array, name: Activation) -> jax.Array:
    from infcl_jax.ops.bias_activation import pallas_mosaic_gpu

    run = functools.partial(pallas_mosaic_gpu.forward, name=name, cores=gpu.multiprocessors())

    def local(x: jax.Array, bias: jax.Array) -> jax.Array:
        return run(flat_rows(x), bias).reshape(x.shape)

    own = P(automatic_axes())
    return on_each_device(local, (own, P()), own)(x, bias.astype(jnp.float32))


def _backward_kernel(x: jax.Array, bias: jax.Array, of_y: jax.Array, name: Activation) -> tuple[jax.Array, jax.Array]:
    from infcl_jax.ops.bias_activation import pallas_mosaic_gpu

    run = functools.partial(pallas_mosaic_gpu.backward, name=name, cores=gpu.multiprocessors())
    axes = automatic_axes()

    def local(x: jax.Array, bias: jax.Array, of_y: jax.Array) -> tuple[jax.Array, jax.Array]:
        of_x, of_bias = run(flat_rows(x), bias, flat_rows(of_y))
        return of_x.reshape(x.shape), lax.psum(of_bias, axes) if axes else of_bias

    own = P(axes)
    return on_each_device(local, (own, P(), own), (own, P()))(x, bias.astype(jnp.float32), of_y)


def _biased(x: jax.Array, bias: jax.Array) -> jax.Array:
    return x.astype(jnp.float32) + along(bias, x)


def _normal_cdf(x: jax.Array) -> jax.Array:
    return 0.5 * (1.0 + lax.erf(x * math.sqrt(0.5)))


def _gelu_slope(x: jax.Array) -> jax.Array:
    return _normal_cdf(x) + x * jnp.exp(-0.5 * x * x) * (1 / math.sqrt(2 * math.pi))


def _quick_gelu_slope(x: jax.Array) -> jax.Array:
    s = jax.nn.sigmoid(1.702 * x)
    return s * (1.0 + 1.702 * x * (1.0 - s))


_Function = Callable[[jax.Array], jax.Array]
# Each with its derivative.
_FUNCTIONS: dict[str, tuple[_Function, _Function]] = {
    "gelu": (lambda x: x * _normal_cdf(x), _gelu_slope),
    "quick_gelu": (lambda x: x * jax.nn.sigmoid(1.702 * x), _quick_gelu_slope),
}
