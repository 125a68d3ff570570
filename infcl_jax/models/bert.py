"""BERT and RoBERTa text towers: post-LayerNorm encoders that mask padding."""

import math
from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Float32, Int, Int32, Integer

from infcl_jax.models.layers import LayerNorm, TokenDropout, feature_projection, normal
from infcl_jax.models.transformer import RESIDUAL, Mlp, SelfAttention, rematerialized
from infcl_jax.models.transformer_config import TransformerConfig
from infcl_jax.ops.embedding import embed_tokens
from infcl_jax.ops.linear import route_gradient
from infcl_jax.ops.packing import PackedRows, PackedTokens

BertPool = Literal["cls", "pooler", "mean"]
BertProjection = Literal["linear", "mlp", "none"]


class BertBlock(nn.Module):
    """One post-LayerNorm block: `y = LN(x + attention(x))`, then `LN(y + MLP(y))`.

    Parameters: `attn`, `ln_1`, `mlp`, `ln_2`.
    """

    config: TransformerConfig
    positions: int

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "tokens width"],
        key_mask: Bool[Array, "b {self.positions}"] | None,
        train: bool,
        packed: PackedRows | None = None,
    ) -> Float[Array, "tokens width"]:
        """Run the block on [b * t, width] in the compute dtype.

        `key_mask` is False for padding, None if packed.
        """
        c = self.config

        def add_and_normalize(x: jax.Array, y: jax.Array, bias: jax.Array, number: int) -> jax.Array:
            y = TokenDropout(c.dropout, name=f"drop_{number}")(route_gradient(y, bias), index, train)
            return LayerNorm(c, name=f"ln_{number}")(x + y)

        index = _padded_index(x.shape[:1], packed)
        attended = SelfAttention(c, self.positions, name="attn")(x, key_mask=key_mask, packed=packed)
        x = checkpoint_name(add_and_normalize(x, *attended, 1), RESIDUAL)
        return add_and_normalize(x, *Mlp(c, name="mlp")(x), 2)


