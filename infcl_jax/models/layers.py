"""What the towers are made of, with gradients written by hand.

What the automatic gradients keep is up to the compiler, which stores float32 arrays of activations to save the work of
computing them again. Here the backward pass keeps the arguments, in the compute dtype, and computes the rest in one go;
sums over rows (gradients of biases and gains) are float32, and so are statistics and elementwise functions.
"""

import functools
import re
import string
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from infcl_jax.grad_cache import DERIVED
from infcl_jax.models.activation import Activation, activate
from infcl_jax.models.normalization import along, normalize, normalize_beside

# Name of what a `Dense` layer returns, for the policies of `jax.checkpoint`.
PRODUCT = "product"

Parts = tuple[jax.Array, ...]
Biases = tuple[jax.Array | None, ...]


def cast(parameters: Any, x: jax.Array) -> Any:
    """Parameters in the dtype of `x`, without gradient; with gradient caching they are computed once for all chunks."""
    return jax.tree.map(lambda a: checkpoint_name(lax.stop_gradient(a).astype(x.dtype), DERIVED), parameters)


def affine(x: jax.Array, kernels: Parts, biases: Biases) -> Parts:
    """`x @ kernel + bias` for one kernel and bias or several, in the dtype of `x`.

    Args:
      x: [..., inputs], floating.
      kernels: of [inputs, features], of any floating dtype.
      biases: as many, of [features], likewise; None for no bias.

    Returns:
      As many [..., features] in the dtype of `x`. Gradients of kernels and biases are sums in float32.
    """
    rows = string.ascii_lowercase[: x.ndim - 1]
    parts = _multiply(f"{rows}y,yz->{rows}z", x, kernels, cast(kernels, x))

    def biased(part: jax.Array, bias: jax.Array | None) -> jax.Array:
        return part if bias is None else with_gradient_of(part + along(cast(bias, x), x).astype(x.dtype), bias)

    return tuple(biased(part, bias) for part, bias in zip(parts, biases, strict=True))


