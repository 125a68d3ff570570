"""What the towers are made of, with gradients written by hand.

What the automatic gradients keep is up to the compiler, which stores float32 arrays of activations to save the work of
computing them again. Here the backward pass keeps the arguments, in the compute dtype, and computes the rest in one go;
sums over rows (gradients of biases and gains) are float32, and so are statistics and elementwise functions.
"""

import functools
import re
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
Weights = tuple[Parts, Biases]


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
    return _affine(x, (kernels, biases), cast((kernels, biases), x))


@jax.custom_vjp
def _affine(x: jax.Array, weights: Weights, in_use: Weights) -> Parts:
    """Of the weights as they are used; those that they were cast from have the gradient."""
    products = (x @ kernel for kernel in in_use[0])
    pairs = zip(products, in_use[1], strict=True)
    return tuple(p if bias is None else p + along(bias, x).astype(x.dtype) for p, bias in pairs)


def _affine_forward(x: jax.Array, weights: Weights, in_use: Weights) -> tuple[Parts, tuple]:
    return _affine(x, weights, in_use), (x, weights, in_use[0])


def _affine_backward(saved: tuple, cotangents: Parts) -> tuple[jax.Array, Weights, None]:
    x, (kernels, biases), used = saved
    rows = tuple(range(x.ndim - 1))

    def of_kernel(kernel: jax.Array, cotangent: jax.Array) -> jax.Array:
        product = lax.dot_general(x, cotangent, ((rows, rows), ((), ())), preferred_element_type=jnp.float32)
        return product.astype(kernel.dtype)

    of_x, *products = (c @ k.T for k, c in zip(used, cotangents, strict=True))
    for product in products:
        # Behind the barrier the sum so far is what a product is added to, in place, not another product.
        of_x = lax.optimization_barrier(of_x) + product
    of_biases = tuple(
        None if bias is None else cotangent.sum(rows, dtype=jnp.float32).astype(bias.dtype)
        for bias, cotangent in zip(biases, cotangents, strict=True)
    )
    return of_x, (tuple(map(of_kernel, kernels, cotangents)), of_biases), None


_affine.defvjp(_affine_forward, _affine_backward)


def contract(spec: str, x: jax.Array, kernel: jax.Array) -> jax.Array:
    """A product with a matrix in parts, in the dtype of `x`.

    Args:
      spec: of `jnp.einsum`, `"x,kernel->result"`, without a letter that occurs in one of them alone.
      x: floating.
      kernel: of any floating dtype.

    Returns:
      The product. The kernel's gradient is a sum in float32.
    """
    return _contract(spec, x, kernel, cast(kernel, x))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _contract(spec: str, x: jax.Array, kernel: jax.Array, in_use: jax.Array) -> jax.Array:
    return jnp.einsum(spec, x, in_use)


def _contract_forward(spec: str, x: jax.Array, kernel: jax.Array, in_use: jax.Array) -> tuple[jax.Array, Parts]:
    return _contract(spec, x, kernel, in_use), (x, kernel, in_use)


def _contract_backward(spec: str, saved: Parts, cotangent: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x, kernel, used = saved
    of_x, of_kernel, of_y = re.split(",|->", spec)
    found = jnp.einsum(f"{of_x},{of_y}->{of_kernel}", x, cotangent, preferred_element_type=jnp.float32)
    of_x = jnp.einsum(f"{of_y},{of_kernel}->{of_x}", cotangent, used)
    return of_x, found.astype(kernel.dtype), None


_contract.defvjp(_contract_forward, _contract_backward)


@jax.custom_vjp
def with_gradient_of(x: jax.Array, added: jax.Array) -> jax.Array:
    """`x`, whose rows contain a vector that was added without gradient: its gradient comes from here.

    Args:
      x: [..., width], floating.
      added: [width].

    Returns:
      `x`. The gradient of `added` is that of `x` summed over rows in float32.
    """
    return x


def _sum_of_rows(added: jax.Array, of_x: jax.Array) -> tuple[jax.Array, jax.Array]:
    rows = tuple(range(of_x.ndim - 1))
    return of_x, of_x.sum(rows, dtype=jnp.float32).astype(added.dtype)


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