class Bert(nn.Module):
    """BERT text tower (Devlin et al. 2019) with a projection to features.

    Parameters: `token_embedding` [vocab_size, width], `positional_embedding` [max_positions, width],
    `token_type_embedding` [token_types, width], `ln_embed`, `transformer` with `block_00`, `block_01`, ..., `pooler`
    (of the pool "pooler"), `text_projection` {kernel} or, with the projection "mlp", {`fc1`, `fc2`}.

    All tokens are of the first type. Texts are padded at their ends.

    Examples:
      >>> tower = {"width": 64, "layers": 2, "heads": 2}
      >>> config = CLIPConfig(embed_dim=32, vision=VisionConfig(**tower), text=BertConfig(**tower))
      >>> type(build_model(config).text).__name__
      'Bert'

    Attributes:
      config: shape and numerics of the transformer.
      embed_dim: size of the features.
      vocab_size: number of token ids.
      context_length: largest number of tokens.
      max_positions: number of positional embeddings.
      position_offset: index of the first token's positional embedding (`pad_id + 1` in RoBERTa).
      token_types: number of token types.
      pad_id: id of padding tokens, to which no token attends.
      pool: "cls" (states of the first token), "pooler" (BERT's dense layer with a tanh on them) or "mean" (over tokens
        that are not padding).
      projection: "linear" or "mlp" (with GELU and `(width + embed_dim) / 2` hidden units), both without bias, or "none"
        if the pooled states of size `embed_dim` are the features.
    """

    config: TransformerConfig
    embed_dim: int
    vocab_size: int
    context_length: int
    max_positions: int = 512
    position_offset: int = 0
    token_types: int = 2
    pad_id: int = 0
    pool: BertPool = "mean"
    projection: BertProjection = "mlp"

    @nn.compact
    def __call__(
        self, tokens: Integer[Array, "b t"] | PackedTokens, *, train: bool = False
    ) -> Float32[Array, "b {self.embed_dim}"]:
        """Encode token ids.

        Args:
          tokens: integer [b, t], 1 <= t <= context_length, ids below `vocab_size`. Larger ids give NaN features. Or the
            same packed, with the `lengths` of this tower.
          train: whether dropout is on; it needs the "dropout" rng unless the rate is 0.

        Returns:
          float32 [b, embed_dim], not normalized.
        """
        encoder = BertEncoder(self.config, name="transformer")
        if isinstance(tokens, PackedTokens):
            packed = tokens.unpacked()
            x = encoder(self._embed(packed.tokens, train, packed), None, train, packed)
            x = self._pooled_packed(x.astype(jnp.float32), packed)
        else:
            # The first token counts, or a text of padding alone would have no key.
            is_token = (tokens != self.pad_id) | (jnp.arange(tokens.shape[1]) == 0)[None]
            x = encoder(self._embed(tokens, train), is_token, train)
            x = self._pooled(x.astype(jnp.float32), is_token)
        if self.projection == "none":
            return x
        if self.projection == "linear":
            return feature_projection(self.config, self.embed_dim, "text_projection")(x)
        return _ProjectionMlp(self.config, self.embed_dim, name="text_projection")(x)

    @property
    def attends_to_padding(self) -> bool:
        """False: no feature depends on padding, so texts can be packed."""
        return False

    def lengths(self, tokens: Integer[np.ndarray, "b t"]) -> Int[np.ndarray, "b"]:
        """Count the tokens of each text without its padding, at least 1.

        0 for a text that cannot be packed, since a padding id inside of it is masked.
        """
        is_token = (tokens != self.pad_id) | (np.arange(tokens.shape[1]) == 0)
        length = tokens.shape[1] - is_token[:, ::-1].argmax(1)
        return np.where(is_token.sum(1) == length, length, 0)

    def _embed(
        self, tokens: Integer[Array, "b t"], train: bool, packed: PackedRows | None = None
    ) -> Float[Array, "b t {self.config.width}"]:
        """Return the normalized sum of token, position and type embeddings."""
        c = self.config

        def table(name: str, rows: int) -> jax.Array:
            return self.param(name, normal(0.02), (rows, c.width), c.param_dtype)

        positions = table("positional_embedding", self.max_positions).astype(jnp.float32)
        token_type = table("token_type_embedding", self.token_types)[:1].astype(jnp.float32)
        count = tokens.shape[1] if packed is None else self.context_length
        position_ids = None if packed is None else packed.positions
        shifts = positions[self.position_offset :][:count] + token_type
        x = embed_tokens(table("token_embedding", self.vocab_size), shifts, tokens, c.dtype, position_ids)
        x = LayerNorm(c, name="ln_embed")(x)
        return TokenDropout(c.dropout, name="drop_embed")(x, _padded_index(tokens.shape, packed), train)

    def _pooled(
        self, x: Float32[Array, "b t {self.config.width}"], is_token: Bool[Array, "b t"]
    ) -> Float32[Array, "b {self.config.width}"]:
        if self.pool == "mean":
            weights = is_token.astype(jnp.float32)[:, :, None]
            return (x * weights).sum(1) / jnp.maximum(weights.sum(1), 1.0)
        return self._pooled_first(x[:, 0])

    def _pooled_packed(
        self, x: Float32[Array, "r l {self.config.width}"], packed: PackedRows
    ) -> Float32[Array, "b {self.config.width}"]:
        if self.pool == "mean":
            return packed.mean(x)
        return self._pooled_first(packed.take(x.reshape(-1, x.shape[-1]), packed.first))

    def _pooled_first(self, x: Float32[Array, "b {self.config.width}"]) -> Float32[Array, "b {self.config.width}"]:
        """Pool the states of the first tokens."""
        if self.pool == "cls":
            return x
        return jnp.tanh(feature_projection(self.config, self.config.width, "pooler", use_bias=True)(x))


class BertEncoder(nn.Module):
    """Stack of `config.layers` post-LayerNorm blocks, named `block_00`, `block_01`, ..."""

    config: TransformerConfig

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "b t width"],
        key_mask: Bool[Array, "b t"] | None,
        train: bool,
        packed: PackedRows | None = None,
    ) -> Float[Array, "b t width"]:
        """Run the blocks on [b, t, width] in the compute dtype.

        `key_mask` is False for padding, None if packed.
        """
        c, (b, t, width) = self.config, x.shape
        block = rematerialized(BertBlock, c.remat, train_argument=3)
        x = x.reshape(b * t, width)
        for i in range(c.layers):
            x = block(c, t, name=f"block_{i:02d}")(x, key_mask, train, packed)
            x = checkpoint_name(x, RESIDUAL)  # outside the block, whose own remat policy would hide the name
        return x.reshape(b, t, width)


def _padded_index(shape: tuple[int, ...], packed: PackedRows | None) -> Int32[Array, "..."]:
    """Return the index of each token of an array of `shape`, see `PackedRows.padded_index`."""
    if packed is not None:
        return packed.padded_index.reshape(shape)
    return jnp.arange(math.prod(shape), dtype=jnp.int32).reshape(shape)


class _ProjectionMlp(nn.Module):
    """Projection of pooled states through one hidden layer with GELU, without biases, in float32."""

    config: TransformerConfig
    embed_dim: int

    @nn.compact
    def __call__(self, x: Float32[Array, "b width"]) -> Float32[Array, "b {self.embed_dim}"]:
        hidden = feature_projection(self.config, (x.shape[-1] + self.embed_dim) // 2, "fc1")(x)
        return feature_projection(self.config, self.embed_dim, "fc2")(nn.gelu(hidden, approximate=False))
