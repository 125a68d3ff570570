"""Folders of images with caption files, or with a table of captions."""

from __future__ import annotations

import collections
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from infcl_jax.data.sources import captions
from infcl_jax.data.sources.base import Example, Source, bad_record, check_index, warn_dropped
from infcl_jax.data.sources.table import TableSource
from infcl_jax.data.sources.tar_scan import IMAGES

METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
_CAPTION = ".txt"


def folder_source(folder: str, name: str, split: str, options: Mapping[str, str] | None = None) -> Source:
    """Open a folder of images.

    With a `metadata.csv`, `metadata.jsonl` or `metadata.parquet` in the layout of Hugging Face's ImageFolder, the
    samples are the rows of that table. Otherwise they are the images with a `.txt` file of the same name.

    Args:
      folder: path of the folder.
      name: name of the dataset.
      split: name of the split.
      options: options of `TableSource`.

    Raises:
      ValueError: the folder has no image with a caption.
    """
    for table in METADATA:
        if (Path(folder) / table).is_file():
            return TableSource([f"{folder}/{table}"], name, split, options)
    if options:
        raise ValueError(f"expected no options for the folder {name} without {METADATA[0]}, got {', '.join(options)}")
    return FolderSource(folder, name, split)


class FolderSource:
    """Images in a folder and its subfolders, with captions in `.txt` files.

    Samples are numbered in the order of the relative paths. Images without
    caption and caption files without image are dropped.

    Args:
      folder: path of the folder.
      name: name of the dataset.
      split: name of the split.

    Raises:
      ValueError: the folder has no image with a caption.
    """

    def __init__(self, folder: str, name: str, split: str):
        self.name, self.split, self._folder = name, split, folder
        self._paths, self.dropped = _captioned_images(folder)
        warn_dropped(self)
        if not self._paths:
            images = self.dropped.get("no caption", 0)
            raise ValueError(
                f"{name} has {images} images and none with a caption; put KEY.txt beside KEY.jpg, or a metadata.csv "
                "with the columns file_name and text into the folder"
            )

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> Example:
        check_index(index, len(self))
        path = os.path.join(self._folder, self._paths[index])
        try:
            caption = Path(path).with_suffix(_CAPTION).read_bytes()
            return captions.example(Path(path).read_bytes(), [captions.text(caption)])
        except Exception as error:  # file systems raise any exception
            raise bad_record(self.describe(index), error) from error

    def describe(self, index: int) -> str:
        """Name a record by dataset, split, index and path."""
        return f"record {index} of {self.name}, split {self.split} ({self._paths[index]})"

    def source_name(self, index: int) -> str:
        """Name the dataset of a record."""
        return self.name


def _captioned_images(folder: str) -> tuple[Sequence[str], dict[str, int]]:
    """List the captioned images by relative path, and count the unpaired files."""
    result: list[str] = []
    dropped = collections.Counter({"no image": 0, "no caption": 0})
    for parent, _, names in os.walk(folder):
        captioned = {os.path.splitext(name)[0] for name in names if name.endswith(_CAPTION)}
        images = [name for name in names if _is_image(name)]
        relative = os.path.relpath(parent, folder)
        paired = [name for name in images if os.path.splitext(name)[0] in captioned]
        result += [os.path.normpath(os.path.join(relative, name)) for name in paired]
        dropped["no image"] += len(captioned - {os.path.splitext(name)[0] for name in paired})
        dropped["no caption"] += len(images) - len(paired)
    return sorted(result), dict(+dropped)


def _is_image(name: str) -> bool:
    return os.path.splitext(name)[1][1:].lower() in IMAGES and not name.startswith(".")
