"""Flax layers of the towers, built on `infcl_jax.ops`."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.random import threefry2x32_p
from jaxtyping import Array, Float, Integer

from infcl_jax.models.transformer_config import TransformerConfig
from infcl_jax.ops.bias_activation.api import Activation, activate
from infcl_jax.ops.layer_norm.api import normalize, normalize_with_residual
from infcl_jax.ops.linear import Arrays, Biases, affine

# Checkpoint name of the results of GEMMs with weights, for the policies of `jax.checkpoint`.
PRODUCT = "product"


@functools.cache
def normal(std: float) -> Callable[..., Array]:
    """Initialize from a normal distribution, in one program.

    XLA multiplies the constants of a program, so the last bits of two programs would differ.
    """
    return jax.jit(nn.initializers.normal(std), static_argnums=(1, 2))


@jax.custom_vjp
def take_positions(states: Float[Array, "b t width"], position: Integer[Array, "b"]) -> Float[Array, "b width"]:
    """Gather one position, in [0, t), of each sequence, with a gradient that needs no scatter."""
    return jnp.take_along_axis(states, position[:, None, None], axis=1)[:, 0]


def _take_backward(
    saved: tuple[jax.Array, jax.Array], cotangent: Float[Array, "b width"]
) -> tuple[Float[Array, "b t width"], None]:
    states, position = saved
    mask = jnp.arange(states.shape[1])[None] == position[:, None]
    return jnp.where(mask[:, :, None], cotangent[:, None], jnp.zeros_like(states)), None


take_positions.defvjp(lambda states, position: (take_positions(states, position), (states, position)), _take_backward)


class LayerNorm(nn.Module):
    """LayerNorm over the last axis to `dtype`, by default the compute dtype; parameters `scale` and `bias`."""

    config: TransformerConfig
    dtype: Any = None

    @nn.compact
    def _weights(self, width: int) -> tuple[Float[Array, "{width}"], Float[Array, "{width}"]]:
        scale = self.param("scale", nn.initializers.ones, (width,), self.config.param_dtype)
        return scale, self.param("bias", nn.initializers.zeros, (width,), self.config.param_dtype)

    def __call__(self, x: Float[Array, "*batch width"]) -> Float[Array, "*batch width"]:
        """Normalize [..., width] to [..., width] in `dtype`."""
        dtype = jnp.dtype(self.dtype or self.config.dtype)
        return normalize(x, *self._weights(x.shape[-1]), dtype, None, self.config.norm_epsilon)

    def with_residual(
        self, x: Float[Array, "*batch width"], deferred_bias: Float[Array, "width"] | None
    ) -> tuple[Float[Array, "*batch width"], Float[Array, "*batch width"]]:
        """Return the normalized input and the residual input, see `normalize_with_residual`."""
        weights, dtype = self._weights(x.shape[-1]), jnp.dtype(self.dtype or self.config.dtype)
        return normalize_with_residual(x, *weights, deferred_bias, dtype, None, self.config.norm_epsilon)


class Dense(nn.Module):
    """Dense layer with normal initial weights of standard deviation `std`; the caller selects how its bias is added.

    Parameters: `kernel` [inputs, features] and `bias` [features].
    """

    config: TransformerConfig
    features: int
    std: float

    @nn.compact
    def weights(self, inputs: int) -> tuple[Float[Array, "{inputs} {self.features}"], Float[Array, "{self.features}"]]:
        """Return kernel and bias, for callers with their own GEMM."""
        dtype = self.config.param_dtype
        kernel = self.param("kernel", normal(self.std), (inputs, self.features), dtype)
        return kernel, self.param("bias", nn.initializers.zeros, (self.features,), dtype)

    def activated(
        self, x: Float[Array, "*batch inputs"], activation: Activation
    ) -> Float[Array, "*batch {self.features}"]:
        """Map [..., inputs] to `activation(x @ kernel + bias)`, [..., features] in `dtype`."""
        kernel, bias = self.weights(x.shape[-1])
        return activate(checkpointed_affine(x.astype(self.config.dtype), (kernel,), (None,))[0], bias, activation)

    def without_bias_gradient(
        self, x: Float[Array, "*batch inputs"]
    ) -> tuple[Float[Array, "*batch {self.features}"], Float[Array, "{self.features}"]]:
        """Return `x @ kernel + bias` in the compute dtype, and the bias.

        The bias is added under `stop_gradient`, so the caller must route its gradient, see `route_gradient`.
        """
        kernel, bias = self.weights(x.shape[-1])
        return checkpointed_affine(x.astype(self.config.dtype), (kernel,), (lax.stop_gradient(bias),))[0], bias


class TokenDropout(nn.Module):
    """Dropout with masks that do not depend on the layout of the batch.

    The mask of a token is a function of the "dropout" rng and the index of the token, so padded and packed sequences
    get the same masks. The random bits are the Threefry hash of the counter (index, channel // 4). One hash gives four
    channels 16 bits each, so the rate is rounded down to a multiple of 2^-16.

    Sources: Srivastava et al. 2014; Salmon et al. 2011 (counter-based random numbers).
    """

    rate: float

    @nn.compact
    def __call__(
        self, x: Float[Array, "*batch width"], index: Integer[Array, "*batch"], train: bool
    ) -> Float[Array, "*batch width"]:
        """Drop elements of [..., width] and scale the others to the expectation `x`.

        Args:
          x: states of tokens.
          index: index of each token, see `PackedRows.padded_index`.
          train: whether dropout is on; it needs the "dropout" rng unless the rate is 0.
        """
        if not (train and self.rate):
            return x
        dropped, width = int(self.rate * 2**16), x.shape[-1]
        shape = (*index.shape, -(-width // 4))
        token = jnp.broadcast_to(index.astype(jnp.uint32)[..., None], shape)
        channels = lax.broadcasted_iota(jnp.uint32, shape, index.ndim)
        words = threefry2x32_p.bind(*jax.random.bits(self.make_rng("dropout"), (2,)), token, channels)
        kept = jnp.concatenate([bits >= dropped for word in words for bits in (word >> 16, word & 0xFFFF)], axis=-1)
        return jnp.where(kept[..., :width], x / (1 - dropped / 2**16), jnp.zeros_like(x))


def feature_projection(config: TransformerConfig, features: int, name: str, *, use_bias: bool = False) -> nn.Dense:
    """Build a float32 projection of pooled states, whose cost is negligible."""
    return nn.Dense(
        features,
        use_bias=use_bias,
        dtype=jnp.float32,
        param_dtype=config.param_dtype,
        kernel_init=normal(config.input_std),
        name=name,
    )


def checkpointed_affine(x: jax.Array, kernels: Arrays, biases: Biases) -> Arrays:
    """Compute `affine`, with results checkpointed under the name `PRODUCT`."""
    return tuple(checkpoint_name(y, PRODUCT) for y in affine(x, kernels, biases))
