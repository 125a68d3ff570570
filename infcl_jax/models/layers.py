"""Layers of the towers, on the operations of `infcl_jax.ops`."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from infcl_jax.ops.bias_activation.api import Activation, activate
from infcl_jax.ops.layer_norm.api import normalize, normalize_beside
from infcl_jax.ops.linear import Biases, Parts, affine

# Name of what a `Dense` layer returns, for the policies of `jax.checkpoint`.
PRODUCT = "product"


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
