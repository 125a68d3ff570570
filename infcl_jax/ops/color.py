"""Color jitter and grayscale of training images, on the device.

The formulas are torchvision's `ColorJitter` and `Grayscale` for tensors, in float32. OpenCLIP applies them to
PIL images, which rounds to 8 bits after each operation.
"""

import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int, UInt8

# Orders of brightness, contrast, saturation and hue.
ORDERS = tuple(itertools.permutations(range(4)))

_LUMA = (0.2989, 0.587, 0.114)  # of torchvision, from ITU-R BT.601


class ColorBatch(NamedTuple):
    """Images with the parameters of their color augmentation.

    Attributes:
      pixels: uint8 [b, h, w, 3].
      color: float32 [b, 7]: whether to jitter (0 or 1), index in `ORDERS`, factors of brightness, contrast and
        saturation (1: none), shift of the hue in turns (0: none), whether to make the image gray (0 or 1).
    """

    pixels: UInt8[Array, "b h w 3"]
    color: Float32[Array, "b 7"]


def with_colors(batch: Mapping[str, Any]) -> Any:
    """Return the images of a batch, with their color parameters if any."""
    return ColorBatch(batch["image"], batch["color"]) if "color" in batch else batch["image"]


def adjusted(rows: Any) -> Any:
    """Adjust the colors of a `ColorBatch`; return other rows unchanged."""
    return adjust_colors(rows) if isinstance(rows, ColorBatch) else rows


def adjust_colors(batch: ColorBatch) -> UInt8[Array, "b h w 3"]:
    """Jitter the colors of images and make some gray."""
    return jax.vmap(_adjust_image)(*batch)


def _adjust_image(pixels: UInt8[Array, "h w 3"], color: Float32[Array, " 7"]) -> UInt8[Array, "h w 3"]:
    image = pixels.astype(jnp.float32) / 255
    image = jnp.where(color[0] > 0, jitter_colors(image, color[1].astype(jnp.int32), color[2:6]), image)
    image = jnp.where(color[6] > 0, jnp.broadcast_to(_gray(image), image.shape), image)
    return jnp.round(image * 255).astype(jnp.uint8)


def jitter_colors(
    image: Float[Array, "h w 3"], order: Int[Array, ""], factors: Float[Array, " 4"]
) -> Float[Array, "h w 3"]:
    """Adjust brightness, contrast, saturation and hue in any order.

    Args:
      image: RGB levels in [0, 1].
      order: index in `ORDERS`.
      factors: factors of brightness, contrast and saturation, and the shift of the hue in turns.
    """
    adjustments = (_adjust_brightness, _adjust_contrast, _adjust_saturation, _adjust_hue)
    branches = [lambda image, f=adjust, i=i: f(image, factors[i]) for i, adjust in enumerate(adjustments)]
    operations = jnp.asarray(ORDERS, jnp.int32)[order]
    for position in range(len(adjustments)):
        image = lax.switch(operations[position], branches, image)
    return image


def _adjust_brightness(image: Float[Array, "h w 3"], factor: Float[Array, ""]) -> Float[Array, "h w 3"]:
    return jnp.clip(factor * image, 0, 1)


def _adjust_contrast(image: Float[Array, "h w 3"], factor: Float[Array, ""]) -> Float[Array, "h w 3"]:
    return _blend(image, _gray(image).mean(keepdims=True), factor)


def _adjust_saturation(image: Float[Array, "h w 3"], factor: Float[Array, ""]) -> Float[Array, "h w 3"]:
    return _blend(image, _gray(image), factor)


def _adjust_hue(image: Float[Array, "h w 3"], shift: Float[Array, ""]) -> Float[Array, "h w 3"]:
    """Shift the hue in HSV space, by turns of the color circle."""
    value, least = image.max(axis=-1), image.min(axis=-1)
    chroma = value - least
    r, g, b = jnp.moveaxis(image, -1, 0)
    divisor = jnp.where(chroma > 0, chroma, 1)
    sextant = jnp.where(
        value == r, (g - b) / divisor, jnp.where(value == g, 2 + (b - r) / divisor, 4 + (r - g) / divisor)
    )
    hue = 6 * jnp.mod(sextant / 6 + shift, 1)
    # Each channel is a trapezoid of the hue (Wikipedia, "HSL and HSV", alternative conversion from HSV to RGB).
    distance = jnp.mod(hue[..., None] + jnp.array([5.0, 3.0, 1.0])[None, None], 6)
    return value[..., None] - chroma[..., None] * jnp.clip(jnp.minimum(distance, 4 - distance), 0, 1)


def _gray(image: Float[Array, "h w 3"]) -> Float[Array, "h w 1"]:
    return (image * jnp.array(_LUMA)[None, None]).sum(axis=-1, keepdims=True)


def _blend(image: Float[Array, "h w 3"], other: Float[Array, "..."], factor: Float[Array, ""]) -> Float[Array, "h w 3"]:
    return jnp.clip(factor * image + (1 - factor) * other, 0, 1)
