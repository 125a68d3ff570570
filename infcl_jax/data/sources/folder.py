"""Folders of images with captions or with a subfolder per class."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from infcl_jax.data.sources import captions, files, paths
from infcl_jax.data.sources.base import Classes, Example, Source, bad_record, check_index, warn_dropped
from infcl_jax.data.sources.labels import CLASS_FILES, TEMPLATE_FILE, UNLABELED, label_values, prompts
from infcl_jax.data.sources.table import TableSource
from infcl_jax.data.sources.tar_scan import IMAGES

METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
_CAPTION = ".txt"


def folder_source(folder: str, name: str, split: str, options: Mapping[str, str] | None = None) -> Source:
    """Open a folder of images.

    With a `metadata.csv`, `metadata.jsonl` or `metadata.parquet` in the layout of Hugging Face's ImageFolder, the
    samples are the rows of that table. Otherwise they are the images with a `.txt` file of the same name, or without
    such files, the images in a subfolder per class.

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
    outside = paths.outside_option(options or {})
    others = {key: value for key, value in (options or {}).items() if key != paths.OUTSIDE}
    if others and others != {"caption": captions.NONE}:
        raise ValueError(
            f"expected no options for the folder {name} without {METADATA[0]}, or caption={captions.NONE}, got"
            f" {', '.join(others)}"
        )
    return FolderSource(folder, name, split, images_only=bool(others), outside=outside)


class FolderSource:
    """Images in a folder and its subfolders, with captions in `.txt` files.

    Samples are numbered in the order of the relative paths. The class of an image is its subfolder. Images without
    caption and caption files without image are dropped. Without any captioned image, the captions are prompts of the
    class, and images without class are dropped.

    Args:
      folder: path of the folder.
      name: name of the dataset.
      split: name of the split.
      images_only: whether the samples are all images, without captions and classes.
      outside: False: links to files outside the folder are bad records.

    Raises:
      ValueError: the folder has no image with a caption or class, or a class has no name.
    """

    def __init__(self, folder: str, name: str, split: str, *, images_only: bool = False, outside: bool | None = None):
        self.name, self.split, self._folder, self._images_only = name, split, folder, images_only
        self._outside = outside
        keys, images, unpaired = _list_images(folder)
        self.captioned = bool(keys) and not images_only
        if images_only:
            keys, unpaired = images, 0
        elif not self.captioned:
            keys = [key for key in images if _class_of(key)]
        self._keys = keys
        reason = "no caption" if self.captioned else "no class"
        counts = {"no image": unpaired, reason: len(images) - len(keys)}
        self.dropped = {reason: count for reason, count in counts.items() if count}
        warn_dropped(self)
        if not keys:
            raise ValueError(
                f"{name} has {len(images)} images and none with a caption; put KEY.txt beside KEY.jpg, a metadata.csv "
                "with the columns file_name and text into the folder, or the images of each class into a subfolder;"
                f" {name}?caption={captions.NONE} reads images alone"
            )
        self._labels: dict[str, int] = {}
        self._classes: Classes | str
        try:
            if images_only:
                raise ValueError(f"{name} was opened without classes; leave out caption={captions.NONE}")
            values = {value for key in keys if (value := _class_of(key))}
            if not values:
                raise ValueError(f"{name} has no classes; put the images of each class into a subfolder named after it")
            self._labels, self._classes = label_values(values, folder, name)
        except ValueError as error:
            if not (self.captioned or images_only):
                raise
            self._classes = str(error)  # training on captions does not need the labels

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, index: int) -> Example:
        check_index(index, len(self))
        key = self._keys[index]
        label = self._labels.get(_class_of(key), UNLABELED)
        try:
            image = self._read(key, files.LARGEST_IMAGE)
            if self._images_only:
                return captions.uncaptioned_example(image)
            if not self.captioned:
                return captions.example(image, prompts(self.classes(), label), label)
            caption = self._read(_stem(key) + _CAPTION, captions.LARGEST)
            return captions.example(image, [captions.text(caption)], label)
        except Exception as error:  # file systems raise any exception
            raise bad_record(self.describe(index), error) from error

    def _read(self, key: str, limit: int) -> bytes:
        path = os.path.join(self._folder, key)
        if self._outside is False:
            paths.check_inside(path, self._folder)
        return files.read_file(path, limit)

    def classes(self) -> Classes:
        """Return the classes of the subfolders.

        Raises:
          ValueError: there is no subfolder, or a class has no name.
        """
        if isinstance(self._classes, str):
            raise ValueError(self._classes)
        return self._classes

    def key(self, index: int) -> str:
        """Return the path of an image, relative to the folder."""
        return self._keys[index]

    def describe(self, index: int) -> str:
        """Name a record by dataset, split, index and path."""
        return f"record {index} of {self.name}, split {self.split} ({self.key(index)})"

    def shard(self, index: int) -> str:
        """Return the path of an image."""
        return self.key(index)

    def source_name(self, index: int) -> str:
        """Name the dataset of a record."""
        return self.name


def _class_of(path: str) -> str:
    """Return the class of a relative path, its first folder; "" without folder."""
    return path.partition(os.sep)[0] if os.sep in path else ""


def _list_images(folder: str) -> tuple[Sequence[str], Sequence[str], int]:
    """List captioned images and all images by relative path; count caption files without image."""
    captioned: list[str] = []
    images: list[str] = []
    unpaired = 0
    for parent, _, names in os.walk(folder):
        relative = os.path.relpath(parent, folder)
        stems = {_stem(name) for name in names if name.endswith(_CAPTION) and name not in (*CLASS_FILES, TEMPLATE_FILE)}
        paths = {os.path.normpath(os.path.join(relative, name)): _stem(name) for name in names if _is_image(name)}
        images += paths
        captioned += [path for path, stem in paths.items() if stem in stems]
        unpaired += len(stems.difference(paths.values()))
    return sorted(captioned), sorted(images), unpaired


def _stem(name: str) -> str:
    return os.path.splitext(name)[0]


def _is_image(name: str) -> bool:
    return os.path.splitext(name)[1][1:].lower() in IMAGES and not name.startswith(".")
