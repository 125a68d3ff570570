"""Vision Transformer image tower of CLIP and SigLIP."""

import math
from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Shaped

from infcl_jax.models.layers import Dense, LayerNorm, checkpointed_affine, feature_projection, normal
from infcl_jax.models.transformer import Mlp, Transformer
from infcl_jax.models.transformer_config import Projection, TransformerConfig
from infcl_jax.ops.attention.api import attend_from
from infcl_jax.ops.layer_norm.api import broadcast_vector
from infcl_jax.ops.linear import route_gradient

Pool = Literal["tok", "avg", "map"]
PosEmbed = Literal["learnable", "sin_cos_2d"]


class PatchEmbedding(nn.Module):
    """Patch embedding: convolution with stride equal to kernel size.

    It is computed as one GEMM over unfolded patches, which avoids a convolution over only three channels.

    Parameters: `kernel` [patch, patch, 3, width]; `bias` [width] with `use_bias`.
    """

    config: TransformerConfig
    patch_size: int
    use_bias: bool = False

    @nn.compact
    def __call__(self, image: Float[Array, "b h w c"]) -> Float[Array, "b patches {self.config.width}"]:
        """Map [b, H, W, 3] to [b, (H // patch) (W // patch), width].

        Patches are in row-major order. Pixels beyond the last whole patch are ignored. The result is in the compute
        dtype.
        """
        c, p = self.config, self.patch_size
        # Uniform within fan_in^-1/2: PyTorch's default for convolutions, which OpenCLIP uses.
        init = nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
        kernel = self.param("kernel", init, (p, p, image.shape[-1], c.width), c.param_dtype)
        b, (rows, columns), channels = image.shape[0], (size // p for size in image.shape[1:3]), image.shape[-1]
        patches = image[:, : rows * p, : columns * p].astype(c.dtype).reshape(b, rows, p, columns, p, channels)
        patches = patches.transpose(0, 1, 3, 2, 4, 5).reshape(b, -1, p * p * channels)
        x = patches @ kernel.reshape(-1, c.width).astype(c.dtype)
        if not self.use_bias:
            return x
        bias = self.param("bias", nn.initializers.zeros, (c.width,), c.param_dtype)
        return (x.astype(jnp.float32) + broadcast_vector(bias, x)).astype(c.dtype)


def sin_cos_positions(width: int, grid: int) -> np.ndarray:
    """Return the fixed sine-cosine positional embeddings of a square grid of patches, float32 [grid^2, width].

    Patches are in row-major order. The first half of the channels encodes the column, the second the row: sines, then
    cosines, of `position / 10000^(4 i / width)`.

    Source: MoCo v3, Chen et al. 2021, section 4.1.
    """
    frequencies = 10000.0 ** (-np.arange(width // 4) * 4 / width)
    angles = np.arange(grid)[:, None] * frequencies
    line = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
    shape = (grid, grid, width // 2)
    columns, rows = np.broadcast_to(line[None], shape), np.broadcast_to(line[:, None], shape)
    return np.concatenate([columns, rows], axis=2).reshape(-1, width).astype(np.float32)


def drop_patches(rng: jax.Array, tokens: Shaped[Array, "b n width"], rate: float) -> Shaped[Array, "b kept width"]:
    """Keep a random subset of `max(1, int(n (1 - rate)))` patches of each sample, in random order.

    Source: FLIP, Li et al. 2023, section 3.
    """
    b, n, _ = tokens.shape
    keep = max(1, int(n * (1 - rate)))
    kept = jnp.argsort(jax.random.uniform(rng, (b, n)), axis=1)[:, :keep]
    return jnp.take_along_axis(tokens, kept[:, :, None], axis=1)


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
        y, bias = Mlp(c, name="mlp")(LayerNorm(c, name="ln")(pooled))
        return (pooled + route_gradient(y, bias)).astype(jnp.float32).reshape(b, c.width)


class _ProbeAttention(nn.Module):
    """Attention of one learned query, with the parameters of `SelfAttention`."""

    config: TransformerConfig

    @nn.compact
    def __call__(
        self, probe: Float[Array, "width"], tokens: Float[Array, "b t width"]
    ) -> Float[Array, "b {self.config.width}"]:
        c, b = self.config, tokens.shape[0]
        kernel, in_bias = Dense(c, 3 * c.width, c.input_std, name="in_proj").weights(c.width)
        query_kernel, key_kernel, value_kernel = jnp.split(kernel, 3, axis=1)
        # The softmax is invariant to the key bias, and its weights sum to 1, so the value bias is added to the result.
        query_bias, _, value_bias = jnp.split(in_bias, 3)
        (query,) = checkpointed_affine(probe[None].astype(c.dtype), (query_kernel,), (query_bias,))
        query = jnp.broadcast_to(query, (b, c.width)).reshape(b, c.heads, c.width // c.heads)
        first = jnp.zeros(b, jnp.int32)
        y = attend_from(query, tokens, key_kernel, value_kernel, first, causal=False).reshape(b, c.width)
        y = (y.astype(jnp.float32) + broadcast_vector(value_bias, y)).astype(c.dtype)
        out_kernel, out_bias = Dense(c, c.width, c.residual_std, name="out_proj").weights(c.width)
        return checkpointed_affine(y, (out_kernel,), (out_bias,))[0]


class VisionTransformer(nn.Module):
    """Vision Transformer of CLIP, and of SigLIP without class token and input LayerNorm.

    Sources: Radford et al. 2021, section 2.4; Dosovitskiy et al. 2021, section 3.1; Zhai et al. 2023.

    Parameters: `conv1`, `class_embedding` [width], `positional_embedding` [1 + patches, width] ([patches, width]
    without class token), `ln_pre`, `transformer`, `ln_post`, `attn_pool` (of the pool "map"), `proj`. Those of absent
    parts are absent.

    Initial weights are normal, scaled by width and depth, and biases are zero. OpenAI's implementation initializes its
    text tower this way, but most of its image tower with PyTorch's defaults.

    Examples:
      >>> tower = create_model("ViT-B/32").visual
      >>> tower.patch_size, tower.embed_dim
      (32, 512)

    Attributes:
      config: shape and numerics of the transformer.
      embed_dim: size of the features.
      image_size: height and width of the input in pixels; pixels beyond the last whole patch are ignored.
      patch_size: height and width of a patch in pixels.
      pool: input of the projection to features, "tok" (class token), "avg" (mean over patches) or "map" (`MapPool` of
        all tokens).
      patch_dropout: fraction of patches dropped from each training sample; the class token is always kept.
      class_token: whether the sequence starts with a class token; "tok" needs it.
      pos_embed: "learnable" or "sin_cos_2d" (fixed, see `sin_cos_positions`; zero for the class token).
      patch_bias: whether the patch embedding has a bias.
      ln_pre: whether a LayerNorm precedes the transformer.
      final_ln_after_pool: whether the final LayerNorm follows the pool instead of preceding it.
      projection: "linear", or "none" if the pooled states of size `embed_dim` are the features.
      projection_bias: whether the projection has a bias.
    """

    config: TransformerConfig
    embed_dim: int
    image_size: int
    patch_size: int
    pool: Pool = "tok"
    patch_dropout: float = 0.0
    class_token: bool = True
    pos_embed: PosEmbed = "learnable"
    patch_bias: bool = False
    ln_pre: bool = True
    final_ln_after_pool: bool = False
    projection: Projection = "linear"
    projection_bias: bool = False

    @nn.compact
    def __call__(self, image: Float[Array, "b h w 3"], *, train: bool = False) -> Float32[Array, "b {self.embed_dim}"]:
        """Encode images.

        Args:
          image: floating [b, image_size, image_size, 3], already normalized by mean and standard deviation.
          train: whether dropout and patch dropout are on; they need the "dropout" rng.

        Returns:
          float32 [b, embed_dim], not normalized.
        """
        x = self._embed(image, train)
        if self.ln_pre:
            x = LayerNorm(self.config, name="ln_pre")(x)
        x = self._pooled(x, train)
        if self.projection == "none":
            return x
        return feature_projection(self.config, self.embed_dim, "proj", use_bias=self.projection_bias)(x)

    def _pooled(
        self, x: Float[Array, "b t {self.config.width}"], train: bool
    ) -> Float32[Array, "b {self.config.width}"]:
        """Run transformer, final LayerNorm and pool."""
        transformer = Transformer(self.config, name="transformer")
        is_before_map = self.pool == "map" and not self.final_ln_after_pool
        normalize = LayerNorm(self.config, None if is_before_map else jnp.float32, name="ln_post")
        if self.pool == "tok":
            return normalize(transformer(x, jnp.zeros(x.shape[0], jnp.int32), train=train))
        x = transformer(x, train=train)
        x = x if self.final_ln_after_pool else normalize(x)
        if self.pool == "map":
            x = MapPool(self.config, name="attn_pool")(x)
        else:
            x = x[:, int(self.class_token) :].astype(jnp.float32).mean(axis=1)
        return normalize(x) if self.final_ln_after_pool else x

    def _embed(self, image: Float[Array, "b h w 3"], train: bool) -> Float[Array, "b positions {self.config.width}"]:
        """Embed patches and class token; sums and gradients are float32.

        Returns:
          [b, 1 + kept patches, width], or [b, kept patches, width] without class token, in the compute dtype.
        """
        c = self.config
        patches = PatchEmbedding(c, self.patch_size, self.patch_bias, name="conv1")(image).astype(jnp.float32)
        b, n, _ = patches.shape
        init, prefix = normal(c.width**-0.5), int(self.class_token)
        if self.pos_embed == "learnable":
            positions = self.param("positional_embedding", init, (prefix + n, c.width), c.param_dtype)
        else:
            positions = jnp.pad(sin_cos_positions(c.width, math.isqrt(n)), ((prefix, 0), (0, 0)))
        positions = positions.astype(jnp.float32)
        patches = patches + positions[None, prefix:]
        if train and self.patch_dropout > 0:
            patches = drop_patches(self.make_rng("dropout"), patches, self.patch_dropout)
        if not self.class_token:
            return patches.astype(c.dtype)
        class_embedding = self.param("class_embedding", init, (c.width,), c.param_dtype).astype(jnp.float32)
        class_token = jnp.broadcast_to(class_embedding + positions[0], (b, 1, c.width))
        return jnp.concatenate([class_token, patches], axis=1).astype(c.dtype)
