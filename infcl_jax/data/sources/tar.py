"""Tar files of images and captions, as webdataset and img2dataset write them."""

import logging
import re
from collections.abc import Sequence
from urllib.parse import urlencode

import numpy as np

from infcl_jax.data.sources import captions, files, tar_scan
from infcl_jax.data.sources.base import Classes, format_counts
from infcl_jax.data.sources.file_source import FileSource
from infcl_jax.data.sources.labels import CLASS_FILES, UNLABELED, folder_classes, read_class_names
from infcl_jax.data.sources.tar_index import load_index
from infcl_jax.data.sources.tar_scan import Layout
from infcl_jax.runtime.file_io import parse_json

_CAPTIONS = ("txt", "json")
_LABELS = ("cls", "json")
_JSON_FIELD = re.compile(r"((?:.*?\.)?json)\.(.+)", re.IGNORECASE)  # value of the option "caption": EXTENSION.FIELD

_logger = logging.getLogger(__name__)


class TarSource(FileSource):
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
      caption: extension of the caption member, such as "txt" or "outputs.txt", or "json.FIELD"; None: txt, then json;
        "none": the samples are all images, without captions and labels.
      image: extension of the image member, such as "input.jpg"; None: any known one.
    """

    def __init__(
        self, shards: Sequence[str], name: str, split: str, caption: str | None = None, image: str | None = None
    ):
        self.name, self.split = name, split
        self._options = {option: value for option, value in (("caption", caption), ("image", image)) if value}
        match = _JSON_FIELD.fullmatch(caption or "")
        extension, fields = (match[1], (match[2],)) if match else (caption, captions.JSON_FIELDS)
        self.images_only = caption == captions.NONE
        members = (extension.lower(),) if extension else _CAPTIONS
        self._layout = Layout(() if self.images_only else members, fields, image and image.lower())
        self._index = load_index(shards, self._layout, name)
        self.captioned = not self.images_only
        folder = shards[0].rpartition("/")[0]
        self._names = None if self.images_only else read_class_names(folder)
        self._classes: Classes | str = (
            f"{name} has no class names; put a {CLASS_FILES[0]} with one name per line beside the tar files, and the"
            " labels into KEY.cls"
        )
        if self._names is not None:
            self._classes = folder_classes(self._names.names, folder)
            # Scanned only where labels have a meaning. The scan of a training set without labels takes minutes.
            self._label_index = load_index(shards, Layout(_LABELS, (), self._layout.image), name)
            self.captioned = caption is not None or len(self._index) > 0
            if not self.captioned:
                self._index = self._label_index
            if not len(self._label_index):
                self._classes = f"{name} has no labels; put them into KEY.cls, or into KEY.json as a label"
        self.dropped = self._index.dropped
        if not self.captioned:
            self.dropped = {"no label" if why == "no caption" else why: n for why, n in self.dropped.items()}
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
        self._warn_dropped(self._dotted_hint())

    def __len__(self) -> int:
        return len(self._index)

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

    def _label(self, index: int) -> int:
        """Read the label of the sample with the image of a sample."""
        if self._names is None:
            return UNLABELED
        shard, entry = self._index.locate(index)
        start, stop = self._label_index.starts[shard : shard + 2].tolist()
        images = self._label_index.entries["image_block"][start:stop]
        matches = np.flatnonzero(images == entry["image_block"])
        if len(matches) == 0:
            return UNLABELED
        extension, data = self._label_index.caption(start + int(matches[0]))
        if extension != "json":
            return self._names.label(captions.text(data))
        content = parse_json(data, "the label", object)
        value = content.get("label") if isinstance(content, dict) else None
        return UNLABELED if value is None else self._names.label(str(value))

    def _read(self, index: int) -> tuple[bytes, list[str] | None, int]:
        label = self._label(index)
        if self.images_only or not self.captioned:
            return self._index.image(index), None, label
        image, extension, data = self._index.image_and_caption(index)
        is_json = extension == "json"
        return image, captions.json_captions(data, self._layout.fields) if is_json else [captions.text(data)], label

    def key(self, index: int) -> str:
        """Return the key of a sample, see `tar_scan.split_name`."""
        return tar_scan.split_name(self._index.name(index))[0]

    def _place(self, index: int) -> str:
        try:
            key = self.key(index)
        except Exception:  # the reason why the record is bad is reported, not this one
            key = "?"
        return f"{self.shard(index)}, key {key}"

    def shard(self, index: int) -> str:
        """Name the tar file of a sample."""
        return files.name_of(self._index.files.paths[self._index.locate(index)[0]])
