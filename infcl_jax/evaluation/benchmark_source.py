"""Sources of benchmarks, in the layouts of clip_benchmark and Karpathy."""

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from infcl_jax.data import Classes, Source, load_source
from infcl_jax.data.sources import captions, files, paths, splits, tar_scan
from infcl_jax.data.sources.file_source import FileSource
from infcl_jax.data.sources.labels import class_templates
from infcl_jax.data.sources.tar_index import TarIndex, load_index
from infcl_jax.evaluation.class_data import read_class_names, read_templates

SHARD_COUNT = "nshards.txt"

_TYPES = {"classification": ("cls",), "multilabel": ("npy",), "retrieval": ("txt", "json")}
_TEMPLATES = "zeroshot_classification_templates"
_MAX_SHARDS = 2**20


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
          "dataset_coco.json?folder=/images" if it is not that of the file, and with the option "outside" of tables;
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
    path, options = paths.split_options(folder)
    images = karpathy_images(path)
    if images is None:
        return load_source(dataset, split, data_dir)
    if set(options) - {"folder", paths.OUTSIDE}:
        raise ValueError(f"expected the options folder, {paths.OUTSIDE} of {path}, got {', '.join(options)}")
    return KarpathySource(path, split, images, options.get("folder"), paths.outside_option(options))


def karpathy_images(path: str) -> Any:
    """Return the field "images" of a JSON file of Karpathy's splits; None for any other path."""
    if not (path.endswith(".json") and files.is_file(path)):
        return None
    content = files.read_json(path, object)
    if isinstance(content, dict) and "annotations" in content:
        captions.check_no_annotations(content, path)
    return content.get("images") if isinstance(content, dict) else None


