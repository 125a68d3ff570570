"""Tar files of images and captions, as webdataset and img2dataset write them."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from urllib.parse import urlencode

import numpy as np

from infcl_jax.data.sources import captions, files, tar_scan
from infcl_jax.data.sources.base import Classes, Example, bad_record, check_index, format_counts, warn_dropped
from infcl_jax.data.sources.labels import CLASS_FILES, UNLABELED, folder_classes, prompts, read_class_names
from infcl_jax.data.sources.tar_index import load_index
from infcl_jax.data.sources.tar_scan import Layout
from infcl_jax.runtime.file_io import parse_json

_CAPTIONS = ("txt", "json")
_LABELS = ("cls", "json")
_JSON_FIELD = re.compile(r"((?:.*?\.)?json)\.(.+)", re.IGNORECASE)  # value of the option "caption": EXTENSION.FIELD
_READ_BETWEEN = 2**16  # bytes; image and caption are read at once if at most this many bytes lie between them

_logger = logging.getLogger(__name__)


class TarSource:
    """Random access to the samples of tar files.

    A sample is the members whose names are equal up to the first dot of the last component: an image (jpg, jpeg, png,
    webp and others) and a caption (txt, or json with a `caption`), in any order. A blank txt, and a json whose captions
    are null, NaN or blank, is no caption. Samples without image or caption are dropped, as are members with further
    dots, such as "a.0.jpg", whose extension is "0.jpg". Samples are numbered in the order of the shards, and by their
    first member within a shard.

    With class names next to the shards (see `read_class_names`), samples also have the label of their cls member, or of
    `label` in their json. If no sample has a caption then, the captions are prompts of the class.

    Args:
      shards: tar files, local or remote.
      name: name of the dataset.
      split: name of the split.
      caption: extension of the caption member, such as "txt" or "outputs.txt", or "json.FIELD"; None: txt, then json;
        "none": the samples are all images, without captions and labels.
      image: extension of the image member, such as "input.jpg"; None: any known one.

    Raises:
      FileNotFoundError: a shard does not exist.
      ValueError: no sample has an image and a caption, or a shard is compressed.
    """

    def __init__(
        self, shards: Sequence[str], name: str, split: str, caption: str | None = None, image: str | None = None
    ):
        self.name, self.split = name, split
        self._options = {option: value for option, value in (("caption", caption), ("image", image)) if value}
        match = _JSON_FIELD.fullmatch(caption or "")
        extension, fields = (match[1], (match[2],)) if match else (caption, captions.JSON_FIELDS)
        self._images_only = caption == captions.NONE
        members = (extension.lower(),) if extension else _CAPTIONS
        self._layout = Layout(() if self._images_only else members, fields, image and image.lower())
        self._index = load_index(shards, self._layout, name)
        self._files = files.Files(self._index.shards)
        self._names = None if self._images_only else read_class_names(shards[0].rpartition("/")[0])
        self.captioned = not self._images_only
        if self._names is not None:
            self._classes = folder_classes(self._names.names, shards[0].rpartition("/")[0])
            # Scanned only where labels have a meaning. The scan of a training set without labels takes minutes.
            self._label_index = load_index(shards, Layout(_LABELS, (), self._layout.image), name)
            self.captioned = caption is not None or len(self._index.entries) > 0
            if not self.captioned:
                self._index = self._label_index
        for problem in self._index.problems:
            _logger.warning("%s", problem)
        if len(self) == 0:
            dropped = f"; dropped: {format_counts(self.dropped)}" if self.dropped else ""
            raise ValueError(
                f"{name} has no sample with an image and a caption ({' or '.join(members)})"
                + "".join(f"; {problem}" for problem in self._index.problems[:1])
                + (dropped + self._dotted_hint())
                + "; name samples KEY.jpg and KEY.txt, or give the caption member with ?caption=EXTENSION or"
                f" ?caption=json.FIELD, or put labels into KEY.cls and the class names into a {CLASS_FILES[0]} beside"
                f" the tar files; ?caption={captions.NONE} reads images alone"
            )
        warn_dropped(self, self._dotted_hint())

    @property
    def dropped(self) -> dict[str, int]:
        """Number of members or samples that are left out, by reason."""
        if self.captioned:
            return self._index.dropped
        return {"no label" if reason == "no caption" else reason: n for reason, n in self._index.dropped.items()}

    def __len__(self) -> int:
        return len(self._index.entries)

    def __getitem__(self, index: int) -> Example:
        check_index(index, len(self))
        try:
            return self._read(*self._index.locate(index))
        except Exception as error:  # remote file systems raise any exception
            raise bad_record(self.describe(index), error) from error

    def classes(self) -> Classes:
        """Return the classes of the class file.

        Raises:
          ValueError: there are no class names next to the shards, or there is no label.
        """
        if self._names is None:
            raise ValueError(
                f"{self.name} has no class names; put a {CLASS_FILES[0]} with one name per line beside the tar files,"
                " and the labels into KEY.cls"
            )
        if len(self._label_index.entries) == 0:
            raise ValueError(f"{self.name} has no labels; put them into KEY.cls, or into KEY.json as a label")
        return self._classes

    def _dotted_hint(self) -> str:
        """Tell how to use members whose names have further dots, if there are any."""
        name = self._index.dotted
        if name is None:
            return ""
        key, extension = tar_scan.split_name(name)
        option = "image" if extension.rpartition(".")[2] in tar_scan.IMAGES else "caption"
        options = urlencode({**self._options, option: extension}, safe=" ()")
        return (
            f"; the key of {name} ends at the first dot ({files.name_of(key)}), so its extension is {extension}:"
            f" rename such files, or choose them with ?{options}"
        )

    def _read_member(self, shard: int, entry: np.void, member: str) -> bytes:
        """Read the caption or label member of an entry, which has the given extension."""
        offset, size = int(entry["caption_block"]) * tar_scan.BLOCK, int(entry["caption_size"])
        return self._files.read(shard, offset, size, captions.largest(member.rpartition(".")[2]))

    def _label(self, shard: int, entry: np.void) -> int:
        """Read the label of the sample with the image of an entry."""
        if self._names is None:
            return UNLABELED
        start, stop = self._label_index.starts[shard : shard + 2].tolist()
        entries = self._label_index.entries[start:stop]
        matches = np.flatnonzero(entries["image_block"] == entry["image_block"])
        if len(matches) == 0:
            return UNLABELED
        labeled = entries[matches[0]]
        member = _LABELS[int(labeled["caption_member"])]
        data = self._read_member(shard, labeled, member)
        if member == "json":
            content = parse_json(data, "the label", object)
            value = content.get("label") if isinstance(content, dict) else None
            return UNLABELED if value is None else self._names.label(str(value))
        return self._names.label(captions.text(data))

    def _read(self, shard: int, entry: np.void) -> Example:
        label = self._label(shard, entry)
        if self._images_only:
            offset, size = int(entry["image_block"]) * tar_scan.BLOCK, int(entry["image_size"])
            return captions.uncaptioned_example(self._files.read(shard, offset, size))
        if not self.captioned:
            image = self._files.read(shard, int(entry["image_block"]) * tar_scan.BLOCK, int(entry["image_size"]))
            return captions.example(image, prompts(self.classes(), label), label)
        member = self._layout.captions[int(entry["caption_member"])].rpartition(".")[2]
        files.check_size(int(entry["image_size"]), files.LARGEST_IMAGE, "an image")
        files.check_size(int(entry["caption_size"]), captions.largest(member), "a caption")
        image_start, caption_start = (int(entry[key]) * tar_scan.BLOCK for key in ("image_block", "caption_block"))
        image_stop, caption_stop = image_start + int(entry["image_size"]), caption_start + int(entry["caption_size"])
        start, stop = min(image_start, caption_start), max(image_stop, caption_stop)
        gap = max(image_start, caption_start) - min(image_stop, caption_stop)
        if gap <= _READ_BETWEEN:
            data = self._files.read(shard, start, stop - start, 2 * files.LARGEST_IMAGE)
            image = data[image_start - start : image_stop - start]
            caption = data[caption_start - start : caption_stop - start]
        else:
            image = self._files.read(shard, image_start, image_stop - image_start)
            caption = self._files.read(shard, caption_start, caption_stop - caption_start)
        if member == "json":
            return captions.example(image, captions.json_captions(caption, self._layout.fields), label)
        return captions.example(image, [captions.text(caption)], label)

    def key(self, index: int) -> str:
        """Return the key of a sample, see `tar_scan.split_name`."""
        shard, entry = self._index.locate(index)
        header_bytes = (1 + int(entry["name_blocks"])) * tar_scan.BLOCK
        start = int(entry["image_block"]) * tar_scan.BLOCK - header_bytes

        def read(offset: int, size: int) -> bytes:
            return self._files.read(shard, start + offset, size)

        name, *_ = next(tar_scan.members(read, header_bytes + int(entry["image_size"]), []))
        return tar_scan.split_name(name)[0]

    def describe(self, index: int) -> str:
        """Name a record by dataset, split, index, shard and key."""
        try:
            key = self.key(index)
        except Exception:  # the reason why the record is bad is reported, not this one
            key = "?"
        return f"record {index} of {self.name}, split {self.split} ({self.shard(index)}, key {key})"

    def shard(self, index: int) -> str:
        """Name the tar file of a sample."""
        return files.name_of(self._index.shards[self._index.locate(index)[0]])

    def source_name(self, index: int) -> str:
        """Name the dataset of a record."""
        return self.name
