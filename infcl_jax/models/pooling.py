"""Attention pooling with a learned query."""

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from infcl_jax.models.layers import checkpointed_affine, normal
from infcl_jax.models.transformer import Mlp, layer_norm, projection
from infcl_jax.models.transformer_config import TransformerConfig
from infcl_jax.ops.attention.api import attend_from
from infcl_jax.ops.layer_norm.api import broadcast_vector
from infcl_jax.ops.linear import route_gradient


class MapPool(nn.Module):
    """Multi-head attention pooling (MAP) of SigLIP's image tower.

    A learned query attends to all tokens, and an MLP with a LayerNorm and a residual connection follows.

    Parameters: `probe` [width], the query before its projection; `attn` {`in_proj`, `out_proj`} as in `SelfAttention`;
    `ln`; `mlp`.

    Source: Zhai et al. 2022 (Scaling Vision Transformers), section 3.2.
    """

    config: TransformerConfig

    @nn.compact
    def __call__(self, tokens: Float[Array, "b t {self.config.width}"]) -> Float32[Array, "b {self.config.width}"]:
        """Pool [b, t, width] to float32 [b, width]."""
        c, b = self.config, tokens.shape[0]
        probe = self.param("probe", normal(c.input_std), (c.width,), c.param_dtype)
        pooled = _ProbeAttention(c, name="attn")(probe, tokens.astype(c.dtype))
        y, bias = Mlp(c, name="mlp")(layer_norm(c, "ln")(pooled))
        return (pooled + route_gradient(y, bias)).astype(jnp.float32).reshape(b, c.width)


class _ProbeAttention(nn.Module):
    """Attention of one learned query, with the parameters of `SelfAttention`."""

    config: TransformerConfig

    @nn.compact
    def __call__(
        self, probe: Float[Array, "width"], tokens: Float[Array, "b t width"]
    ) -> Float[Array, "b {self.config.width}"]:
        c, b = self.config, tokens.shape[0]
        kernel, in_bias = projection(c, 3 * c.width, c.input_std, "in_proj").weights(c.width)
        query_kernel, key_kernel, value_kernel = jnp.split(kernel, 3, axis=1)
        # The softmax is invariant to the key bias, and its weights sum to 1, so the value bias is added to the result.
        query_bias, _, value_bias = jnp.split(in_bias, 3)
        (query,) = checkpointed_affine(probe[None].astype(c.dtype), (query_kernel,), (query_bias,))
        query = jnp.broadcast_to(query, (b, c.width)).reshape(b, c.heads, c.width // c.heads)
        first = jnp.zeros(b, jnp.int32)
        y = attend_from(query, tokens, key_kernel, value_kernel, first, causal=False).reshape(b, c.width)
        y = (y.astype(jnp.float32) + broadcast_vector(value_bias, y)).astype(c.dtype)
        out_kernel, out_bias = projection(c, c.width, c.residual_std, "out_proj").weights(c.width)
        return checkpointed_affine(y, (out_kernel,), (out_bias,))[0]
