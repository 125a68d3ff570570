"""Captions and examples from the texts of files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from infcl_jax.data.sources.base import Example

NONE = "none"  # value of the option "caption" for images without captions or labels
JSON_FIELDS = ("caption", "captions", "text", "texts", "title")


def text(data: bytes) -> str:
    """Decode a caption.

    Raises:
      ValueError: the caption is not UTF-8.
    """
    try:
        return data.decode("utf-8-sig").strip()
    except UnicodeDecodeError as error:
        raise ValueError(f"the caption is not UTF-8: byte {error.start} is {data[error.start]:#04x}") from None


def json_captions(value: Any, fields: Sequence[str] = JSON_FIELDS) -> list[str]:
    """Find the captions in JSON data.

    Args:
      value: a text, a list of texts, or an object with one of them in a field.
      fields: names of the field, in order of preference.

    Raises:
      ValueError: there is no caption.
    """
    if isinstance(value, dict):
        value = next((value[field] for field in fields if value.get(field)), None)
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError(f"expected JSON with a text or texts in one of {', '.join(fields)}, got {str(value)[:40]}")
    return [item.strip() for item in value]


def example(image: bytes, captions: Sequence[str], label: int = -1) -> Example:
    """Create an example from an encoded image, its captions and its label.

    Empty captions are left out.

    Raises:
      ValueError: the image or all captions are empty.
    """
    texts = tuple(caption for caption in captions if caption)
    if not texts:
        raise ValueError("no caption")
    if not image:
        raise ValueError("the image is empty")
    return {"image": image, "caption": texts[0], "captions": texts, "label": label}


def uncaptioned_example(image: bytes) -> Example:
    """Create an example without captions and label.

    Raises:
      ValueError: the image is empty.
    """
    if not image:
        raise ValueError("the image is empty")
    return {"image": image, "caption": "", "captions": (), "label": -1}
