"""Sources of benchmarks, in the layouts of clip_benchmark and Karpathy."""

from __future__ import annotations

import io
import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np

from infcl_jax.data import Classes, Example, Source, load_source
from infcl_jax.data.sources import captions, files, splits, tar_scan
from infcl_jax.data.sources.base import bad_record, check_index
from infcl_jax.data.sources.tar_index import TarIndex, load_index
from infcl_jax.evaluation.class_data import read_class_names, read_templates

SHARD_COUNT = "nshards.txt"

_TYPES = {"classification": ("cls",), "multilabel": ("npy",), "retrieval": ("txt", "json")}
_FOLDER_OPTION = re.compile(r"\?folder=(?P<folder>.+)$")


def load_benchmark(dataset: str, split: str, data_dir: str | Path) -> Source:
    """Open one split of a benchmark.

    Examples:
      >>> source = load_benchmark("photos", "train", "data")
      >>> len(source)
      8

    Args:
      dataset: one of:

        - a folder in the layout of clip_benchmark, see `WebdatasetSource`;
        - a JSON file of Karpathy's splits, see `KarpathySource`, with the folder of the images as
          "dataset_coco.json?folder=/images" if it is not that of the file;
        - a dataset of `infcl_jax.data.load_source`.
      split: name of the split.
      data_dir: directory of the prepared datasets.

    Raises:
      FileNotFoundError, ValueError, ImportError: see the sources.
    """
    folder = os.path.expanduser(dataset).rstrip("/")
    if files.is_file(f"{folder}/{split}/{SHARD_COUNT}"):
        return WebdatasetSource(folder, split)
    if files.is_file(f"{folder}/test/{SHARD_COUNT}"):
        raise FileNotFoundError(
            f"{folder} has no split {split!r}: expected {split}/{SHARD_COUNT}, as in its split test"
        )
    path = _FOLDER_OPTION.sub("", folder)
    if path.endswith(".json") and files.is_file(path):
        content = _read_json(path)
        if isinstance(content, dict) and "images" in content:
            option = _FOLDER_OPTION.search(folder)
            return KarpathySource(path, split, content["images"], option["folder"] if option else None)
    return load_source(dataset, split, data_dir)


