"""Decoding of images that are given in Python."""

import os
from pathlib import Path

import jax
import numpy as np
from PIL import Image

from infcl_jax.data.decode.api import pixels
from infcl_jax.data.decode.pillow import load_upright

ImageLike = Image.Image | str | os.PathLike | bytes | np.ndarray | jax.Array


def decode_image(image: ImageLike, max_pixels: int) -> np.ndarray:
    """Decode an image.

    Args:
      image: PIL image, path or contents of an image file, or uint8 array [H, W, 3], [H, W, 1] or [H, W].
      max_pixels: largest number of pixels of an encoded image.

    Returns:
      uint8 [H, W, 3].

    Raises:
      ValueError: the array is not an image of uint8, or the file is no image.
      OSError: the file cannot be read.
    """
    if isinstance(image, Image.Image):
        return np.asarray(load_upright(image))
    if isinstance(image, str | os.PathLike):
        image = Path(image).read_bytes()
    if not isinstance(image, bytes):
        image = np.asarray(image)
        image = image[:, :, None] if image.ndim == 2 else image
    return pixels({"image": image, "caption": "", "captions": (), "label": -1}, max_pixels)