class WebdatasetSource(FileSource):
    """Benchmark in the webdataset layout of clip_benchmark.

    The folder has `<split>/nshards.txt`, the number of the tar files `<split>/0.tar`, `<split>/1.tar` and so on. A
    sample has an image (jpg, png, webp) and a label:

    | `dataset_type.txt` | label | further files |
    | --- | --- | --- |
    | none, or "classification" | `cls`, an integer | `classnames.txt`, `zeroshot_classification_templates.txt` |
    | "multilabel" | `npy`, bool or int [C] | the same |
    | "retrieval" | `txt`, one caption per line, or `json` | |

    Templates have "{c}" for the class name. Prompts of each class can be in `zeroshot_classification_templates.json`,
    see `infcl_jax.evaluation.read_templates`. Every sample must be complete, since a score over a part of a benchmark
    would be misleading. The folder is a local path, or a URL that fsspec reads.

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
        if not shards.isdecimal() or len(shards) > 9 or not 1 <= int(shards) <= _MAX_SHARDS:
            raise ValueError(f"expected a number of shards in {folder}/{split}/{SHARD_COUNT}, got {shards[:40]!r}")
        self._shards = [f"{folder}/{split}/{number}.tar" for number in range(int(shards))]
        self.captioned = self.type == "retrieval"
        self.images_only = not self.captioned
        self._index = self._complete_index(_TYPES[self.type])

    def __len__(self) -> int:
        return len(self._index)

    def _read(self, index: int) -> tuple[bytes, list[str], int]:
        image, texts, label = self._index.image(index), [], -1
        if self.type == "classification":
            label = int(self._index.caption(index, captions.LARGEST_JSON)[1])
        elif self.type == "retrieval":
            extension, data = self._index.caption(index, captions.LARGEST_JSON)
            texts = captions.json_captions(data) if extension == "json" else captions.text(data).splitlines()
        return image, [text.strip() for text in texts], label

    def _place(self, index: int) -> str:
        return files.name_of(self._shards[self._index.locate(index)[0]])

    def classes(self) -> Classes:
        """Return the class names and templates of the layout."""
        if self.type == "retrieval":
            raise ValueError(f"expected a dataset with classes, got {self.name}, whose type is retrieval")
        names = read_class_names(f"{self._folder}/classnames.txt")
        prompts_file = f"{self._folder}/{_TEMPLATES}.json"
        path = prompts_file if files.is_file(prompts_file) else f"{self._folder}/{_TEMPLATES}.txt"
        return Classes(names, class_templates(read_templates(path), names, path))

    def arrays(self) -> np.ndarray:
        """Read the `npy` members, [N, ...]: classes of a multi-label image, or metadata such as groups.

        Raises:
          ValueError: samples lack the member, or differ in shape.
        """
        index = self._index if self.type == "multilabel" else self._complete_index(("npy",))
        if not np.array_equal(index.entries["image_block"], self._index.entries["image_block"]):
            raise ValueError(f"expected an npy member in every sample of {self.name}, split {self.split}")
        arrays = []
        for row in range(len(self)):
            try:
                _, data = index.caption(row, captions.LARGEST_JSON)
                arrays.append(np.lib.format.read_array(io.BytesIO(data), allow_pickle=False))
            except Exception as error:  # of damaged headers, up to MemoryError
                raise ValueError(f"{self.describe(row)}: expected an array, got {error}") from error
        return np.stack(arrays)

    def _complete_index(self, members: tuple[str, ...]) -> TarIndex:
        fields = captions.JSON_FIELDS if "json" in members else ()
        index = load_index(self._shards, tar_scan.Layout(members, fields), self.name)
        dropped = {reason: count for reason, count in index.dropped.items() if reason != tar_scan.DOTTED}
        if index.problems or dropped or not len(index):
            problem = index.problems[0] if index.problems else f"dropped {dropped}"
            raise ValueError(
                f"expected every sample of {self.name}, split {self.split}, to have an image and {' or '.join(members)}"
                f", got {problem}; fetch the dataset again"
            )
        return index

    def _text(self, name: str, default: str | None = None) -> str:
        path = f"{self._folder}/{name}"
        if files.is_file(path):
            return captions.text(files.read_file(path, captions.LARGEST))
        if default is None:
            raise FileNotFoundError(f"{path} does not exist; it is part of the layout of clip_benchmark")
        return default


class KarpathySource(FileSource):
    """Images and captions of Karpathy's splits of COCO and Flickr30k.

    The file `dataset_coco.json` or `dataset_flickr30k.json` has "images" with "filename", "split", "sentences" with
    "raw" texts and, for COCO, "filepath", the folder of the image (Karpathy & Fei-Fei 2015, arXiv:1412.2306). Without
    a folder, the images are beside the JSON file. For `outside`, see `paths.resolve`.

    Raises:
      ValueError: the split is unknown, an image lacks a field, or paths leave the folder and must not.
      FileNotFoundError: the first image does not exist.
    """

    def __init__(self, path: str, split: str, images: list[dict[str, Any]], folder: str | None, outside: bool | None):
        self.name, self.split, self._outside = path, split, outside
        self._folder = folder or path.rpartition("/")[0] or "."
        self._classes = f"expected a dataset with classes, got {path}"
        try:
            known = sorted({str(image["split"]) for image in images})
            chosen = [image for image in images if image["split"] in splits.aliases_of(split)]
            keys = ["/".join(filter(None, (image.get("filepath"), image["filename"]))) for image in chosen]
            texts = [tuple(sentence["raw"].strip() for sentence in image["sentences"]) for image in chosen]
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"expected images with filename, split and sentences in {path}, got {error!r}") from error
        self._rows = list(zip(keys, texts, strict=True))
        if not keys:
            raise ValueError(f"split of {path} must be one of {', '.join(known)}, got {split!r}")
        first = paths.resolve(keys[0], self._folder, outside)
        if not files.is_file(first):
            raise FileNotFoundError(f"{first} does not exist; name the folder of the images, {path}?folder=DIR")
        if outside is not True:
            paths.report_outside(path, [paths.column(keys)], self._folder, refuse=outside is False)

    def __len__(self) -> int:
        return len(self._rows)

    def _read(self, index: int) -> tuple[bytes, Sequence[str], int]:
        key, texts = self._rows[index]
        path = paths.resolve(key, self._folder, self._outside)
        return files.read_file(path, files.LARGEST_IMAGE), texts, -1

    def _place(self, index: int) -> str:
        return self._rows[index][0]
