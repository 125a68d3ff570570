"""Ids of training samples for positives by id.

Pairs with equal ids are positives of each other, see `infcl_jax.clip_loss`.
"""

import hashlib
import unicodedata
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Int32

# What two pairs of a batch must share for the image of one and the text of the other to be a positive.
POSITIVES = ("pair", "caption", "image", "label")


def positive_id(positives: str, example: Mapping[str, Any], caption: Any) -> Int32[np.ndarray, "2"]:
    """Return the id of a training sample, a 64-bit number as two int32.

    It is the hash of the caption in normal form or of the caption's cached features with "caption", and the class index
    with "label".

    Raises:
      ValueError: the example has no class, with "label".
    """
    if positives == "caption":
        return _hash(normalized(caption).encode() if isinstance(caption, str) else np.asarray(caption).tobytes())
    if example["label"] < 0:
        raise ValueError("expected a class for every sample with positives='label', got a sample without one")
    return np.array([0, example["label"]], np.int32)


def image_id(image: bytes | np.ndarray) -> Int32[np.ndarray, "2"]:
    """Return the hash of an image's file, pixels or cached features."""
    return _hash(image if isinstance(image, bytes) else np.asarray(image).tobytes())


def _hash(data: bytes) -> Int32[np.ndarray, "2"]:
    """Hash bytes to 64 bits, equally on every platform."""
    return np.frombuffer(hashlib.blake2b(data, digest_size=8).digest(), "<i4").astype(np.int32)


def normalized(caption: str) -> str:
    """Normalize Unicode (NFKC), case and white space of a caption."""
    return " ".join(unicodedata.normalize("NFKC", caption).casefold().split())
