"""Text tower of CLIP and SigLIP: a transformer pooled at one token."""

from typing import Literal

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int, Int32, Integer

from infcl_jax.models.layers import LayerNorm, feature_projection, normal
from infcl_jax.models.transformer import Transformer
from infcl_jax.models.transformer_config import Projection, TransformerConfig
from infcl_jax.ops.embedding import embed_tokens
from infcl_jax.ops.packing import PackedTokens

TextPool = Literal["end", "first", "last"]


def end_position(tokens: Integer[Array, "b t"], end_token: int | None = None) -> Int32[Array, "b"]:
    """Return the first position of each sequence's end token, 0 for a sequence without it.

    Without `end_token`, it is the largest id of each sequence, as in CLIP.
    """
    return jnp.argmax(tokens if end_token is None else tokens == end_token, axis=1).astype(jnp.int32)


class TextTransformer(nn.Module):
    """Text tower of CLIP and SigLIP, a transformer pooled at one token.

    Sources: Radford et al. 2021, section 2.4; Zhai et al. 2023.

    Parameters: `token_embedding` [vocab_size, width], `positional_embedding` [context_length, width], `transformer`,
    `ln_final`, `text_projection` (absent with the projection "none").

    With causal attention and the pool "end", as in CLIP, later tokens have no effect and need no mask. Other towers
    attend to padding, as in SigLIP, and texts must be padded as in training.

    Examples:
      >>> tower = create_model("ViT-B/32").text
      >>> tower.vocab_size, tower.context_length
      (49408, 77)

    Attributes:
      config: shape and numerics of the transformer.
      embed_dim: size of the features.
      vocab_size: number of token ids: 49408 for CLIP's byte-pair encoding, 259 for bytes.
      context_length: largest number of tokens, including the start and end tokens; shorter sequences use the first
        positional embeddings.
      end_token: id of the end token; None: the largest id of each text, as in CLIP.
      pool: position whose states are projected to features: "end" (first end token), "first" or "last".
      projection: "linear", or "none" if the pooled states of size `embed_dim` are the features.
      projection_bias: whether the projection has a bias.
    """

    config: TransformerConfig
    embed_dim: int
    vocab_size: int
    context_length: int
    end_token: int | None = None
    pool: TextPool = "end"
    projection: Projection = "linear"
    projection_bias: bool = False

    @nn.compact
    def __call__(
        self, tokens: Integer[Array, "b t"] | PackedTokens, *, train: bool = False
    ) -> Float32[Array, "b {self.embed_dim}"]:
        """Encode token ids.

        Args:
          tokens: integer [b, t], 1 <= t <= context_length, ids below `vocab_size`. Larger ids give NaN features, since
            compiled code cannot raise. Or the same packed, with the `lengths` of this tower.
          train: whether dropout is on; it needs the "dropout" rng unless the rate is 0.

        Returns:
          float32 [b, embed_dim], not normalized.

        Raises:
          ValueError: the tokens are packed, but the tower attends to padding.
        """
        transformer = Transformer(self.config, name="transformer")
        if isinstance(tokens, PackedTokens):
            if self.attends_to_padding:
                raise ValueError("expected padded texts, since this tower attends to padding, got packed ones")
            packed = tokens.unpacked()
            x = transformer(self._embed(packed.tokens, packed.positions), packed.last, train=train, packed=packed)
        else:
            x = transformer(self._embed(tokens), self._position(tokens), train=train)
        x = LayerNorm(self.config, jnp.float32, name="ln_final")(x)
        if self.projection == "none":
            return x
        return feature_projection(self.config, self.embed_dim, "text_projection", use_bias=self.projection_bias)(x)

    @property
    def attends_to_padding(self) -> bool:
        """Tell whether features depend on padding, so that texts cannot be packed."""
        return not (self.config.causal and self.pool == "end")

    def lengths(self, tokens: Integer[np.ndarray, "b t"]) -> Int[np.ndarray, "b"]:
        """Count the tokens of each text up to its pooled end token."""
        ends = tokens if self.end_token is None else tokens == self.end_token
        return ends.argmax(1) + 1

    def _position(self, tokens: Integer[Array, "b t"]) -> Int32[Array, "b"]:
        """Return the pooled position of each sequence."""
        if self.pool == "end":
            return end_position(tokens, self.end_token)
        return jnp.full(tokens.shape[0], 0 if self.pool == "first" else tokens.shape[1] - 1, jnp.int32)

    def _embed(
        self, tokens: Integer[Array, "b t"], position_ids: Integer[Array, "b t"] | None = None
    ) -> Float[Array, "b t {self.config.width}"]:
        """Return token plus positional embeddings, [b, t, width] in the compute dtype."""
        c = self.config
        table = self.param("token_embedding", normal(0.02), (self.vocab_size, c.width), c.param_dtype)
        shape = (self.context_length, c.width)
        positions = self.param("positional_embedding", normal(0.01), shape, c.param_dtype)
        if position_ids is None:
            positions = positions[: tokens.shape[1]]
        return embed_tokens(table, positions, tokens, c.dtype, position_ids)
