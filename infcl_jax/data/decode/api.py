"""Decoding of images on the host, and the choice of the decoder of training images."""

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypedDict

import jax
import numpy as np
from PIL import Image

from infcl_jax.data.decode.pillow import MAX_PIXELS, decode, load_upright
from infcl_jax.data.sources.base import Example, Source, bad_record, describe

DECODERS = ("auto", "pillow", "nvimgcodec")
ImageLike = Image.Image | str | os.PathLike | bytes | np.ndarray | jax.Array
ToImage = Callable[[Example], Any]


class DecodedExample(TypedDict):
    """Example whose image is uint8 [H, W, 3], or the result of another decoder; see `infcl_jax.data.Example`."""

    image: Any
    caption: str
    captions: tuple[str, ...]
    label: int


def pixels(example: Example, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """Decode the image of an example to uint8 [H, W, 3]; see `decode_pixels`."""
    return decode_pixels(example["image"], max_pixels)


def decode_pixels(image: bytes | np.ndarray, max_pixels: int) -> np.ndarray:
    """Decode an image to uint8 [H, W, 3].

    Args:
      image: contents of an image file, or uint8 array [H, W, 3] or [H, W, 1].
      max_pixels: largest number of pixels of an encoded image.

    Raises:
      Exception: the image is damaged or has another dtype or shape.
    """
    if isinstance(image, bytes):
        return decode(image, max_pixels)
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] not in (1, 3):
        raise ValueError(f"expected a uint8 image with 1 or 3 channels, got {image.dtype} {list(image.shape)}")
    return np.repeat(image, 3, axis=2) if image.shape[2] == 1 else image


def decode_image(image: ImageLike, max_pixels: int) -> np.ndarray:
    """Decode an image that is given in Python to uint8 [H, W, 3].

    Args:
      image: PIL image, path or contents of an image file, or uint8 array [H, W, 3], [H, W, 1] or [H, W].
      max_pixels: largest number of pixels of an encoded image.

    Raises:
      Exception: the file cannot be read, or see `decode_pixels`.
    """
    if isinstance(image, Image.Image):
        return np.asarray(load_upright(image))
    if isinstance(image, str | os.PathLike):
        image = Path(image).read_bytes()
    if not isinstance(image, bytes):
        image = np.asarray(image)
        image = image[:, :, None] if image.ndim == 2 else image
    return decode_pixels(image, max_pixels)


def decode_example(
    source: Source, index: int, example: Example | None = None, to_image: ToImage = pixels
) -> DecodedExample:
    """Read one example of a source, unless `example` is it, and decode it; raise `BadRecordError` if it is damaged."""
    if example is None:
        example = source[index]
    try:
        return {**example, "image": to_image(example)}
    except Exception as error:  # image decoders raise any exception
        raise bad_record(describe(source, index), error) from error


def choose_decoder(decode: str, offload: str) -> str:
    """Choose the decoder of a run, "pillow" or "nvimgcodec", from the settings `decode` and `grad_cache.offload`.

    "auto" is "nvimgcodec" on GPUs with the packages of the extra `gpu-decode`, for batches in device memory, and
    "pillow" otherwise.
    """
    if decode not in DECODERS:
        raise ValueError(f"expected decode to be one of {', '.join(DECODERS)}, got {decode!r}")
    if decode == "pillow":
        return "pillow"
    obstacle = None
    if offload != "none":
        obstacle = f"grad_cache.offload='none' (it is {offload!r})"
    elif not gpu_decoder_installed():
        obstacle = "nvImageCodec and CuPy (pip install 'infcl_jax[gpu-decode]')"
    elif jax.default_backend() != "gpu":
        obstacle = f"GPUs (the devices are {jax.default_backend()})"
    if obstacle and decode == "nvimgcodec":
        raise ValueError(f"expected {obstacle}, got decode='nvimgcodec'; choose decode='auto' or 'pillow'")
    return "pillow" if obstacle else "nvimgcodec"


def gpu_decoder_installed() -> bool:
    """Return whether nvImageCodec and CuPy are installed, without importing them."""
    packages = ("nvidia", "nvidia.nvimgcodec", "cupy")  # find_spec of a submodule needs its parent
    return all(importlib.util.find_spec(package) is not None for package in packages)
