"""What the towers are made of, with gradients written by hand.

What the automatic gradients keep is up to the compiler, which stores float32 arrays of activations to save the work of
computing them again. Here the backward pass keeps the arguments, in the compute dtype, and computes the rest in one go;
sums over rows (gradients of biases and gains) are float32, and so are statistics and elementwise functions.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from infcl_jax.models.activation import Activation, activate
from infcl_jax.models.normalization import along, normalize, normalize_beside

# Name of what a `Dense` layer returns, for the policies of `jax.checkpoint`.
PRODUCT = "product"

Parts = tuple[jax.Array, ...]
Biases = tuple[jax.Array | None, ...]


@jax.custom_vjp
def affine(x: jax.Array, kernels: Parts, biases: Biases) -> Parts:
    """`x @ kernel + bias` for one kernel and bias or several, in the dtype of `x`.

    Args:
      x: [..., inputs], floating.
      kernels: of [inputs, features], of any floating dtype.
      biases: as many, of [features], likewise; None for no bias.

    Returns:
      As many [..., features] in the dtype of `x`. Gradients of kernels and biases are sums in float32.
    """
    products = (x @ kernel.astype(x.dtype) for kernel in kernels)
    pairs = zip(products, biases, strict=True)
    return tuple(p if bias is None else p + along(bias, x).astype(x.dtype) for p, bias in pairs)


def _affine_forward(x: jax.Array, kernels: Parts, biases: Biases) -> tuple[Parts, tuple]:
    return affine(x, kernels, biases), (x, kernels, biases)


def _affine_backward(saved: tuple, cotangents: Parts) -> tuple[jax.Array, Parts, Biases]:
    x, kernels, biases = saved
    rows = tuple(range(x.ndim - 1))

    def of_kernel(kernel: jax.Array, cotangent: jax.Array) -> jax.Array:
        product = lax.dot_general(x, cotangent, ((rows, rows), ((), ())), preferred_element_type=jnp.float32)
        return product.astype(kernel.dtype)

    of_x, *products = (c @ k.astype(x.dtype).T for k, c in zip(kernels, cotangents, strict=True))
    for product in products:
        # Behind the barrier the sum so far is what a product is added to, in place, not another product.
        of_x = lax.optimization_barrier(of_x) + product
    of_biases = tuple(
        None if bias is None else cotangent.sum(rows, dtype=jnp.float32).astype(bias.dtype)
        for bias, cotangent in zip(biases, cotangents, strict=True)
    )
    return of_x, tuple(map(of_kernel, kernels, cotangents)), of_biases


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
    def __call__(self, x: jax.Array, parts: int = 1, activation: Activation | None = None) -> tuple[jax.Array, ...]:
        """Maps [..., inputs] to `parts` times [..., features / parts] in `dtype`.

        Args:
          x: [..., inputs].
          parts: of the result; cheaper than slices.
          activation: of the result, in one part.
        """
        shape = (x.shape[-1], self.features)
        kernel = self.param("kernel", nn.initializers.normal(self.std), shape, self.param_dtype)
        bias = self.param("bias", nn.initializers.zeros, shape[1:], self.param_dtype)
        kernels = tuple(jnp.split(kernel, parts, axis=1))
        biases = tuple(jnp.split(bias, parts)) if activation is None else (None,)
        products = (checkpoint_name(part, PRODUCT) for part in affine(x.astype(self.dtype), kernels, biases))
        return tuple(products if activation is None else (activate(p, bias, activation) for p in products))
