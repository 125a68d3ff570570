"""Encoding of images for datasets on disk."""

import io
from typing import Any

import numpy as np
from PIL import Image

JPEG_QUALITY = 95  # the highest that Pillow recommends; above it, files grow without visible gain


def encode_png(pixels: np.ndarray) -> bytes:
    """Encode an image uint8 [H, W, 3] or [H, W, 1] without loss, fast rather than small."""
    return _encode(pixels[..., 0] if pixels.shape[2] == 1 else pixels, format="png", compress_level=1)


def encode_jpeg(pixels: np.ndarray) -> bytes:
    """Encode an image uint8 [H, W, 3] at quality `JPEG_QUALITY`."""
    return _encode(pixels, format="jpeg", quality=JPEG_QUALITY)


def _encode(pixels: np.ndarray, **options: Any) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, **options)
    return buffer.getvalue()
