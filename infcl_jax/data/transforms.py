"""Image transforms on the host.

Transforms map uint8 [H, W, 3] to uint8 [S, S, 3]. Random transforms take an explicit generator.
"""

import dataclasses
import math
from typing import NamedTuple

import numpy as np
from PIL import Image

from infcl_jax.schema import Range, Section, setting

INTERPOLATIONS = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}
RESIZE_MODES = ("shortest", "squash")

_BICUBIC = INTERPOLATIONS["bicubic"]
_CROP_TRIES = 10  # draws of a crop box, as in torchvision
_MAX_ASPECT_RATIO = 100  # longer images are cropped first, which bounds a resized image of 224 pixels to 20 MB


def _check_image(image: np.ndarray) -> None:
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
        raise ValueError(
            f"expected an image of uint8 [H, W, 3], got {image.dtype} {list(image.shape)}; convert it in the source"
        )


class Resize(NamedTuple):
    """Resize of the evaluation transform; the names are as in OpenCLIP's `preprocess_cfg`.

    The mode "shortest" resizes the short side and crops the central square; "squash" resizes both sides. The
    interpolation is "bicubic" or "bilinear", antialiased.
    """

    mode: str = "shortest"
    interpolation: str = "bicubic"


SHORTEST_BICUBIC = Resize()  # of CLIP


