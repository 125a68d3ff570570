"""TFDS datasets in array_record format, the built-in shapes among them."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tensorflow_datasets as tfds

from infcl_jax.data import shapes
from infcl_jax.data.shapes_builder import Shapes
from infcl_jax.data.sources.base import (
    BadRecordError,
    Classes,
    Example,
    bad_record,
    check_index,
    check_split,
)
from infcl_jax.data.sources.builtin import DIGITS
from infcl_jax.data.sources.labels import PHOTO_TEMPLATES, prompts

BUILT_IN = (*(f"shapes/{config.name}" for config in Shapes.BUILDER_CONFIGS), DIGITS)


class RecordSource:
    """TFDS dataset in array_record format, read without TensorFlow.

    Its features must have an `image` (Image, or a uint8 tensor) and `caption` or `captions` (text, a sequence of texts,
    or a sequence of dicts with a `text`). Without them, captions are generated from a `label` (ClassLabel), one per
    template.

    Args:
      name: dataset name, with its config if it has one, such as "shapes/quickstart".
      split: split of the dataset, or a subset in TFDS syntax such as "train[:10%]".
      data_dir: directory of the prepared datasets.
    """

    def __init__(self, name: str, split: str, data_dir: str | Path):
        builder = open_builder(name, data_dir)
        check_split(name, split.split("[")[0], tuple(builder.info.splits))
        self.name, self.split, self._data_dir = name, split, data_dir
        features = builder.info.features
        self._features = ", ".join(features)
        if "image" not in features:
            raise ValueError(f"{name} must have an image feature, got features {self._features}")
        self._classes = _classes(name, features)
        self._caption_key = next((key for key in ("caption", "captions") if key in features), None)
        self.captioned = self._caption_key is not None
        if not self.captioned and self._classes is None:
            raise ValueError(
                f"{name} must have a caption, captions or label (ClassLabel) feature, got features {self._features}"
            )
        if "array_record" not in str(builder.info.file_format).lower():
            raise ValueError(
                f"{name} in {data_dir} must be prepared as array_record, got {builder.info.file_format}; "
                'prepare it with file_format="array_record"'
            )
        # Images stay encoded: decoding is a later stage, and TFDS uses OpenCV or PIL depending on what is installed.
        is_encoded = isinstance(features["image"], tfds.features.Image)
        decoders = {"image": tfds.decode.SkipDecoding()} if is_encoded else None
        self._records = builder.as_data_source(split, decoders=decoders)

    def __reduce__(self) -> tuple[type["RecordSource"], tuple[str, str, str | Path]]:
        return RecordSource, (self.name, self.split, self._data_dir)

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> Example:
        check_index(index, len(self))
        try:
            return self._example(self._records[index])
        except Exception as error:  # record readers and protobuf raise any exception
            raise self._bad(f"record {index}", error) from error

    def __getitems__(self, indices: Sequence[int]) -> list[Example]:
        try:
            return [self._example(record) for record in self._records.__getitems__(list(indices))]
        except Exception as error:
            raise self._bad(f"record among {min(indices)} to {max(indices)}", error) from error

    def classes(self) -> Classes:
        """Return the classes of the `label` feature; raise `ValueError` without any."""
        if self._classes is None:
            raise ValueError(
                f"expected {self.name} to have a label (ClassLabel) feature for its classes, got features"
                f" {self._features}"
            )
        return self._classes

    def _bad(self, which: str, error: Exception) -> BadRecordError:
        return bad_record(f"{which} of {self.name}, split {self.split}", error)

    def _example(self, record: dict[str, Any]) -> Example:
        label = int(record["label"]) if self._classes else -1
        captions = _texts(record[self._caption_key]) if self._caption_key else prompts(self.classes(), label)
        if not captions:
            raise ValueError("no captions")
        return {"image": record["image"], "caption": captions[0], "captions": captions, "label": label}


def _texts(value: Any) -> tuple[str, ...]:
    """Flatten a text, a sequence of texts, or dicts with texts."""
    if isinstance(value, dict):
        return _texts(value["text"])
    if isinstance(value, bytes):
        return (value.decode("utf-8"),)
    return tuple(text for item in value for text in _texts(item))


def _classes(name: str, features: tfds.features.FeaturesDict) -> Classes | None:
    """Get the classes of a TFDS dataset, or None without a `label`."""
    if "label" not in features or not isinstance(features["label"], tfds.features.ClassLabel):
        return None
    if name.split("/")[0] == Shapes.name:
        return Classes(shapes.CLASS_NAMES, shapes.TEMPLATES)
    return Classes(tuple(label.replace("_", " ") for label in features["label"].names), PHOTO_TEMPLATES)


def dataset_dir(name: str, data_dir: str | Path) -> Path | None:
    """Find the newest complete version of a prepared TFDS dataset, `data_dir/name/version`; None without any."""
    versions = [
        path
        for path in (Path(data_dir) / name).glob("*.*.*")
        if re.fullmatch(r"\d+\.\d+\.\d+", path.name) and (path / "dataset_info.json").is_file()
    ]
    return max(versions, key=lambda path: tuple(int(number) for number in path.name.split(".")), default=None)


def check_name(name: str) -> None:
    """Check that a dataset name is built in, or in the TFDS catalog, with its config if it has one."""
    catalog = set(tfds.list_builders(with_community_datasets=False)) - {Shapes.name}
    if name not in BUILT_IN and name.split("/")[0] not in catalog:
        raise ValueError(
            f"dataset must be one of {', '.join(BUILT_IN)}, a name of the TFDS catalog such as coco_captions/2014, or"
            f" the path of tar files, tables, a folder or a mixture, got {name!r}"
        )


def open_builder(name: str, data_dir: str | Path) -> tfds.core.DatasetBuilder:
    """Open the newest prepared version of a TFDS dataset."""
    directory = dataset_dir(name, data_dir)
    if directory is None:
        check_name(name)
        raise FileNotFoundError(
            f"{name} is not prepared in {Path(data_dir) / name}; run "
            f"`python -m experiments.prepare_data --dataset={name} --data_dir={data_dir}`"
        )
    return tfds.builder_from_directory(directory)
