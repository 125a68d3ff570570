"""Bias and activation of an MLP on fused Hopper kernels or plain XLA."""

import functools
import math
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from infcl_jax.ops.common import gpu
from infcl_jax.ops.common.sharding import automatic_axes, on_each_device, rows_for_kernels
from infcl_jax.ops.layer_norm.api import broadcast_vector, flat_rows

Activation = Literal["gelu", "gelu_tanh", "quick_gelu"]
ActivationImplementation = Literal["xla", "mosaic_gpu"]
Rows = Float[Array, "*batch width"]
Vector = Float[Array, "width"]


def best_activation(x: Float[Array | jax.ShapeDtypeStruct, "*batch width"]) -> ActivationImplementation:
    """Select the fastest biased activation for the target device.

    Args:
      x: [..., width], argument of the activation.

    Returns:
      "mosaic_gpu" if the kernels support the shape and dtype and each device holds whole rows, see `rows_for_kernels`,
      at least `gpu.FEWEST_ROWS`. Otherwise "xla", which the compiler can partition. A width or dtype without kernels is
      logged once.
    """
    rows = rows_for_kernels(x.shape)
    if rows is None:
        return "xla"
    from infcl_jax.ops.bias_activation import pallas_mosaic_gpu  # needed on GPUs only

    width = x.shape[-1]
    if not pallas_mosaic_gpu.has_layout(width, x.dtype):
        gpu.log_fallback("activation", f"width {width} in {x.dtype}", pallas_mosaic_gpu.SUPPORTED)
        return "xla"
    return "mosaic_gpu" if rows >= gpu.FEWEST_ROWS else "xla"


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def activate(
    x: Float[Array, "*batch width"],
    bias: Float[Array, "width"],
    name: Activation,
    implementation: ActivationImplementation | None = None,
) -> Float[Array, "*batch width"]:
    """Apply an activation to `x + bias`, computed in float32.

    The backward pass saves `x` and recomputes the rest.

    Args:
      x: [..., width], floating.
      bias: [width].
      name: "gelu" (exact, with erf), "gelu_tanh" (with a tanh) or "quick_gelu" (`x * sigmoid(1.702 x)`), Hendrycks &
        Gimpel 2016, section 2.
      implementation: "xla", or "mosaic_gpu" for the Hopper kernels; None for `best_activation`.

    Returns:
      [..., width] in the dtype of `x`. The gradient of the bias is accumulated in float32.
    """
    if (implementation or best_activation(x)) == "mosaic_gpu":
        return _forward_kernel(x, bias, name)
    return _FUNCTIONS[name][0](_biased(x, bias)).astype(x.dtype)


def _backward(
    name: Activation, implementation: ActivationImplementation | None, saved: tuple[jax.Array, jax.Array], dy: Rows
) -> tuple[Rows, Vector]:
    x, bias = saved
    use_kernel = (implementation or best_activation(x)) == "mosaic_gpu"
    dx, d_bias = (_backward_kernel if use_kernel else _backward_xla)(x, bias, dy, name)
    return dx, d_bias.astype(bias.dtype)


activate.defvjp(lambda x, bias, *settings: (activate(x, bias, *settings), (x, bias)), _backward)


def _backward_xla(x: Rows, bias: Vector, dy: Rows, name: Activation) -> tuple[Rows, Vector]:
    # Without the barrier, XLA shares subexpressions of the two passes and stores them in float32.
    x32 = _biased(lax.optimization_barrier(x), bias)
    dx = (dy.astype(jnp.float32) * _FUNCTIONS[name][1](x32)).astype(x.dtype)
    return dx, dx.sum(tuple(range(x.ndim - 1)), dtype=jnp.float32)


def _forward_kernel(x: Rows, bias: Vector, name: Activation) -> Rows:
    from infcl_jax.ops.bias_activation import pallas_mosaic_gpu

    run = functools.partial(pallas_mosaic_gpu.forward, name=name, sm_count=gpu.multiprocessors())

    def local(x: jax.Array, bias: jax.Array) -> jax.Array:
        return run(flat_rows(x), bias).reshape(x.shape)

    batch_spec = P(automatic_axes())
    return on_each_device(local, (batch_spec, P()), batch_spec)(x, bias.astype(jnp.float32))


def _backward_kernel(x: Rows, bias: Vector, dy: Rows, name: Activation) -> tuple[Rows, Vector]:
    from infcl_jax.ops.bias_activation import pallas_mosaic_gpu

    run = functools.partial(pallas_mosaic_gpu.backward, name=name, sm_count=gpu.multiprocessors())
    axes = automatic_axes()

    def local(x: jax.Array, bias: jax.Array, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
        dx, d_bias = run(flat_rows(x), bias, flat_rows(dy))
        return dx.reshape(x.shape), lax.psum(d_bias, axes) if axes else d_bias

    batch_spec = P(axes)
    run_on_each = on_each_device(local, (batch_spec, P(), batch_spec), (batch_spec, P()))
    return run_on_each(x, bias.astype(jnp.float32), dy)


def _biased(x: jax.Array, bias: jax.Array) -> jax.Array:
    return x.astype(jnp.float32) + broadcast_vector(bias, x)


def _normal_cdf(x: jax.Array) -> jax.Array:
    return 0.5 * (1.0 + lax.erf(x * math.sqrt(0.5)))


def _gelu_derivative(x: jax.Array) -> jax.Array:
    return _normal_cdf(x) + x * jnp.exp(-0.5 * x * x) * (1 / math.sqrt(2 * math.pi))


def _quick_gelu_derivative(x: jax.Array) -> jax.Array:
    s = jax.nn.sigmoid(1.702 * x)
    return s * (1.0 + 1.702 * x * (1.0 - s))


def _gelu_tanh(x: jax.Array) -> jax.Array:
    return x * _gelu_tanh_sigmoid(x)


def _gelu_tanh_derivative(x: jax.Array) -> jax.Array:
    s = _gelu_tanh_sigmoid(x)
    return s * (1.0 + (1.0 - s) * x * (2 + 6 * 0.044715 * x * x) * math.sqrt(2 / math.pi))


def _gelu_tanh_sigmoid(x: jax.Array) -> jax.Array:
    """Compute `(1 + tanh(u)) / 2 = sigmoid(2 u)`, the cubic approximation of the normal distribution function."""
    return jax.nn.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x))


_Function = Callable[[jax.Array], jax.Array]
# Activation functions and their derivatives.
_FUNCTIONS: dict[str, tuple[_Function, _Function]] = {
    "gelu": (lambda x: x * _normal_cdf(x), _gelu_derivative),
    "gelu_tanh": (_gelu_tanh, _gelu_tanh_derivative),
    "quick_gelu": (lambda x: x * jax.nn.sigmoid(1.702 * x), _quick_gelu_derivative),
}
