"""Captions from the texts of files."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Sequence
from typing import Any

from infcl_jax.runtime.file_io import parse_json

NONE = "none"  # value of the option "caption" for images without captions or labels
LARGEST = 2**20  # bytes of a text file, characters of a caption; longer than a book chapter
LARGEST_JSON = 2**23  # bytes of a JSON file of captions, which escapes each byte as up to six
JSON_FIELDS = ("caption", "captions", "text", "texts", "title")
_ESCAPE = r"""\\(?:[\\'"abfnrtv]|x[\da-fA-F]{2}|u[\da-fA-F]{4}|U000[\da-fA-F]{5})"""
_ITEM = re.compile(rf"""'(?:[^'\\\n]|{_ESCAPE})*'|"(?:[^"\\\n]|{_ESCAPE})*"|None|nan""")  # of Python
_LIST = re.compile(rf"\[\s*(?:(?:{_ITEM.pattern})(?:\s*,\s*|\s+))*(?:{_ITEM.pattern})?\s*\]")


def largest(extension: str) -> int:
    """Return the largest size of a caption file, in bytes."""
    return LARGEST_JSON if extension == "json" else LARGEST


def text(data: bytes) -> str:
    """Decode a caption; raise `ValueError` if it is not UTF-8."""
    try:
        return data.decode("utf-8-sig").strip()
    except UnicodeDecodeError as error:
        raise ValueError(f"the caption is not UTF-8: byte {error.start} is {data[error.start]:#04x}") from None


def json_captions(data: bytes, fields: Sequence[str] = JSON_FIELDS) -> list[str]:
    """Find the captions in JSON data.

    Null, NaN, blank texts, empty lists and missing fields are no captions.

    Args:
      data: JSON of a text, a list of texts, or an object with one of them in a field.
      fields: names of the field, in order of preference.

    Returns:
      Captions without surrounding white space; empty if there are none.

    Raises:
      ValueError: the JSON is damaged, or a caption has another type.
    """
    value = parse_json(data, "the caption", object)
    for content in [value.get(field) for field in fields] if isinstance(value, dict) else [value]:
        captions = as_captions(content)
        if captions is None:
            raise ValueError(
                f"expected JSON with a text or texts in one of {', '.join(fields)}, got {str(content)[:40]}"
            )
        if captions:
            return captions
    return []


def as_captions(value: Any) -> list[str] | None:
    """Return a text or list of texts without blank, null and NaN ones; None if the value is of another type."""
    items = value if isinstance(value, list) else [value]
    if not all(item is None or isinstance(item, str) or item != item for item in items):
        return None
    return [item.strip() for item in items if isinstance(item, str) and item.strip()]


def cell_captions(cell: str) -> list[str]:
    """Find the captions in a cell of a table.

    Pandas writes lists as Python does ("['a', 'b']"), and arrays as NumPy does ("['a' 'b']"). The cell is a text, or a
    list of texts in JSON, Python or NumPy, without surrounding white space.
    """
    if cell[:1] != "[" or cell[-1:] != "]":
        return [cell]
    try:
        captions = as_captions(json.loads(cell))
    except (ValueError, RecursionError):
        captions = None
    if captions is None and _LIST.fullmatch(cell):
        captions = as_captions([ast.literal_eval(item) for item in _ITEM.findall(cell) if item[0] in "'\""])
    return [cell] if captions is None else captions
