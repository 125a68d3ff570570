"""Caption files of other tools, which are named in errors."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from typing import Any

from infcl_jax.data.sources import files

_HEAD = 2**14  # bytes of a text file that are read to see if it is a table
_SEPARATOR = re.compile(r"[,;|\t]")
_CAPTION_NUMBER = re.compile(r"#\d+$")  # "0.jpg#2" in the files of Flickr8k and Flickr30k


def check_no_annotations(content: Any, path: str) -> None:
    """Check that JSON holds no annotations of COCO, Karpathy or BLIP."""
    kind = _kind(content)
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


def _kind(content: Any) -> str | None:
    if isinstance(content, dict):
        first = _first(content.get("images"))
        if first is not None and "sentences" in first:
            return "Karpathy's captions, which only evaluations read (FILE.json?folder=IMAGES)"
        annotation = _first(content.get("annotations"))
        if annotation is not None and "image_id" in annotation:
            return "COCO's captions" if "caption" in annotation else "COCO's annotations without captions"
        return None
    entry = _first(content)
    return "captions as BLIP writes them" if entry is not None and {"image", "caption"} <= entry.keys() else None


def _first(items: Any) -> dict[str, Any] | None:
    """Return the first item of a list of objects."""
    return items[0] if isinstance(items, list) and items and isinstance(items[0], dict) else None