def resize_center_crop(image: np.ndarray, size: int, resize: Resize = SHORTEST_BICUBIC) -> np.ndarray:
    """Resize the short side (antialiased), then crop the central square.

    Equals torchvision's `Resize(size)` and `CenterCrop(size)` on PIL images, or `Resize((size, size))` with the mode
    "squash", pixel for pixel, for aspect ratios up to 100. A longer image is cropped first with the mode "shortest",
    because the resized image would take `4 * size**2 * aspect_ratio` bytes.

    Returns:
      uint8 [S, S, 3]; the input image itself if it has that size.

    Raises:
      ValueError: the image is not uint8 [H, W, 3].
    """
    _check_image(image)
    if image.shape[:2] == (size, size):
        return image
    interpolation = INTERPOLATIONS[resize.interpolation]
    if resize.mode == "squash":
        return np.array(Image.fromarray(image).resize((size, size), interpolation))
    short = min(image.shape[:2])
    image = _center_crop(image, _MAX_ASPECT_RATIO * short)
    height, width, _ = image.shape
    # torchvision rounds the long side down, and a margin of half pixels to the even number. Pillow's `resize(box=...)`
    # would avoid the large image, but its pixels differ by up to 24 of 255 levels.
    resized = np.asarray(Image.fromarray(image).resize((size * width // short, size * height // short), interpolation))
    return np.ascontiguousarray(_center_crop(resized, size))


def _center_crop(image: np.ndarray, size: int) -> np.ndarray:
    """View the central pixels, at most `size` along each axis."""
    top, left = (max(0, round((side - size) / 2)) for side in image.shape[:2])
    return image[top : top + size, left : left + size]


class Box(NamedTuple):
    """Crop box in pixels of the upright image."""

    top: float
    left: float
    height: float
    width: float


def resize_box(image: Image.Image, box: Box, size: int) -> np.ndarray:
    """Crop a box of an RGB image and resize it to a square, uint8 [S, S, 3] (bicubic, antialiased).

    Pixels outside of the box have no weight, except those that a fractional box shares.
    """
    left, top = math.floor(box.left), math.floor(box.top)
    right, bottom = math.ceil(box.left + box.width), math.ceil(box.top + box.height)
    # Cropped first, because bicubic weights extend beyond the box of `resize`.
    crop = image.crop((left, top, right, bottom))
    inner = (box.left - left, box.top - top, box.left - left + box.width, box.top - top + box.height)
    return np.asarray(crop.resize((size, size), _BICUBIC, box=inner))


def random_crop_box(
    height: int, width: int, rng: np.random.Generator, scale: tuple[float, float], ratio: tuple[float, float]
) -> Box:
    """Draw a crop box from the distribution of torchvision's `RandomResizedCrop`.

    Area and aspect ratio are the first of ten draws that fit the image. The position is uniform. If no draw fits, the
    box is the largest central one whose aspect ratio is in `ratio`. Every call takes 22 numbers from `rng`.

    Args:
      scale: range of the box's area, as a fraction of the image's.
      ratio: range of the box's width over height, log-uniform.

    Source: Szegedy et al. (2015), section 6.
    """
    u_top, u_left, *tries = rng.random(2 + 2 * _CROP_TRIES).tolist()
    low, high = math.log(ratio[0]), math.log(ratio[1])
    for u_area, u_aspect in zip(tries[::2], tries[1::2], strict=True):
        area = height * width * (scale[0] + (scale[1] - scale[0]) * u_area)
        aspect = math.exp(low + (high - low) * u_aspect)
        box_width, box_height = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < box_width <= width and 0 < box_height <= height:
            top, left = int(u_top * (height - box_height + 1)), int(u_left * (width - box_width + 1))
            return Box(top, left, box_height, box_width)
    box_width = min(width, max(1, round(height * ratio[1])))
    box_height = min(height, max(1, round(width / ratio[0])))
    return Box((height - box_height) // 2, (width - box_width) // 2, box_height, box_width)


def shift_pixels(image: np.ndarray, shift: tuple[int, int]) -> np.ndarray:
    """Shift an image uint8 [H, W, 3] by whole pixels down and to the right, repeating its border."""
    _check_image(image)
    if shift == (0, 0):
        return image
    rows, columns = (np.clip(np.arange(n) - d, 0, n - 1) for n, d in zip(image.shape, shift, strict=False))
    return image[rows[:, None], columns]


class Geometry(NamedTuple):
    """Geometric part of an augmentation, drawn for one image."""

    box: Box  # resized to a square
    shift: tuple[int, int] = (0, 0)  # pixels of the result down and to the right
    flip: bool = False  # whether the result is mirrored horizontally, after the shift

    def finish(self, image: np.ndarray) -> np.ndarray:
        """Shift and mirror the resized box, uint8 [S, S, 3]."""
        image = shift_pixels(image, self.shift)
        return image[:, ::-1] if self.flip else image


@dataclasses.dataclass(frozen=True)
class Augmentation(Section, prefix="augmentation."):
    """Training transform: random resized crop, shift, horizontal flip and colors.

    By default images are not flipped, because captions may say "left". The colors are adjusted on the device, see
    `infcl_jax.ops.color`; their settings are as in OpenCLIP's `--aug-cfg`.

    The factors of brightness, contrast and saturation are uniform in [1 - range, 1 + range], the shift of the hue in
    [-range, range] turns. Their order is random. Gray images follow it. The range `ratio` of the crop's width over
    height, log-uniform, is no setting of a run.

    Examples:
      >>> augmentation = Augmentation(scale=(0.5, 1.0), flip=0.5)

    Raises:
      ValueError: a range is empty or out of bounds, `shift` is negative, a probability is not in [0, 1], or color
        jitter has ranges without a probability or the reverse.
    """

    scale: tuple[float, float] = setting(
        (0.9, 1.0),
        "area range of random crops, as a fraction of the image; (1, 1): the central square",
        Range(0, 1, above=True),
    )
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    shift: int = setting(0, "largest random shift, in pixels", Range(0, 1024))
    flip: float = setting(0.0, "probability of a horizontal flip", Range(0, 1))
    color_jitter: tuple[float, float, float, float] = setting(
        (0.0, 0.0, 0.0, 0.0),
        "ranges of brightness, contrast, saturation and hue (at most 0.5), as in OpenCLIP",
        Range(0, 10),
    )
    color_jitter_prob: float = setting(0.0, "probability of color jitter", Range(0, 1))
    gray_scale_prob: float = setting(0.0, "probability of a gray image", Range(0, 1))

    def check(self) -> None:
        """Check the order of ranges, and that color jitter has both a range and a probability."""
        if self.scale[0] > self.scale[1]:
            raise ValueError(f"expected augmentation.scale with 0 < low <= high <= 1, got {self.scale}")
        if not 0.0 < self.ratio[0] <= self.ratio[1]:
            raise ValueError(f"expected augmentation.ratio with 0 < low <= high, got {self.ratio}")
        if self.color_jitter[3] > 0.5:
            raise ValueError(f"expected augmentation.color_jitter with a hue of at most 0.5, got {self.color_jitter}")
        if any(self.color_jitter) != (self.color_jitter_prob > 0):
            raise ValueError(
                "expected both of augmentation.color_jitter and augmentation.color_jitter_prob or none, got "
                f"{self.color_jitter} and {self.color_jitter_prob}"
            )

    def draw(self, height: int, width: int, rng: np.random.Generator) -> Geometry:
        """Draw the geometry of an image.

        Args:
          height: height of the upright image, in pixels.
          width: width of the upright image, in pixels.
          rng: random generator.
        """
        if tuple(self.scale) == (1.0, 1.0):
            side = min(height, width)
            box = Box((height - side) // 2, (width - side) // 2, side, side)
        else:
            box = random_crop_box(height, width, rng, self.scale, self.ratio)
        down, right = rng.integers(-self.shift, self.shift + 1, size=2).tolist() if self.shift else (0, 0)
        return Geometry(box, (down, right), self.flip > 0 and bool(rng.random() < self.flip))

    @property
    def adjusts_colors(self) -> bool:
        """True if the colors of some images change."""
        return self.color_jitter_prob > 0 or self.gray_scale_prob > 0

    def draw_color(self, rng: np.random.Generator) -> np.ndarray:
        """Draw the color parameters of an image.

        Returns:
          float32 [7], see `infcl_jax.ops.color.ColorBatch`.
        """
        jitter, order, *uniform, gray = rng.random(7).tolist()
        brightness, contrast, saturation, hue = self.color_jitter
        low = [max(0.0, 1 - brightness), max(0.0, 1 - contrast), max(0.0, 1 - saturation), -hue]
        high = [1 + brightness, 1 + contrast, 1 + saturation, hue]
        factors = [a + (b - a) * u for a, b, u in zip(low, high, uniform, strict=True)]
        order = int(order * math.factorial(len(factors)))
        return np.array([jitter < self.color_jitter_prob, order, *factors, gray < self.gray_scale_prob], np.float32)

    def __call__(self, image: np.ndarray, size: int, rng: np.random.Generator) -> np.ndarray:
        """Transform the geometry of an image.

        Args:
          image: uint8 [H, W, 3].
          size: side of the result, in pixels.
          rng: random generator.

        Returns:
          uint8 [size, size, 3].

        Raises:
          ValueError: the image is not uint8 [H, W, 3].
        """
        _check_image(image)
        height, width, _ = image.shape
        geometry = self.draw(height, width, rng)
        if geometry.box == (0, 0, size, size) and (height, width) == (size, size):
            return geometry.finish(image)
        return geometry.finish(resize_box(Image.fromarray(image), geometry.box, size))
