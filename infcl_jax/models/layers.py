"""What the towers are made of, with gradients written by hand.

What the automatic gradients keep is up to the compiler, which stores float32 arrays of activations to save the work of
computing them again. Here the backward pass keeps the arguments, in the compute dtype, and computes the rest in one go;
sums over rows (gradients of biases and gains) are float32, and so are statistics and elementwise functions.
"""

import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from infcl_jax.models.normalization import along, normalize, normalize_beside

# Name of what a `Dense` layer returns, for the policies of `jax.checkpoint`.
PRODUCT = "product"

Parts = tuple[jax.Array, ...]


def _elementwise(function: Callable[[jax.Array], jax.Array], slope: Callable[[jax.Array], jax.Array]) -> Callable:
    """A function that keeps its argument's dtype, computed in float32, with its derivative."""

    @jax.custom_vjp
    def apply(x: jax.Array) -> jax.Array:
        return function(x.astype(jnp.float32)).astype(x.dtype)

    def backward(x: jax.Array, cotangent: jax.Array) -> tuple[jax.Array]:
        # Without the barrier the compiler keeps what both passes compute of `x`, in float32.
        wide = lax.optimization_barrier(x).astype(jnp.float32)
        return ((cotangent.astype(jnp.float32) * slope(wide)).astype(x.dtype),)

    apply.defvjp(lambda x: (apply(x), x), backward)
    return apply


def _normal_cdf(x: jax.Array) -> jax.Array:
    return 0.5 * (1.0 + lax.erf(x * math.sqrt(0.5)))


def _gelu_slope(x: jax.Array) -> jax.Array:
    return _normal_cdf(x) + x * jnp.exp(-0.5 * x * x) * (1 / math.sqrt(2 * math.pi))


def _quick_gelu_slope(x: jax.Array) -> jax.Array:
    s = jax.nn.sigmoid(1.702 * x)
    return s * (1.0 + 1.702 * x * (1.0 - s))


# Hendrycks & Gimpel 2016: with erf, and section 2's approximation `x * sigmoid(1.702 x)`.
gelu = _elementwise(lambda x: x * _normal_cdf(x), _gelu_slope)
quick_gelu = _elementwise(lambda x: x * jax.nn.sigmoid(1.702 * x), _quick_gelu_slope)


@jax.custom_vjp
def affine(x: jax.Array, kernels: Parts, biases: Parts) -> Parts:
    """`x @ kernel + bias` for one kernel and bias or several, in the dtype of `x`.

    Args:
      x: [..., inputs], floating.
      kernels: of [inputs, features], of any floating dtype.
      biases: as many, of [features], likewise.

    Returns:
      As many [..., features] in the dtype of `x`. Gradients of kernels and biases are sums in float32.
    """
    pairs = zip(kernels, biases, strict=True)
    return tuple(x @ kernel.astype(x.dtype) + along(bias, x).astype(x.dtype) for kernel, bias in pairs)


def _affine_forward(x: jax.Array, kernels: Parts, biases: Parts) -> tuple[Parts, tuple]:
    return affine(x, kernels, biases), (x, kernels, biases)


def _affine_backward(saved: tuple, cotangents: Parts) -> tuple[jax.Array, Parts, Parts]:
    x, kernels, biases = saved
    rows = tuple(range(x.ndim - 1))

    def of_kernel(kernel: jax.Array, cotangent: jax.Array) -> jax.Array:
        product = lax.dot_general(x, cotangent, ((rows, rows), ((), ())), preferred_element_type=jnp.float32)
        return product.astype(kernel.dtype)

    of_x, *products = (c @ k.astype(x.dtype).T for k, c in zip(kernels, cotangents, strict=True))
    for product in products:
        # Behind the barrier the sum so far is what a product is added to, in place, not another product.
        of_x = lax.optimization_barrier(of_x) + product
    of_biases = (c.sum(rows, dtype=jnp.float32).astype(b.dtype) for b, c in zip(biases, cotangents, strict=True))
    return of_x, tuple(map(of_kernel, kernels, cotangents)), tuple(of_biases)


affine.defvjp(_affine_forward, _affine_backward)


class LayerNorm(nn.Module):
    """`normalize` to a result of any dtype; parameters `scale` and `bias`."""

    dtype: Any
    param_dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array, beside: bool = False) -> Any:
        """Maps [..., width] to [..., width] in `dtype`; `beside`: and `x` itself, see `normalize_beside`."""
        scale = self.param("scale", nn.initializers.ones, x.shape[-1:], self.param_dtype)
        bias = self.param("bias", nn.initializers.zeros, x.shape[-1:], self.param_dtype)
        return (normalize_beside if beside else normalize)(x, scale, bias, jnp.dtype(self.dtype))


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
    def __call__(self, x: jax.Array, parts: int = 1) -> tuple[jax.Array, ...]:
        """Maps [..., inputs] to `parts` times [..., features / parts] in `dtype`; parts are cheaper than slices."""
        shape = (x.shape[-1], self.features)
        kernel = self.param("kernel", nn.initializers.normal(self.std), shape, self.param_dtype)
        bias = self.param("bias", nn.initializers.zeros, shape[1:], self.param_dtype)
        weights = tuple(jnp.split(kernel, parts, axis=1)), tuple(jnp.split(bias, parts))
        return tuple(checkpoint_name(part, PRODUCT) for part in affine(x.astype(self.dtype), *weights))
