"""The pre-LayerNorm transformer that both towers share.

Parameters are stored in `param_dtype` and GEMMs run in `dtype`. LayerNorm, biases, activation functions and the softmax
are computed in float32, and their results are stored in `dtype`. The final projection to features is float32.

Layers are unrolled (`block_00`, `block_01`, ...), not scanned. A scan compiles faster, but stacks the weights of all
layers into one array. Per-layer rules (learning rate, freezing) and weight conversion address layers by name.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int32, Integer

from infcl_jax.models.layers import PRODUCT, Dense, LayerNorm, TokenDropout, checkpointed_affine, take_positions
from infcl_jax.models.transformer_config import Remat, TransformerConfig
from infcl_jax.ops.attention.api import AttentionImplementation, attend, attend_from, padding_for, prefers_packed
from infcl_jax.ops.layer_norm.api import broadcast_vector
from infcl_jax.ops.linear import route_gradient
from infcl_jax.ops.packing import PackedRows

# Checkpoint name of the residual stream after each attention and each MLP, for the policies of `jax.checkpoint`.
RESIDUAL = "residual"


class SelfAttention(nn.Module):
    """Multi-head self-attention (Vaswani et al. 2017, section 3.2.2).

    Parameters: `in_proj` {kernel [width, 3 width], bias}, whose columns are query, key, value, each ordered by head;
    `out_proj` {kernel [width, width], bias}. The last `padding` of all `positions` are masked as keys.

    Two biases need no pass over activations. The softmax is invariant to the key bias, which shifts all scores of a
    query equally, so that bias is not used and gets no gradient. The softmax weights sum to 1, so the value bias passes
    through the attention unchanged. It is therefore multiplied with `out_proj` and added to the output bias.
    """

    config: TransformerConfig
    positions: int
    padding: int = 0

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "tokens width"],
        position: Integer[Array, "n"] | None = None,
        key_mask: Bool[Array, "b t"] | None = None,
        packed: PackedRows | None = None,
    ) -> tuple[Float[Array, "rows width"], Float[Array, "width"]]:
        """Apply self-attention to tokens [b * t, width], to all of them or to one of each sequence.

        Args:
          x: tokens, floating.
          position: position of the only token to compute in each sequence; None for all tokens. With `packed`, the
            token's index, as of `PackedRows.take`.
          key_mask: False for tokens that no token attends to; None for none. Only without `position`.
          packed: rows in which each sequence attends to itself; None for one sequence a row.

        Returns:
          [b * t, width], or [n, width] with `position`, in the compute dtype; and the bias [width] added to it under
          `stop_gradient`, whose gradient the caller must route, see `route_gradient`.
        """
        c = self.config
        x = x.astype(c.dtype)
        kernel, in_bias = Dense(c, 3 * c.width, c.input_std, name="in_proj").weights(c.width)
        query_bias, _, value_bias = jnp.split(in_bias, 3)
        out_kernel, out_bias = Dense(c, c.width, c.residual_std, name="out_proj").weights(c.width)
        if position is None or packed is not None:
            spans = None if packed is None else (packed.start, packed.stop)
            qkv = self._project(x, kernel, query_bias, c.attention if key_mask is None else "xla")
            y = attend(
                *qkv,
                causal=c.causal,
                padding=self.padding,
                key_mask=key_mask,
                spans=spans,
                implementation=c.attention,
            ).reshape(-1, c.width)
            if position is not None:
                y = packed.take(y, position)
        else:
            query_kernel, key_kernel, value_kernel = jnp.split(kernel, 3, axis=1)
            tokens = x.reshape(-1, self.positions, c.width)
            (query,) = checkpointed_affine(take_positions(tokens, position), (query_kernel,), (query_bias,))
            query = query.reshape(-1, c.heads, c.width // c.heads)
            y = attend_from(query, tokens, key_kernel, value_kernel, position, causal=c.causal, padding=self.padding)
        factors = (a.astype(jnp.float32) for a in (value_bias, out_kernel))
        bias = jnp.matmul(*factors, precision=jax.lax.Precision.HIGHEST) + out_bias.astype(jnp.float32)
        (y,) = checkpointed_affine(y.reshape(-1, c.width), (out_kernel,), (jax.lax.stop_gradient(bias),))
        return y, bias

    def _project(
        self,
        x: Float[Array, "tokens width"],
        kernel: Float[Array, "width _"],
        query_bias: Float[Array, "width"],
        implementation: AttentionImplementation | None,
    ) -> tuple[Float[Array, "b {self.positions} heads d"], ...]:
        """Project all tokens to queries, keys and values, packed if `prefers_packed`."""
        c, positions = self.config, self.positions
        channels = c.width // c.heads
        if prefers_packed((x.shape[0] // positions, positions, c.heads, channels), c.dtype, implementation):
            bias = jnp.pad(jax.lax.stop_gradient(query_bias), (0, 2 * c.width))
            (packed,) = checkpointed_affine(x, (kernel,), (bias,))
            return (route_gradient(packed, query_bias).reshape(-1, positions, 3 * c.heads, channels),)
        qkv = checkpointed_affine(x, tuple(jnp.split(kernel, 3, axis=1)), (query_bias, None, None))
        return tuple(a.reshape(-1, positions, c.heads, channels) for a in qkv)


class Mlp(nn.Module):
    """Two dense layers with an activation in between.

    Parameters: `c_fc` {kernel [width, hidden], bias}, `c_proj` {kernel [hidden, width], bias}.
    """

    config: TransformerConfig

    @nn.compact
    def __call__(self, x: Float[Array, "*batch width"]) -> tuple[Float[Array, "*batch width"], Float[Array, "width"]]:
        """Apply the MLP to [..., width] in the compute dtype.

        The bias [width] of `c_proj`, also returned, is added under `stop_gradient`, see `Dense.without_bias_gradient`.
        """
        c = self.config
        hidden = Dense(c, int(c.width * c.mlp_ratio), c.mlp_std, name="c_fc").activated(x, c.activation)
        return Dense(c, c.width, c.residual_std, name="c_proj").without_bias_gradient(hidden)


class TransformerBlock(nn.Module):
    """One pre-LayerNorm block: `x + attention(LN(x))`, then `x + MLP(LN(x))`.

    Parameters: `ln_1`, `attn`, `ln_2`, `mlp`; with layer scale `ls_1` and `ls_2` [width], the factors of the outputs of
    attention and MLP. The last `padding` of all `positions` are masked as keys.
    """

    config: TransformerConfig
    positions: int
    padding: int = 0

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "tokens width"],
        deferred_bias: Float[Array, "width"] | None,
        position: Integer[Array, "n"] | None,
        train: bool,
        packed: PackedRows | None = None,
    ) -> tuple[Float[Array, "rows width"], Float[Array, "width"] | None]:
        """Run the block on [b * t, width] in the compute dtype.

        Args:
          x: tokens.
          deferred_bias: bias added to `x` under `stop_gradient`, see `normalize_with_residual`; None for no bias.
          position: see `SelfAttention`.
          train: whether dropout is on.
          packed: see `SelfAttention`.

        Returns:
          [b * t, width], or [n, width] with `position`; and the bias added to it under `stop_gradient`, None for none.
        """
        c = self.config

        def scale_and_drop(y: jax.Array, bias: jax.Array, number: int) -> tuple[jax.Array, jax.Array | None]:
            if c.layer_scale is None and not (train and c.dropout):
                return y, bias
            # Layer scale and dropout change the cotangent of `y`, so the gradient of the bias is routed before them.
            y = route_gradient(y, bias)
            if c.layer_scale is not None:
                init = nn.initializers.constant(c.layer_scale)
                factors = self.param(f"ls_{number}", init, (c.width,), c.param_dtype)
                y = (y.astype(jnp.float32) * broadcast_vector(factors, y)).astype(y.dtype)
            return TokenDropout(c.dropout, name=f"drop_{number}")(y, index, train), None

        index = self._padded_index(x.shape[0], position, packed)
        attention = SelfAttention(c, self.positions, self.padding, name="attn")
        y, x = LayerNorm(c, name="ln_1").with_residual(x, deferred_bias)
        y, deferred_bias = scale_and_drop(*attention(y, position, packed=packed), 1)
        if packed is not None and position is not None:
            x = packed.take(x, position)
        elif position is not None:
            x = take_positions(x.reshape(-1, self.positions, c.width), position)
        x = checkpoint_name(x + y, RESIDUAL)
        y, x = LayerNorm(c, name="ln_2").with_residual(x, deferred_bias)
        y, deferred_bias = scale_and_drop(*Mlp(c, name="mlp")(y), 2)
        return x + y, deferred_bias

    def _padded_index(
        self, tokens: int, position: Integer[Array, "n"] | None, packed: PackedRows | None
    ) -> Int32[Array, "rows"]:
        """Return the index of each computed token, see `PackedRows.padded_index`."""
        if packed is not None:
            index = packed.padded_index.reshape(-1)
            return index if position is None else packed.take(index, position)
        sequence = jnp.arange(tokens // self.positions, dtype=jnp.int32)[:, None]
        steps = jnp.arange(self.positions, dtype=jnp.int32)[None] if position is None else position[:, None]
        return (sequence * (self.positions - self.padding) + steps.astype(jnp.int32)).reshape(-1)


def rematerialized[Block: nn.Module](block: type[Block], remat: Remat | None, train_argument: int) -> type[Block]:
    """Return the class of blocks that recompute activations, see `TransformerConfig.remat`.

    `train_argument` is the index of the argument `train` of the block's call, with `self` as 0.
    """
    if remat is None:
        return block
    policies = {"full": None, "dots": jax.checkpoint_policies.save_only_these_names(PRODUCT)}
    return nn.remat(block, policy=policies[remat], static_argnums=(train_argument,))


class Transformer(nn.Module):
    """Stack of `config.layers` blocks, named `block_00`, `block_01`, ..."""

    config: TransformerConfig

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "b t width"],
        position: Integer[Array, "n"] | None = None,
        *,
        train: bool = False,
        packed: PackedRows | None = None,
    ) -> Float[Array, "b t width"] | Float[Array, "n width"]:
        """Run the blocks on [b, t, width] in the compute dtype.

        With `position`, in [0, t), the last block computes that token of each sequence only, which attends to all.
        `train` turns dropout on, which needs the "dropout" rng unless the rate is 0. With `packed`, rows have several
        sequences, and `position` is as in `PackedRows.take`.

        Returns:
          [b, t, width], or [n, width] with `position`, not normalized.
        """
        c, (b, t, _) = self.config, x.shape
        block = rematerialized(TransformerBlock, c.remat, train_argument=4)
        shape = b, t, c.heads, c.width // c.heads
        padding = padding_for(shape, c.dtype, c.attention if packed is None else "xla")
        positions = t + padding
        # Batch and sequence are one axis: with a separate batch axis, XLA selects layouts that need transposes.
        x = jnp.pad(x, ((0, 0), (0, padding), (0, 0))).reshape(b * positions, c.width)
        deferred_bias = None
        for i in range(c.layers):
            block_position = position if i == c.layers - 1 else None
            run = block(c, positions, padding, name=f"block_{i:02d}")
            x, deferred_bias = run(x, deferred_bias, block_position, train, packed)
            x = checkpoint_name(x, RESIDUAL)  # outside the block, whose own remat policy would hide the name
        x = x if deferred_bias is None else route_gradient(x, deferred_bias)
        return x if position is not None else x.reshape(b, positions, c.width)[:, :t]
