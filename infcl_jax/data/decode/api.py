"""Decoding of the examples of a source."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypedDict

import numpy as np

from infcl_jax.data.decode.pillow import MAX_PIXELS, decode
from infcl_jax.data.sources.base import Example, Source, bad_record, describe

ToImage = Callable[[Example], Any]


class DecodedExample(TypedDict):
    """Captioned image in pixels; see `infcl_jax.data.Example`.

    Attributes:
      image: uint8 [H, W, 3], or the result of another decoder.
      caption: first of `captions`.
      captions: all captions, at least one.
      label: class index, -1 without class.
    """

    image: Any
    caption: str
    captions: tuple[str, ...]
    label: int


def pixels(example: Example, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """Decode the image of an example to uint8 [H, W, 3].

    Args:
      example: example of a source.
      max_pixels: largest number of pixels of an encoded image.

    Raises:
      Exception: the image is damaged or has another dtype or shape.
    """
    image = example["image"]
    if isinstance(image, bytes):
        return decode(image, max_pixels)
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] not in (1, 3):
        raise ValueError(f"expected a uint8 image with 1 or 3 channels, got {image.dtype} {list(image.shape)}")
    return np.repeat(image, 3, axis=2) if image.shape[2] == 1 else image


def decode_example(
    source: Source, index: int, example: Example | None = None, to_image: ToImage = pixels
) -> DecodedExample:
    """Read and decode one example of a source.

    Args:
      source: source of the example.
      index: sample index.
      example: result of `source[index]`, if it is already read.
      to_image: function that decodes the image of an example.

    Raises:
      BadRecordError: the record cannot be read or decoded.
    """
    if example is None:
        example = source[index]
    try:
        image = to_image(example)
    except Exception as error:  # image decoders raise any exception
        raise bad_record(describe(source, index), error) from error
    return {
        "image": image,
        "caption": example["caption"],
        "captions": example["captions"],
        "label": example["label"],
    }
