"""Decoding of the examples of a source."""

from __future__ import annotations

from typing import TypedDict

import numpy as np

from infcl_jax.data.decode.pillow import decode
from infcl_jax.data.sources.base import Example, Source, bad_record, describe


class DecodedExample(TypedDict):
    """Captioned image in pixels; see `infcl_jax.data.Example`.

    Attributes:
      image: uint8 [H, W, 3].
      caption: first of `captions`.
      captions: all captions, at least one.
      label: class index, -1 without class.
    """

    image: np.ndarray
    caption: str
    captions: tuple[str, ...]
    label: int


def decode_example(source: Source, index: int, example: Example | None = None) -> DecodedExample:
    """Read and decode one example of a source.

    Args:
      source: source of the example.
      index: sample index.
      example: result of `source[index]`, if it is already read.

    Raises:
      BadRecordError: the record cannot be read or decoded.
    """
    if example is None:
        example = source[index]
    try:
        image = _pixels(example["image"])
    except Exception as error:  # image decoders raise any exception
        raise bad_record(describe(source, index), error) from error
    return {
        "image": image,
        "caption": example["caption"],
        "captions": example["captions"],
        "label": example["label"],
    }


def _pixels(image: bytes | np.ndarray) -> np.ndarray:
    if isinstance(image, bytes):
        return decode(image)
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] not in (1, 3):
        raise ValueError(f"expected a uint8 image with 1 or 3 channels, got {image.dtype} {list(image.shape)}")
    return np.repeat(image, 3, axis=2) if image.shape[2] == 1 else image
