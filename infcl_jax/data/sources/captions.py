"""Captions from the texts of files, and caption files of other tools, which are named in errors."""

import ast
import contextlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from infcl_jax.data.sources import files
from infcl_jax.runtime.file_io import parse_json

NONE = "none"  # value of the option "caption" for images without captions or labels
LARGEST = 2**20  # bytes of a text file, characters of a caption; longer than a book chapter
LARGEST_JSON = 2**23  # bytes of a JSON file of captions, which escapes each byte as up to six
JSON_FIELDS = ("caption", "captions", "text", "texts", "title")
_ESCAPE = r"""\\(?:[\\'"abfnrtv]|x[\da-fA-F]{2}|u[\da-fA-F]{4}|U000[\da-fA-F]{5})"""
_ITEM = re.compile(rf"""'(?:[^'\\\n]|{_ESCAPE})*'|"(?:[^"\\\n]|{_ESCAPE})*"|None|nan""")  # of Python
_LIST = re.compile(rf"\[\s*(?:(?:{_ITEM.pattern})(?:\s*,\s*|\s+))*(?:{_ITEM.pattern})?\s*\]")
_HEAD = 2**14  # bytes of a text file that are read to see if it is a table
_SEPARATOR = re.compile(r"[,;|\t]")
_CAPTION_NUMBER = re.compile(r"#\d+$")  # "0.jpg#2" in the files of Flickr8k and Flickr30k


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


def check_no_annotations(content: Any, path: str) -> None:
    """Check that JSON holds no annotations of COCO, Karpathy or BLIP."""
    kind, first = None, _first(content)
    if isinstance(content, dict):
        first, annotation = _first(content.get("images")), _first(content.get("annotations"))
        if "sentences" in first:
            kind = "Karpathy's captions, which only evaluations read (FILE.json?folder=IMAGES)"
        elif "image_id" in annotation:
            kind = "COCO's captions" if "caption" in annotation else "COCO's annotations without captions"
    elif {"image", "caption"} <= first.keys():
        kind = "captions as BLIP writes them"
    if kind is not None:
        raise ValueError(
            f"expected a dataset, got {path}, which has {kind}; write a metadata.jsonl into the folder of the images,"
            ' with a line {"file_name": "0.jpg", "text": ["CAPTION", ...]} for each image'
        )


def check_not_saved_to_disk(folder: str) -> None:
    """Check that a folder is no data set of Hugging Face's `save_to_disk`."""
    names = os.listdir(folder)
    if {"dataset_dict.json", "dataset_info.json"} & set(names) or any(name.endswith(".arrow") for name in names):
        raise ValueError(
            f"expected images, tar files or tables in {folder}, got Arrow files of Hugging Face datasets; write parquet"
            ' with load_from_disk(FOLDER).to_parquet("train.parquet")'
        )


def check_no_table(path: str, folders: Mapping[str, str]) -> None:
    """Check that a text file is no table of images, such as the `captions.txt` of Flickr8k.

    `folders` has the folders of the images, by file name.
    """
    head = b""
    with contextlib.suppress(OSError, ValueError), files.open_file(path) as file:
        head = file.read(_HEAD)
    for line in head.decode("utf-8-sig", "replace").splitlines():
        cells = [_CAPTION_NUMBER.sub("", cell.strip(' "')) for cell in _SEPARATOR.split(line)]
        name = next((name for cell in cells if (name := files.name_of(cell)) in folders), None)
        if name is not None and len(cells) > 1:
            table = os.path.splitext(path)[0] + (".tsv" if "\t" in line else ".csv")
            raise ValueError(
                f"expected KEY.txt beside KEY.jpg, got {path}, a table with the image {name}; rename it to"
                f" {files.name_of(table)}, with a first line of column names (image, caption), and open"
                f" {table}?folder={folders[name]}"
            )


def _first(items: Any) -> dict[str, Any]:
    """Return the first item of a list of objects, or an empty one."""
    return items[0] if isinstance(items, list) and items and isinstance(items[0], dict) else {}
