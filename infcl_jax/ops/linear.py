"""Linear layers in the compute dtype with gradients accumulated in float32.

With automatic differentiation, XLA may store float32 copies of activations instead of recomputing them. Here the
forward pass saves the arguments in the compute dtype, and the backward pass recomputes the rest.
"""

import functools
import re
import string
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from infcl_jax.ops.layer_norm.api import broadcast_vector

# Checkpoint name of values that depend on the parameters alone, see `infcl_jax.cached_value_and_grad`.
DERIVED = "derived"

Arrays = tuple[jax.Array, ...]
Biases = tuple[jax.Array | None, ...]


def cast(parameters: Any, x: jax.Array) -> Any:
    """Cast parameters to the dtype of `x`, without gradient.

    The results are checkpointed under the name `DERIVED`, so gradient caching computes them once for all chunks.
    """
    return jax.tree.map(lambda a: checkpoint_name(lax.stop_gradient(a).astype(x.dtype), DERIVED), parameters)


def affine(
    x: Float[Array, "*batch inputs"],
    kernels: tuple[Float[Array, "inputs _"], ...],
    biases: tuple[Float[Array, "_"] | None, ...],
) -> tuple[Float[Array, "*batch _"], ...]:
    """Compute `x @ kernel + bias` for each kernel and bias.

    Args:
      x: [..., inputs], floating.
      kernels: one or more kernels [inputs, features], of any floating dtype.
      biases: one bias [features] for each kernel, of any floating dtype; None for no bias.

    Returns:
      One array [..., features] for each kernel, in the dtype of `x`. Gradients of kernels and biases are accumulated in
      float32.
    """
    leading = string.ascii_lowercase[: x.ndim - 1]
    outputs = _multiply(f"{leading}y,yz->{leading}z", x, kernels, cast(kernels, x))

    def add_bias(y: jax.Array, bias: jax.Array | None) -> jax.Array:
        return y if bias is None else route_gradient(y + broadcast_vector(cast(bias, x), x).astype(x.dtype), bias)

    return tuple(add_bias(y, bias) for y, bias in zip(outputs, biases, strict=True))


def contract(spec: str, x: Float[Array, "..."], kernel: Float[Array, "..."]) -> Float[Array, "..."]:
    """Contract `x` with a reshaped kernel in the dtype of `x`.

    Args:
      spec: subscripts `"x,kernel->result"` of `jnp.einsum`; each letter must occur in at least two of the three terms.
      x: floating.
      kernel: weights of any floating dtype.

    Returns:
      The product in the dtype of `x`. The gradient of the kernel is accumulated in float32.
    """
    return _multiply(spec, x, (kernel,), (cast(kernel, x),))[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _multiply(spec: str, x: jax.Array, kernels: Arrays, cast_kernels: Arrays) -> Arrays:
    """Multiply `x` with the cast kernels, with gradients for `kernels` instead."""
    return tuple(jnp.einsum(spec, x, kernel) for kernel in cast_kernels)


def _multiply_forward(spec: str, x: jax.Array, kernels: Arrays, cast_kernels: Arrays) -> tuple[Arrays, tuple]:
    return _multiply(spec, x, kernels, cast_kernels), (x, kernels, cast_kernels)


def _multiply_backward(spec: str, saved: tuple, cotangents: Arrays) -> tuple[jax.Array, Arrays, None]:
    x, kernels, cast_kernels = saved
    x_axes, kernel_axes, y_axes = re.split(",|->", spec)

    def d_kernel(kernel: jax.Array, dy: jax.Array) -> jax.Array:
        dw = jnp.einsum(f"{x_axes},{y_axes}->{kernel_axes}", x, dy, preferred_element_type=jnp.float32)
        return dw.astype(kernel.dtype)

    dx, *terms = (
        jnp.einsum(f"{y_axes},{kernel_axes}->{x_axes}", dy, w) for w, dy in zip(cast_kernels, cotangents, strict=True)
    )
    for term in terms:
        # The barrier makes XLA fuse each sum into the next GEMM, which accumulates into the partial sum in place.
        dx = lax.optimization_barrier(dx) + term
    return dx, tuple(map(d_kernel, kernels, cotangents)), None


_multiply.defvjp(_multiply_forward, _multiply_backward)


@jax.custom_vjp
def route_gradient(x: Float[Array, "*batch width"], bias: Float[Array, "n"]) -> Float[Array, "*batch width"]:
    """Return `x` and route its gradient to a bias already added to it.

    Args:
      x: [..., width], floating, to which the bias was added under `stop_gradient`.
      bias: [n], bias of the first n columns of `x`.

    Returns:
      `x`. The gradient of the bias is the float32 sum over rows of the gradient of `x`.
    """
    return x


def _route_backward(
    bias: Float[Array, "n"], dx: Float[Array, "*batch width"]
) -> tuple[Float[Array, "*batch width"], Float[Array, "n"]]:
    leading_axes = tuple(range(dx.ndim - 1))
    return dx, dx[..., : len(bias)].sum(leading_axes, dtype=jnp.float32).astype(bias.dtype)


route_gradient.defvjp(lambda x, bias: (x, bias), _route_backward)
