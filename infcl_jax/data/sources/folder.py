"""Folders of images with captions or with a subfolder per class."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path

from infcl_jax.data.sources import captions, files, paths
from infcl_jax.data.sources.annotations import check_not_saved_to_disk
from infcl_jax.data.sources.base import Classes, Source
from infcl_jax.data.sources.file_source import FileSource
from infcl_jax.data.sources.folder_listing import CAPTION, check_no_others, class_of, list_folder, stem
from infcl_jax.data.sources.labels import UNLABELED, label_values
from infcl_jax.data.sources.table import TableSource

METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")

_logger = logging.getLogger(__name__)


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


class FolderSource(FileSource):
    """Images in a folder and its subfolders, with captions in `.txt` files.

    Samples are numbered in the order of the relative paths. The class of an image is its subfolder. Images without
    caption or with a blank one, and caption files without image, are dropped. Without any captioned image, the captions
    are prompts of the class, and images without class are dropped. Hidden files and folders are left out, and links to
    folders are followed, see `list_folder`. A folder that several paths lead to counts once, or
    once in each class.

    Args:
      folder: path of the folder.
      name: name of the dataset.
      split: name of the split.
      images_only: whether the samples are all images, without captions and classes.
      outside: None: links to folders outside are followed, with a warning. False: they are not, and links to files
        outside are bad records. True: they are followed.

    Raises:
      ValueError: the folder has no image with a caption or class, it has compressed tar files or annotations of other
        tools instead, or a class has no name.
    """

    def __init__(self, folder: str, name: str, split: str, *, images_only: bool = False, outside: bool | None = None):
        self.name, self.split, self._folder, self.images_only = name, split, folder, images_only
        self._outside = outside
        listing = list_folder(folder, follow_outside=outside is not False)
        keys, images, unpaired, repeated = listing.captioned, listing.images, listing.unpaired, len(listing.repeated)
        self.captioned = bool(keys) and not images_only
        if images_only:
            keys, unpaired = images, 0
        elif not self.captioned:
            check_no_others(folder, listing)
            images, repeated = sorted([*images, *listing.repeated]), 0
            keys = [key for key in images if class_of(key)]
        self._keys, self._renamed = keys, listing.renamed
        reason = "no caption" if self.captioned else "no class"
        links = len(listing.outside)
        counts = {
            "no image": unpaired,
            reason: len(images) - len(keys),
            "linked again": repeated,
            "link outside": links * (outside is False),
        }
        if links and outside is None:
            _logger.warning(
                "%s: %d links to folders outside %s, the first is %r; ?%s=false leaves them out",
                name, links, folder, listing.outside[0], paths.OUTSIDE,
            )  # fmt: skip
        self.dropped = {reason: count for reason, count in counts.items() if count}
        self._warn_dropped()
        if not keys:
            check_not_saved_to_disk(folder)
            left_out = f" ({links} links outside are left out)" if links and outside is False else ""
            raise ValueError(
                f"{name} has {len(images)} images and none with a caption{left_out}; put KEY.txt beside KEY.jpg, a"
                " metadata.csv with the columns file_name and text into the folder, or the images of each class into a"
                f" subfolder; {name}{'?' if outside is None else '&'}caption={captions.NONE} reads images alone"
            )
        self._labels: dict[str, int] = {}
        self._find_classes(self._label_folders)

    def _label_folders(self) -> Classes:
        values = {value for key in self._keys if (value := class_of(key))}
        if not values:
            raise ValueError(
                f"{self.name} has no classes; put the images of each class into a subfolder named after it"
            )
        self._labels, result = label_values(values, self._folder, self.name)
        return result

    def __len__(self) -> int:
        return len(self._keys)

    def _read(self, index: int) -> tuple[bytes, list[str] | None, int]:
        key, texts = self._keys[index], None
        image = self._read_file(key, files.LARGEST_IMAGE)
        if self.captioned:
            caption = self._read_file(self._renamed.get(key, stem(key) + CAPTION), captions.LARGEST)
            texts = [captions.text(caption)]
        return image, texts, self._labels.get(class_of(key), UNLABELED)

    def _read_file(self, key: str, limit: int) -> bytes:
        path = os.path.join(self._folder, key)
        if self._outside is False:
            paths.check_inside(path, self._folder)
        return files.read_file(path, limit)

    def key(self, index: int) -> str:
        """Return the path of an image, relative to the folder."""
        return self._keys[index]

    def shard(self, index: int) -> str:
        """Return the path of an image."""
        return self.key(index)

    _place = key