class WebdatasetSource:
    """Benchmark in the webdataset layout of clip_benchmark.

    The folder has `<split>/nshards.txt`, the number of the tar files `<split>/0.tar`, `<split>/1.tar` and so on. A
    sample has an image (jpg, png, webp) and a label:

    | `dataset_type.txt` | label | further files |
    | --- | --- | --- |
    | none, or "classification" | `cls`, an integer | `classnames.txt`, `zeroshot_classification_templates.txt` |
    | "multilabel" | `npy`, bool or int [C] | the same |
    | "retrieval" | `txt`, one caption per line, or `json` | |

    Templates have "{c}" for the class name. Every sample must be complete, since a score over a part of a benchmark
    would be misleading.

    Args:
      folder: local path, or URL that fsspec reads.
      split: name of the split.

    Raises:
      FileNotFoundError: a shard is missing.
      ValueError: a file is damaged, or a sample has no image or label.
    """

    def __init__(self, folder: str, split: str):
        self.name, self.split, self._folder = folder, split, folder
        self.type = self._text("dataset_type.txt", default="classification").lower()
        if self.type not in _TYPES:
            raise ValueError(f"expected dataset_type.txt of {folder} to be one of {', '.join(_TYPES)}, got {self.type}")
        shards = self._text(f"{split}/{SHARD_COUNT}")
        if not shards.isdecimal() or int(shards) < 1:
            raise ValueError(f"expected a number of shards in {folder}/{split}/{SHARD_COUNT}, got {shards!r}")
        self._shards = [f"{folder}/{split}/{number}.tar" for number in range(int(shards))]
        self._index = self._complete_index(_TYPES[self.type])
        self._files = files.Files(self._index.shards)
        self.captioned = self.type == "retrieval"

    def __len__(self) -> int:
        return len(self._index.entries)

    def __getitem__(self, index: int) -> Example:
        check_index(index, len(self))
        try:
            shard, entry = self._index.locate(index)
            image = self._files.read(shard, int(entry["image_block"]) * tar_scan.BLOCK, int(entry["image_size"]))
            if self.type == "classification":
                label = int(self._member(self._index, index))
                return {"image": image, "caption": "", "captions": (), "label": label}
            if self.type == "multilabel":
                return {"image": image, "caption": "", "captions": (), "label": -1}
            text = captions.text(self._member(self._index, index))
            is_json = _TYPES[self.type][int(entry["caption_member"])] == "json"
            texts = captions.json_captions(json.loads(text)) if is_json else text.splitlines()
            return captions.example(image, [text.strip() for text in texts])
        except Exception as error:  # remote file systems raise any exception
            raise bad_record(self.describe(index), error) from error

    def describe(self, index: int) -> str:
        """Name a record by dataset, split, index and shard."""
        shard, _ = self._index.locate(index)
        return f"record {index} of {self.name}, split {self.split} ({files.name_of(self._shards[shard])})"

    def source_name(self, index: int) -> str:
        """Name the dataset of a record."""
        return self.name

    def classes(self) -> Classes:
        """Return the class names and templates of the layout.

        Raises:
          ValueError: the benchmark is one of retrieval, or a file is damaged.
          FileNotFoundError: a file is missing.
        """
        if self.type == "retrieval":
            raise ValueError(f"expected a dataset with classes, got {self.name}, whose type is retrieval")
        return Classes(
            read_class_names(f"{self._folder}/classnames.txt"),
            read_templates(f"{self._folder}/zeroshot_classification_templates.txt"),
        )

    def arrays(self) -> np.ndarray:
        """Read the `npy` member of every sample.

        It has the classes of a multi-label image, or metadata such as groups.

        Returns:
          [N, ...], in the order of the samples.

        Raises:
          ValueError: samples lack the member, or differ in shape.
        """
        index = self._index if self.type == "multilabel" else self._complete_index(("npy",))
        if not np.array_equal(index.entries["image_block"], self._index.entries["image_block"]):
            raise ValueError(f"expected an npy member in every sample of {self.name}, split {self.split}")
        rows = [np.load(io.BytesIO(self._member(index, row)), allow_pickle=False) for row in range(len(self))]
        return np.stack(rows)

    def _complete_index(self, members: tuple[str, ...]) -> TarIndex:
        index = load_index(self._shards, members, self.name)
        if index.problems or index.dropped or not len(index.entries):
            problem = index.problems[0] if index.problems else f"dropped {index.dropped}"
            raise ValueError(
                f"expected every sample of {self.name}, split {self.split}, to have an image and {' or '.join(members)}"
                f", got {problem}; fetch the dataset again"
            )
        return index

    def _member(self, index: TarIndex, row: int) -> bytes:
        shard, entry = index.locate(row)
        return self._files.read(shard, int(entry["caption_block"]) * tar_scan.BLOCK, int(entry["caption_size"]))

    def _text(self, name: str, default: str | None = None) -> str:
        path = f"{self._folder}/{name}"
        if files.is_file(path):
            return captions.text(files.read_file(path))
        if default is None:
            raise FileNotFoundError(f"{path} does not exist; it is part of the layout of clip_benchmark")
        return default


class KarpathySource:
    """Images and captions of Karpathy's splits of COCO and Flickr30k.

    The file `dataset_coco.json` or `dataset_flickr30k.json` has "images" with "filename", "split", "sentences" with
    "raw" texts and, for COCO, "filepath", the folder of the image (Karpathy & Fei-Fei 2015, arXiv:1412.2306).

    Args:
      path: JSON file.
      split: "train", "val", "test" or "restval".
      images: value of "images".
      folder: folder of the images; None: that of the JSON file.

    Raises:
      ValueError: the split is unknown, or an image lacks a field.
      FileNotFoundError: the first image does not exist.
    """

    def __init__(self, path: str, split: str, images: list[dict[str, Any]], folder: str | None = None):
        self.name, self.split = path, split
        folder = folder or path.rpartition("/")[0] or "."
        try:
            known = sorted({image["split"] for image in images})
            self._rows = [
                (
                    "/".join(filter(None, (folder, image.get("filepath"), image["filename"]))),
                    tuple(sentence["raw"].strip() for sentence in image["sentences"]),
                )
                for image in images
                if image["split"] in splits.aliases_of(split)
            ]
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"expected images with filename, split and sentences in {path}, got {error!r}") from error
        if not self._rows:
            raise ValueError(f"split of {path} must be one of {', '.join(known)}, got {split!r}")
        if not files.is_file(self._rows[0][0]):
            raise FileNotFoundError(
                f"{self._rows[0][0]} does not exist; name the folder of the images, {path}?folder=DIR"
            )

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Example:
        check_index(index, len(self))
        path, texts = self._rows[index]
        try:
            return captions.example(files.read_file(path), texts)
        except Exception as error:  # remote file systems raise any exception
            raise bad_record(self.describe(index), error) from error

    def describe(self, index: int) -> str:
        """Name a record by dataset, split, index and image file."""
        return f"record {index} of {self.name}, split {self.split} ({self._rows[index][0]})"

    def source_name(self, index: int) -> str:
        """Name the dataset of a record."""
        return self.name


def _read_json(path: str) -> Any:
    try:
        return json.loads(files.read_file(path))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
