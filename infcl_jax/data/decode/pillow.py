"""Image decoder of the host, Pillow."""

import contextlib
import io
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from PIL import Image

from infcl_jax.data.transforms import Box, Geometry, resize_box

# Other formats of Pillow start programs (EPS) or are not photographs.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")
MIN_SIDE = 2  # pixels; 1-pixel images are web beacons
MAX_SIDE = 16384  # pixels; the longest side that WebP can store
MAX_PIXELS = 100_000_000  # default limit; 286 MiB as RGB

# Pillow warns of 89 million pixels and refuses twice as many. Its limit covers every size that `open_image` can allow.
if Image.MAX_IMAGE_PIXELS is not None:
    Image.MAX_IMAGE_PIXELS = max(Image.MAX_IMAGE_PIXELS, MAX_SIDE**2)

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
_TRANSPOSED = (5, 6, 7, 8)  # orientations whose rows are stored as columns
_MIRRORED_ROWS, _MIRRORED_COLUMNS = (3, 4, 7, 8), (2, 3, 6, 7)  # axes of the upright image
_REDUCTIONS = (1, 2, 4, 8)  # of Pillow's draft mode
_GRAY_FACTORS = {"L;2": 85, "L;4": 17}  # from the levels of a PNG with 2 or 4 bits to 8 bits
_SIXTEEN_BIT_MODES = ("I;16", "I;16L", "I;16B", "I;16N")
_STRIP_PIXELS = 2**20  # pixels converted at a time, which bounds the memory of their float64 and RGBA copies


