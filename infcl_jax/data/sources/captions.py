"""Captions and examples from the texts of files."""

from __future__ import annotations

from collections.abc import Sequence

from infcl_jax.data.sources.base import Example
from infcl_jax.data.sources.files import check_size
from infcl_jax.file_io import parse_json

NONE = "none"  # value of the option "caption" for images without captions or labels
LARGEST = 2**20  # bytes of a text file, characters of a caption; longer than a book chapter
LARGEST_JSON = 2**23  # bytes of a JSON file of captions, which escapes each byte as up to six
JSON_FIELDS = ("caption", "captions", "text", "texts", "title")


def largest(extension: str) -> int:
    """Return the largest size of a caption file, in bytes."""
    return LARGEST_JSON if extension == "json" else LARGEST


def text(data: bytes) -> str:
    """Decode a caption.

    Raises:
      ValueError: the caption is not UTF-8.
    """
    try:
        return data.decode("utf-8-sig").strip()
    except UnicodeDecodeError as error:
        raise ValueError(f"the caption is not UTF-8: byte {error.start} is {data[error.start]:#04x}") from None


def json_captions(data: bytes, fields: Sequence[str] = JSON_FIELDS) -> list[str]:
    """Find the captions in JSON data.

    Args:
      data: JSON of a text, a list of texts, or an object with one of them in a field.
      fields: names of the field, in order of preference.

    Raises:
      ValueError: the JSON is damaged, or there is no caption.
    """
    value = parse_json(data, "the caption", object)
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
      ValueError: the image or all captions are empty, or a caption is too long.
    """
    texts = tuple(caption for caption in captions if caption)
    check_size(max(map(len, texts), default=0), LARGEST, "a caption")
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
