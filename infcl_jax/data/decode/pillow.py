"""Image decoder of the host, Pillow."""

from __future__ import annotations

import contextlib
import io

import numpy as np
from PIL import Image

# Other formats of Pillow start programs (EPS) or are not photographs.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")
MIN_SIDE = 2  # pixels; 1-pixel images are web beacons
MAX_SIDE = 16384  # pixels; the longest side that WebP can store
MAX_PIXELS = 2**26  # 192 MiB in memory; below the 89 million at which Pillow warns of decompression bombs

_ORIENTATION = 0x0112  # EXIF tag
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_SIXTEEN_BIT_MODES = ("I;16", "I;16L", "I;16B", "I;16N")


def decode(data: bytes) -> np.ndarray:
    """Decode an image file.

    Equals Pillow's `convert("RGB")` for 8-bit images without transparency. The EXIF orientation is applied.
    Transparent images are composed on white. 16-bit gray levels are scaled from [0, 65535], those of integer and float
    images from [minimum, maximum] of the image. Animations give their first frame.

    Args:
      data: contents of a file in one of `FORMATS`.

    Returns:
      uint8 [H, W, 3], read-only.

    Raises:
      ValueError: the format is unknown, or the size is out of range: sides of `MIN_SIDE` to `MAX_SIDE` pixels, at most
        `MAX_PIXELS` pixels.
      Exception: the file is damaged; Pillow raises any exception.
    """
    try:
        file = Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.UnidentifiedImageError:
        raise ValueError(f"expected an image file in one of {', '.join(FORMATS)}, got {data[:12]!r}...") from None
    with file:
        _check_size(*file.size)
        file.load()
        image = _to_rgb(file)
        orientation = 1
        with contextlib.suppress(Exception):  # damaged metadata do not spoil the pixels
            orientation = file.getexif().get(_ORIENTATION, 1)
        return np.asarray(image.transpose(_UPRIGHT[orientation]) if orientation in _UPRIGHT else image)


def _check_size(width: int, height: int) -> None:
    if min(width, height) < MIN_SIDE or max(width, height) > MAX_SIDE or width * height > MAX_PIXELS:
        raise ValueError(
            f"expected an image with sides of {MIN_SIDE} to {MAX_SIDE} pixels and at most {MAX_PIXELS} pixels, "
            f"got {width} x {height}"
        )


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "F" or image.mode.startswith("I"):
        image = Image.fromarray(_to_eight_bits(np.asarray(image), image.mode))
    if image.has_transparency_data:
        canvas = Image.new("RGBA", image.size, "white")
        canvas.alpha_composite(image.convert("RGBA"))
        image = canvas
    return image if image.mode == "RGB" else image.convert("RGB")


def _to_eight_bits(levels: np.ndarray, mode: str) -> np.ndarray:
    """Scale the gray levels of 16-bit, 32-bit and float images to uint8."""
    values = np.nan_to_num(levels.astype(np.float64), posinf=0.0, neginf=0.0)
    low, high = (0.0, 65535.0) if mode in _SIXTEEN_BIT_MODES else (values.min(), values.max())
    return np.rint((values - low) / ((high - low) or 1.0) * 255).astype(np.uint8)