def decode(data: bytes, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """Decode an image file.

    Equals Pillow's `convert("RGB")` for 8-bit images without transparency. The EXIF orientation is applied.
    Transparent images are composed on white. 16-bit gray levels are scaled from [0, 65535], integer and float images
    from their [minimum, maximum]. Animations give their first frame.

    Args:
      data: contents of a file in one of `FORMATS`.
      max_pixels: largest number of pixels.

    Returns:
      uint8 [H, W, 3], read-only.

    Raises:
      ValueError: the format is unknown, or the size is out of range: sides of `MIN_SIDE` to `MAX_SIDE` pixels, at most
        `max_pixels` pixels.
      Exception: the file is damaged; Pillow raises any exception.
    """
    with open_image(data, max_pixels) as file:
        return np.asarray(load_upright(file))


def decode_crop(
    data: bytes, draw: Callable[[int, int], Geometry], size: int, max_pixels: int = MAX_PIXELS
) -> np.ndarray:
    """Decode a crop box of an image file and resize it.

    The resize is bicubic and antialiased.

    JPEGs are decoded at 1/2, 1/4 or 1/8 of their size if the box still has `size` pixels on each side. The inverse DCT
    of libjpeg does this (Pillow's `draft`). Such pixels differ from a full decoding by less than 1 of 255
    levels on average and 16 at most, on photographs. All other results equal `decode` and `resize_box`.

    Args:
      data: contents of a file, as of `decode`, which raises the same exceptions.
      draw: function from height and width of the upright image, in pixels, to the geometry of the result.
      size: side S of the result, in pixels.
      max_pixels: largest number of pixels of the image.

    Returns:
      uint8 [S, S, 3].
    """
    with open_image(data, max_pixels) as file:
        if file.format != "JPEG":  # Pillow can rotate other formats while it loads them
            image = load_upright(file)
            geometry = draw(image.height, image.width)
            return geometry.finish(resize_box(image, geometry.box, size))
        orientation, (width, height) = orientation_of(file), file.size
        geometry = draw(width, height) if orientation in _TRANSPOSED else draw(height, width)
        shorter = min(geometry.box.height, geometry.box.width)
        factor = max(factor for factor in _REDUCTIONS if factor == 1 or factor * size <= shorter)
        if factor > 1:
            file.draft(None, (width // factor, height // factor))
        box = _reduced_box(geometry.box, factor, orientation, (width, height))
        return geometry.finish(resize_box(load_upright(file), box, size))


def _reduced_box(box: Box, factor: int, orientation: int, stored_size: tuple[int, int]) -> Box:
    """Return the box in the pixels of the reduced upright image.

    The last stored row and column of a reduced image can be fractions of a pixel. A mirrored axis begins with them.
    """
    width, height = (-(-side // factor) - side / factor for side in stored_size)
    if orientation in _TRANSPOSED:
        width, height = height, width
    top = box.top / factor + (height if orientation in _MIRRORED_ROWS else 0)
    left = box.left / factor + (width if orientation in _MIRRORED_COLUMNS else 0)
    return Box(top, left, box.height / factor, box.width / factor)


@contextlib.contextmanager
def open_image(data: bytes, max_pixels: int = MAX_PIXELS) -> Iterator[Image.Image]:
    """Read the header of an image file and check its size; raise the exceptions of `decode`."""
    try:
        file = Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.UnidentifiedImageError:
        raise ValueError(f"expected an image file in one of {', '.join(FORMATS)}, got {data[:12]!r}...") from None
    with file:
        width, height = file.size
        if min(width, height) < MIN_SIDE or max(width, height) > MAX_SIDE or width * height > max_pixels:
            raise ValueError(
                f"expected an image with sides of {MIN_SIDE} to {MAX_SIDE} pixels and at most {max_pixels} pixels, "
                f"got {width} x {height}; max_image_pixels sets the limit"
            )
        yield file


def orientation_of(file: Image.Image) -> int:
    """Return the EXIF orientation, 1 to 8; 1 if there is none."""
    with contextlib.suppress(Exception):  # damaged metadata do not spoil the pixels
        orientation = file.getexif().get(_ORIENTATION, 1)
        return orientation if orientation in _UPRIGHT else 1
    return 1


def load_upright(file: Image.Image) -> Image.Image:
    """Load the pixels as RGB and apply the EXIF orientation; see `decode`."""
    transparency = _scaled_transparency(file)
    file.load()
    file.info.update(transparency)
    image, orientation = _to_rgb(file), orientation_of(file)
    return image.transpose(_UPRIGHT[orientation]) if orientation in _UPRIGHT else image


def _scaled_transparency(file: Image.Image) -> dict[str, Any]:
    """Return the transparent color of a PNG that is not loaded, in the 8 bits of its loaded pixels."""
    color, tiles = file.info.get("transparency"), getattr(file, "tile", ())
    if file.format != "PNG" or color is None or not tiles:
        return {}
    mode = tiles[0][3]  # of the stored pixels; Pillow keeps the color in their bit depth
    if mode == "RGB;16B":
        return {"transparency": tuple(channel >> 8 for channel in color)}
    return {"transparency": color * _GRAY_FACTORS[mode]} if mode in _GRAY_FACTORS else {}


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "F" or image.mode.startswith("I"):
        image = _to_eight_bits(image)
    if not image.has_transparency_data:
        return image if image.mode == "RGB" else image.convert("RGB")
    result = Image.new("RGB", image.size)
    for box in _strips(image):
        strip = Image.new("RGBA", (box[2], box[3] - box[1]), "white")
        strip.alpha_composite(image.crop(box).convert("RGBA"))
        result.paste(strip.convert("RGB"), box)
    return result


def _to_eight_bits(image: Image.Image) -> Image.Image:
    """Scale the gray levels of a 16-bit, 32-bit or float image to 8 bits; a transparent level becomes white."""
    transparent = image.info.get("transparency")

    def levels(box: tuple[int, int, int, int]) -> np.ndarray:
        return np.nan_to_num(np.asarray(image.crop(box)).astype(np.float64), posinf=0.0, neginf=0.0)

    low, high = 0.0, 65535.0
    if image.mode not in _SIXTEEN_BIT_MODES:
        bounds = [(strip.min(), strip.max()) for strip in map(levels, _strips(image))]
        low, high = min(low for low, _ in bounds), max(high for _, high in bounds)
    result = Image.new("L", image.size)
    for box in _strips(image):
        gray = levels(box)
        scaled = (gray - low) / ((high - low) or 1.0) * 255
        if transparent is not None:
            scaled[gray == transparent] = 255
        result.paste(Image.fromarray(np.rint(scaled).astype(np.uint8)), box)
    return result


def _strips(image: Image.Image) -> Iterator[tuple[int, int, int, int]]:
    """Yield boxes (left, top, right, bottom) of whole rows that cover an image."""
    rows = max(1, _STRIP_PIXELS // image.width)
    for top in range(0, image.height, rows):
        yield 0, top, image.width, min(top + rows, image.height)