def contract(spec: str, x: jax.Array, kernel: jax.Array) -> jax.Array:
    """A product with a matrix in parts, in the dtype of `x`.

    Args:
      spec: of `jnp.einsum`, `"x,kernel->result"`, without a letter that occurs in one of them alone.
      x: floating.
      kernel: of any floating dtype.

    Returns:
      The product. The kernel's gradient is a sum in float32.
    """
    return _multiply(spec, x, (kernel,), (cast(kernel, x),))[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _multiply(spec: str, x: jax.Array, kernels: Parts, used: Parts) -> Parts:
    """Products with what is used of the kernels, which have the gradients."""
    return tuple(jnp.einsum(spec, x, kernel) for kernel in used)


def _multiply_forward(spec: str, x: jax.Array, kernels: Parts, used: Parts) -> tuple[Parts, tuple]:
    return _multiply(spec, x, kernels, used), (x, kernels, used)


def _multiply_backward(spec: str, saved: tuple, cotangents: Parts) -> tuple[jax.Array, Parts, None]:
    x, kernels, used = saved
    of_x, of_kernel, of_y = re.split(",|->", spec)

    def gradient(kernel: jax.Array, cotangent: jax.Array) -> jax.Array:
        found = jnp.einsum(f"{of_x},{of_y}->{of_kernel}", x, cotangent, preferred_element_type=jnp.float32)
        return found.astype(kernel.dtype)

    total, *products = (jnp.einsum(f"{of_y},{of_kernel}->{of_x}", c, k) for k, c in zip(used, cotangents, strict=True))
    for product in products:
        # Behind the barrier the sum so far is what a product is added to, in place, not another product.
        total = lax.optimization_barrier(total) + product
    return total, tuple(map(gradient, kernels, cotangents)), None


_multiply.defvjp(_multiply_forward, _multiply_backward)


@jax.custom_vjp
def with_gradient_of(x: jax.Array, added: jax.Array) -> jax.Array:
    """`x`, whose rows contain a vector that was added without gradient: its gradient comes from here.

    Args:
      x: [..., width], floating.
      added: [n], what was added to the first n columns.

    Returns:
      `x`. The gradient of `added` is that of `x` summed over rows in float32.
    """
    return x


def _sum_of_rows(added: jax.Array, of_x: jax.Array) -> tuple[jax.Array, jax.Array]:
    rows = tuple(range(of_x.ndim - 1))
    return of_x, of_x[..., : len(added)].sum(rows, dtype=jnp.float32).astype(added.dtype)


with_gradient_of.defvjp(lambda x, added: (x, added), _sum_of_rows)


@jax.custom_vjp
def take_positions(states: jax.Array, position: jax.Array) -> jax.Array:
    """One state of each sequence.

    Args:
      states: [b, t, width], floating.
      position: integer [b], from 0 and below t.

    Returns:
      [b, width]. The gradient is written in one go, without a scatter.
    """
    return jnp.take_along_axis(states, position[:, None, None], axis=1)[:, 0]


def _take_backward(saved: tuple[jax.Array, jax.Array], cotangent: jax.Array) -> tuple[jax.Array, None]:
    states, position = saved
    taken = jnp.arange(states.shape[1])[None] == position[:, None]
    return jnp.where(taken[:, :, None], cotangent[:, None], jnp.zeros_like(states)), None


take_positions.defvjp(lambda states, position: (take_positions(states, position), (states, position)), _take_backward)


class LayerNorm(nn.Module):
    """`normalize` to a result of any dtype; parameters `scale` and `bias`."""

    dtype: Any
    param_dtype: Any

    @nn.compact
    def _weights(self, width: int) -> tuple[jax.Array, jax.Array]:
        scale = self.param("scale", nn.initializers.ones, (width,), self.param_dtype)
        return scale, self.param("bias", nn.initializers.zeros, (width,), self.param_dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps [..., width] to [..., width] in `dtype`."""
        return normalize(x, *self._weights(x.shape[-1]), jnp.dtype(self.dtype))

    def beside(self, x: jax.Array, added: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """That and `x` itself, see `normalize_beside`."""
        return normalize_beside(x, *self._weights(x.shape[-1]), added, jnp.dtype(self.dtype))


class Dense(nn.Module):
    """`affine` with normal weights: parameters `kernel` [inputs, features] and `bias` [features].

    Attributes:
      features: of the result.
      std: standard deviation of the weights at the start.
      dtype: of the result.
      param_dtype: of the parameters.
    """

    features: int
    std: float
    dtype: Any
    param_dtype: Any

    @nn.compact
    def weights(self, inputs: int) -> tuple[jax.Array, jax.Array]:
        """Kernel and bias, for those who multiply themselves."""
        kernel = self.param("kernel", nn.initializers.normal(self.std), (inputs, self.features), self.param_dtype)
        return kernel, self.param("bias", nn.initializers.zeros, (self.features,), self.param_dtype)

    def activated(self, x: jax.Array, activation: Activation) -> jax.Array:
        """Maps [..., inputs] to the activation of the layer's [..., features], in `dtype`."""
        kernel, bias = self.weights(x.shape[-1])
        return activate(products(x.astype(self.dtype), (kernel,), (None,))[0], bias, activation)

    def without_bias_gradient(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Maps [..., inputs] to [..., features] in `dtype`, and to the bias, which has its gradient from elsewhere."""
        kernel, bias = self.weights(x.shape[-1])
        return products(x.astype(self.dtype), (kernel,), (lax.stop_gradient(bias),))[0], bias


def products(x: jax.Array, kernels: Parts, biases: Biases) -> Parts:
    """`affine`, of which the policies of `jax.checkpoint` keep the results."""
    return tuple(checkpoint_name(part, PRODUCT) for part in affine(x, kernels, biases))
