"""Image transforms on the host: uint8 [H, W, 3] in, uint8 [S, S, 3] out, randomness from an explicit generator."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from PIL import Image

_BICUBIC = Image.Resampling.BICUBIC


def _check_image(image: np.ndarray) -> None:
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
        raise ValueError(
            f"image must be uint8 [height, width, 3], got {image.dtype} {list(image.shape)}; convert it in the source"
        )


def _resize(image: np.ndarray, size: int, box: tuple[float, float, float, float]) -> np.ndarray:
    """The part of an image inside `box` (left, top, right, bottom), resampled to `size` x `size`."""
    return np.asarray(Image.fromarray(image).resize((size, size), _BICUBIC, box=box))


def resize_center_crop(image: np.ndarray, size: int) -> np.ndarray:
    """The central square of an image, as large as it fits, resampled (bicubic, anti-aliased): the evaluation transform.

    Equals resizing the short side to `size` and cropping the centre, without the intermediate image.

    Args:
      image: uint8 [H, W, 3].
      size: side S of the result, in pixels.

    Returns:
      uint8 [S, S, 3]; the image itself where it has that size already.

    Raises:
      ValueError: the image is not uint8 [H, W, 3].
    """
    _check_image(image)
    height, width, _ = image.shape
    if height == width == size:
        return image
    side = min(height, width)
    left, top = (width - side) / 2, (height - side) / 2
    return _resize(image, size, (left, top, left + side, top + side))


def random_resized_crop(
    image: np.ndarray,
    size: int,
    rng: np.random.Generator,
    *,
    scale: tuple[float, float] = (0.9, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
) -> np.ndarray:
    """A random part of an image, resampled to a square (Szegedy et al. 2015, section 6; scale as in OpenCLIP).

    A part that would not fit (a wide one out of a tall image) is cut to the image's bounds, not drawn again, so that a
    sample costs a fixed number of random draws.

    Args:
      image: uint8 [H, W, 3].
      size: side S of the result, in pixels.
      rng: source of randomness.
      scale: range of the part's area, as a fraction of the image's.
      ratio: range of the part's width over height, log-uniform.

    Returns:
      uint8 [S, S, 3].

    Raises:
      ValueError: the image is not uint8 [H, W, 3].
    """
    _check_image(image)
    height, width, _ = image.shape
    u_area, u_ratio, u_left, u_top = rng.random(4).tolist()
    area = height * width * (scale[0] + (scale[1] - scale[0]) * u_area)
    aspect = math.exp(math.log(ratio[0]) + (math.log(ratio[1]) - math.log(ratio[0])) * u_ratio)
    part_width, part_height = min(math.sqrt(area * aspect), width), min(math.sqrt(area / aspect), height)
    left, top = (width - part_width) * u_left, (height - part_height) * u_top
    return _resize(image, size, (left, top, left + part_width, top + part_height))


def random_shift(image: np.ndarray, max_shift: int, rng: np.random.Generator) -> np.ndarray:
    """Moves an image by whole pixels, up to `max_shift` each way; what becomes visible repeats the border.

    Args:
      image: uint8 [H, W, 3].
      max_shift: largest move along each axis, in pixels; 0 changes nothing.
      rng: source of randomness.

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
    """The training transform: a random resized crop, then a random shift. No flips: captions may say "left".

    Attributes:
      scale: see `random_resized_crop`; (1, 1) leaves the crop out, for `resize_center_crop`.
      ratio: see `random_resized_crop`.
      shift: see `random_shift`, in pixels of the result.

    Raises:
      ValueError: a range is empty or out of bounds.
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
            raise ValueError(f"scale must be (low, high) with 0 < low <= high <= 1, got {self.scale}")
        if not 0.0 < self.ratio[0] <= self.ratio[1]:
            raise ValueError(f"ratio must be (low, high) with 0 < low <= high, got {self.ratio}")
        if self.shift < 0:
            raise ValueError(f"shift must be at least 0 pixels, got {self.shift}")

    def __call__(self, image: np.ndarray, size: int, rng: np.random.Generator) -> np.ndarray:
        """Transforms one image: uint8 [H, W, 3] to uint8 [size, size, 3]."""
        if self.scale == (1.0, 1.0):
            image = resize_center_crop(image, size)
        else:
            image = random_resized_crop(image, size, rng, scale=self.scale, ratio=self.ratio)
        return random_shift(image, self.shift, rng)
