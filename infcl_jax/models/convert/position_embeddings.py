"""Resizing of position embeddings for other image sizes and text lengths."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from infcl_jax.models.config import CLIPConfig


def resize_positions(
    path: str, embeddings: np.ndarray, config: CLIPConfig, shape: tuple[int, ...]
) -> Float[np.ndarray, "positions width"]:
    """Resize the position embeddings of the model of `config` at the path of a parameter.

    Raises:
      ValueError: the parameter is no table of position embeddings, or another axis changes.
    """
    if not path.endswith("positional_embedding") or embeddings.shape[1] != shape[1]:
        raise ValueError(
            f"expected changes that keep the shapes of all parameters but position embeddings, got {path} "
            f"{list(embeddings.shape)} and {list(shape)}; change image_size and context_length only"
        )
    if path.startswith("params/text/"):
        return resize_sequence(embeddings, shape[0])
    patches = (config.vision.image_size // config.vision.patch_size) ** 2
    return resize_grid(embeddings, shape[0], prefix=len(embeddings) - patches)


def resize_grid(
    embeddings: Float[np.ndarray, "positions width"], positions: int, prefix: int
) -> Float[np.ndarray, "{positions} width"]:
    """Resize the position embeddings of square images, as in OpenCLIP.

    Those of prefix tokens, such as the class token, are kept. Those of the patches, in row-major order, are resized by
    bicubic interpolation (Keys, a = -1/2) with antialiasing in float32.

    Raises:
      ValueError: the patches do not form a square.
    """
    old, new = math.isqrt(len(embeddings) - prefix), math.isqrt(positions - prefix)
    if old**2 != len(embeddings) - prefix or new**2 != positions - prefix:
        raise ValueError(
            f"expected position embeddings of a square grid and {prefix} prefix tokens, "
            f"got {len(embeddings)} to resize to {positions}"
        )
    width = embeddings.shape[1]
    grid = jnp.asarray(embeddings[prefix:]).astype(jnp.float32).reshape(old, old, width)
    grid = jax.image.resize(grid, (new, new, width), "cubic", antialias=True)
    resized = np.asarray(grid).reshape(-1, width).astype(embeddings.dtype)
    return np.concatenate([embeddings[:prefix], resized])


def resize_sequence(
    embeddings: Float[np.ndarray, "old width"], positions: int
) -> Float[np.ndarray, "{positions} width"]:
    """Resize the position embeddings of texts, by linear interpolation in float32, as in OpenCLIP."""
    old = jnp.asarray(embeddings).astype(jnp.float32)
    resized = jax.image.resize(old, (positions, old.shape[1]), "linear", antialias=False)
    return np.asarray(resized).astype(embeddings.dtype)
