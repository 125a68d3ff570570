"""Image transforms on the host.

Transforms map uint8 [H, W, 3] to uint8 [S, S, 3]. Random transforms take an explicit generator.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from PIL import Image

_BICUBIC = Image.Resampling.BICUBIC
_CROP_TRIES = 10  # draws of a crop box, as in torchvision
_MAX_ASPECT_RATIO = 100  # longer images are cropped first, which bounds a resized image of 224 pixels to 20 MB


def _check_image(image: np.ndarray) -> None:
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
        raise ValueError(
            f"expected an image of uint8 [H, W, 3], got {image.dtype} {list(image.shape)}; convert it in the source"
        )


def resize_center_crop(image: np.ndarray, size: int) -> np.ndarray:
    """Resize the short side (bicubic, antialiased), then crop the central square.

    Equals torchvision's `Resize(size, interpolation=BICUBIC)` and `CenterCrop(size)` on PIL images, pixel for pixel,
    for aspect ratios up to 100. A longer image is cropped first, because the resized image would take
    `4 * size**2 * aspect_ratio` bytes.

    Args:
      image: uint8 [H, W, 3].
      size: side S of the result, in pixels.

    Returns:
      uint8 [S, S, 3]; the input image itself if it has that size.

    Raises:
      ValueError: the image is not uint8 [H, W, 3].
    """
    _check_image(image)
    if image.shape[:2] == (size, size):
        return image
    short = min(image.shape[:2])
    image = _center_crop(image, _MAX_ASPECT_RATIO * short)
    height, width, _ = image.shape
    # torchvision rounds the long side down, and a margin of half pixels to the even number. Pillow's `resize(box=...)`
    # would avoid the large image, but its pixels differ by up to 24 of 255 levels.
    resized = np.asarray(Image.fromarray(image).resize((size * width // short, size * height // short), _BICUBIC))
    return np.ascontiguousarray(_center_crop(resized, size))


def _center_crop(image: np.ndarray, size: int) -> np.ndarray:
    """View the central pixels, at most `size` along each axis."""
    top, left = (max(0, round((side - size) / 2)) for side in image.shape[:2])
    return image[top : top + size, left : left + size]


def random_resized_crop(
    image: np.ndarray,
    size: int,
    rng: np.random.Generator,
    *,
    scale: tuple[float, float] = (0.9, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
) -> np.ndarray:
    """Crop a random box and resize it to a square.

    The method is from Szegedy et al. (2015, section 6), the default scale from OpenCLIP.

    Args:
      image: uint8 [H, W, 3].
      size: side S of the result, in pixels.
      rng: random generator.
      scale: range of the box's area, as a fraction of the image's.
      ratio: range of the box's width over height, log-uniform.

    Returns:
      uint8 [S, S, 3].

    Raises:
      ValueError: the image is not uint8 [H, W, 3].
    """
    _check_image(image)
    top, left, height, width = random_crop_box(image.shape[0], image.shape[1], rng, scale, ratio)
    box = image[top : top + height, left : left + width]  # cropped first, because bicubic weights extend beyond the box
    return np.asarray(Image.fromarray(box).resize((size, size), _BICUBIC))


def random_crop_box(
    height: int, width: int, rng: np.random.Generator, scale: tuple[float, float], ratio: tuple[float, float]
) -> tuple[int, int, int, int]:
    """Draw a crop box from the distribution of torchvision's `RandomResizedCrop`.

    Area and aspect ratio are the first of ten draws that fit the image. The position is uniform. If no draw fits, the
    box is the largest central one whose aspect ratio is in `ratio`. Every call takes 22 numbers from `rng`.

    Args:
      height: image height, in pixels.
      width: image width, in pixels.
      rng: random generator.
      scale: range of the box's area, as a fraction of the image's.
      ratio: range of the box's width over height, log-uniform.

    Returns:
      (top, left, height, width) of the box, in pixels.
    """
    u_top, u_left, *tries = rng.random(2 + 2 * _CROP_TRIES).tolist()
    low, high = math.log(ratio[0]), math.log(ratio[1])
    for u_area, u_aspect in zip(tries[::2], tries[1::2], strict=True):
        area = height * width * (scale[0] + (scale[1] - scale[0]) * u_area)
        aspect = math.exp(low + (high - low) * u_aspect)
        box_width, box_height = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < box_width <= width and 0 < box_height <= height:
            top, left = int(u_top * (height - box_height + 1)), int(u_left * (width - box_width + 1))
            return top, left, box_height, box_width
    box_width = min(width, max(1, round(height * ratio[1])))
    box_height = min(height, max(1, round(width / ratio[0])))
    return (height - box_height) // 2, (width - box_width) // 2, box_height, box_width


def random_shift(image: np.ndarray, max_shift: int, rng: np.random.Generator) -> np.ndarray:
    """Shift an image by whole pixels, repeating its border.

    Args:
      image: uint8 [H, W, 3].
      max_shift: maximum shift along each axis, in pixels; 0 returns the image itself.
      rng: random generator.

    Returns:
      uint8 [H, W, 3].

    Raises:
      ValueError: the image is not uint8 [H, W, 3].
    """
    _check_image(image)
    if max_shift == 0:
        return image
    dy, dx = rng.integers(-max_shift, max_shift + 1, size=2).tolist()
    rows = np.clip(np.arange(image.shape[0]) - dy, 0, image.shape[0] - 1)
    columns = np.clip(np.arange(image.shape[1]) - dx, 0, image.shape[1] - 1)
    return image[rows[:, None], columns]


@dataclasses.dataclass(frozen=True)
class Augmentation:
    """Training transform: a random resized crop, then a random shift.

    Images are not flipped, because captions may say "left".

    Attributes:
      scale: range of the crop area, as a fraction of the image area; (1, 1) uses `resize_center_crop` instead.
      ratio: range of the crop's width over height, log-uniform.
      shift: maximum shift along each axis, in pixels of the result.

    Raises:
      ValueError: a range is empty or out of bounds, or `shift` is negative.
    """

    scale: tuple[float, float] = (0.9, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    shift: int = 0

    def __post_init__(self) -> None:
        for name in ("scale", "ratio"):
            value = getattr(self, name)
            pair = isinstance(value, tuple | list) and len(value) == 2
            if not pair or not all(isinstance(bound, int | float) for bound in value):
                raise ValueError(f"expected augmentation.{name} to be two numbers (low, high), got {value!r}")
        if not 0.0 < self.scale[0] <= self.scale[1] <= 1.0:
            raise ValueError(f"expected augmentation.scale with 0 < low <= high <= 1, got {self.scale}")
        if not 0.0 < self.ratio[0] <= self.ratio[1]:
            raise ValueError(f"expected augmentation.ratio with 0 < low <= high, got {self.ratio}")
        if self.shift < 0:
            raise ValueError(f"expected augmentation.shift of at least 0 pixels, got {self.shift}")

    def __call__(self, image: np.ndarray, size: int, rng: np.random.Generator) -> np.ndarray:
        """Transform one image: uint8 [H, W, 3] to uint8 [size, size, 3]."""
        if self.scale == (1.0, 1.0):
            image = resize_center_crop(image, size)
        else:
            image = random_resized_crop(image, size, rng, scale=self.scale, ratio=self.ratio)
        return random_shift(image, self.shift, rng)
