"""Vision Transformer image tower of CLIP."""

from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Shaped

from infcl_jax.models.transformer import Transformer, TransformerConfig, feature_projection, layer_norm

Pool = Literal["tok", "avg"]


class PatchEmbedding(nn.Module):
    """Patch embedding: convolution without bias, with stride equal to kernel size.

    It is computed as one GEMM over unfolded patches, which avoids a convolution over only three channels.

    Parameters: `kernel` [patch, patch, 3, width].
    """

    config: TransformerConfig
    patch_size: int

    @nn.compact
    def __call__(self, image: Float[Array, "b h w c"]) -> Float[Array, "b patches {self.config.width}"]:
        """Map [b, H, W, 3] to [b, (H / patch) (W / patch), width].

        Patches are in row-major order. The result is in the compute dtype.
        """
        c, p = self.config, self.patch_size
        # Uniform within fan_in^-1/2: PyTorch's default for convolutions, which OpenCLIP uses.
        init = nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
        kernel = self.param("kernel", init, (p, p, image.shape[-1], c.width), c.param_dtype)
        b, height, width, channels = image.shape
        patches = image.astype(c.dtype).reshape(b, height // p, p, width // p, p, channels)
        patches = patches.transpose(0, 1, 3, 2, 4, 5).reshape(b, -1, p * p * channels)
        return patches @ kernel.reshape(-1, c.width).astype(c.dtype)


def drop_patches(rng: jax.Array, tokens: Shaped[Array, "b n width"], rate: float) -> Shaped[Array, "b kept width"]:
    """Keep a random subset of the patches of each sample.

    Args:
      rng: PRNG key.
      tokens: [b, n, width], patch embeddings with positions, any dtype.
      rate: fraction of patches to drop, in [0, 1).

    Returns:
      [b, max(1, int(n (1 - rate))), width]; each sample has its own subset, in random order.

    Source: FLIP, Li et al. 2023, section 3.
    """
    b, n, _ = tokens.shape
    keep = max(1, int(n * (1 - rate)))
    kept = jnp.argsort(jax.random.uniform(rng, (b, n)), axis=1)[:, :keep]
    return jnp.take_along_axis(tokens, kept[:, :, None], axis=1)


class VisionTransformer(nn.Module):
    """Vision Transformer of CLIP, with a class token and an input LayerNorm.

    Sources: Radford et al. 2021, section 2.4; Dosovitskiy et al. 2021, section 3.1.

    Parameters: `conv1`, `class_embedding` [width], `positional_embedding` [1 + patches, width], `ln_pre`,
    `transformer`, `ln_post`, `proj`.

    Initial weights are normal, scaled by width and depth, and biases are zero. OpenAI's implementation initializes its
    text tower this way, but most of its image tower with PyTorch's defaults.

    Attributes:
      config: shape and numerics of the transformer.
      embed_dim: size of the features.
      image_size: height and width of the input in pixels; a multiple of `patch_size`.
      patch_size: height and width of a patch in pixels.
      pool: input of the projection to features, "tok" (class token) or "avg" (mean over patches).
      patch_dropout: fraction of patches dropped from each training sample; the class token is always kept.
    """

    config: TransformerConfig
    embed_dim: int
    image_size: int
    patch_size: int
    pool: Pool = "tok"
    patch_dropout: float = 0.0

    @nn.compact
    def __call__(self, image: Float[Array, "b h w 3"], *, train: bool = False) -> Float32[Array, "b {self.embed_dim}"]:
        """Encode images.

        Args:
          image: floating [b, image_size, image_size, 3], already normalized by mean and standard deviation.
          train: whether dropout and patch dropout are on; they need the "dropout" rng.

        Returns:
          float32 [b, embed_dim], not normalized.
        """
        x = layer_norm(self.config, "ln_pre")(self._embed(image, train))
        transformer = Transformer(self.config, name="transformer")
        normalize = layer_norm(self.config, "ln_post", jnp.float32)
        if self.pool == "tok":
            x = normalize(transformer(x, jnp.zeros(len(x), jnp.int32), train=train))
        else:
            x = normalize(transformer(x, train=train)[:, 1:]).mean(axis=1)
        return feature_projection(self.config, self.embed_dim, "proj")(x)

    def _embed(self, image: Float[Array, "b h w 3"], train: bool) -> Float[Array, "b positions {self.config.width}"]:
        """Embed patches and class token; sums and gradients are float32.

        Returns:
          [b, 1 + kept patches, width] in the compute dtype.
        """
        c = self.config
        patches = PatchEmbedding(c, self.patch_size, name="conv1")(image).astype(jnp.float32)
        b, n, _ = patches.shape
        init = nn.initializers.normal(c.width**-0.5)
        class_embedding = self.param("class_embedding", init, (c.width,), c.param_dtype).astype(jnp.float32)
        positions = self.param("positional_embedding", init, (1 + n, c.width), c.param_dtype).astype(jnp.float32)
        patches = patches + positions[None, 1:]
        if train and self.patch_dropout > 0:
            patches = drop_patches(self.make_rng("dropout"), patches, self.patch_dropout)
        class_token = jnp.broadcast_to(class_embedding + positions[0], (b, 1, c.width))
        return jnp.concatenate([class_token, patches], axis=1).astype(c.dtype)
