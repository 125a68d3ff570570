"""Named random-access sources of captioned images: the built-in shapes, real digits, and TFDS datasets on disk."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypedDict, runtime_checkable

import numpy as np
import tensorflow_datasets as tfds
from PIL import Image

from infcl_jax.data import shapes
from infcl_jax.data.shapes_builder import Shapes

DIGITS = "digits"
BUILT_IN = (*(f"shapes/{config.name}" for config in Shapes.BUILDER_CONFIGS), DIGITS)

_PHOTO_TEMPLATES = (
    "a photo of a {}",
    "a picture of a {}",
    "an image of one {}",
    "a close view of the {}",
    "a {} in a photo",
    "the {}",
)
_DIGIT_NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_DIGIT_TEMPLATES = (
    "a handwritten {}",
    "the digit {}",
    "the number {} written by hand",
    "a scan of the number {}",
    "a small picture of the digit {}",
)
_DIGIT_SPLITS = ("train", "validation", "zero_shot")
_DIGIT_SIZE = 32


class Example(TypedDict):
    """One captioned image.

    `image` is uint8 [H, W, 3]; `captions` all its captions, at least one, of which `caption` is the one for evaluation;
    `label` the class index, -1 when there is none.
    """

    image: np.ndarray
    caption: str
    captions: tuple[str, ...]
    label: int


class Source(Protocol):
    """Random access to the examples of one split. Picklable, since worker processes read it too."""

    name: str
    split: str

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Example:
        """Raises `BadRecordError` where the record cannot be decoded."""
        ...


@runtime_checkable
class BatchedSource(Source, Protocol):
    """A source for which reading several examples at once is cheaper."""

    def __getitems__(self, indices: Sequence[int]) -> list[Example]:
        """Raises `BadRecordError` where any record cannot be read or decoded."""
        ...


class Classes(NamedTuple):
    """Class names in the order of the labels, and prompt templates with one `{}` for the class name."""

    names: tuple[str, ...]
    templates: tuple[str, ...]


class BadRecordError(ValueError):
    """A record that cannot be read or decoded; the message names the dataset, the split and the index."""


class DigitsSource:
    """Scikit-learn's 1797 handwritten digits (UCI, 8 x 8 pixels), at 32 x 32, with generated captions.

    The split is stratified and fixed: 70 % train, 15 % validation, 15 % zero_shot of every class.

    Raises:
      ValueError: the split is unknown.
      ImportError: scikit-learn is not installed.
    """

    name = DIGITS

    def __init__(self, split: str):
        _check_split(self.name, split, _DIGIT_SPLITS)
        try:
            from sklearn.datasets import load_digits
        except ImportError as error:
            raise ImportError("the digits dataset needs scikit-learn: pip install scikit-learn") from error
        self.split = split
        digits = load_digits()
        rows = _stratified_rows(digits.target, split)
        gray = np.rint(digits.images[rows] * (255 / 16)).astype(np.uint8)
        size = (_DIGIT_SIZE, _DIGIT_SIZE)
        resized = [Image.fromarray(image).resize(size, Image.Resampling.BICUBIC) for image in gray]
        self._images = np.stack([np.asarray(image) for image in resized])
        self._labels = digits.target[rows]

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> Example:
        label = int(self._labels[index])
        words = (_DIGIT_NAMES[label], str(label))
        captions = tuple(template.format(word) for template in _DIGIT_TEMPLATES for word in words)
        image = np.repeat(self._images[index][..., None], 3, axis=2)
        # Evaluation captions take turns over the forms, so that all of them are evaluated.
        return {"image": image, "caption": captions[index % len(captions)], "captions": captions, "label": label}


def _stratified_rows(labels: np.ndarray, split: str) -> np.ndarray:
    shuffled = np.random.Generator(np.random.Philox(key=0)).permutation(len(labels))
    rows = []
    for label in range(len(_DIGIT_NAMES)):
        members = shuffled[labels[shuffled] == label]
        bounds = [round(len(members) * fraction) for fraction in (0.70, 0.85)]
        rows.append(np.split(members, bounds)[_DIGIT_SPLITS.index(split)])
    return np.sort(np.concatenate(rows))


class RecordSource:
    """A TFDS dataset on disk, prepared as array_record and read without TensorFlow.

    Its features must have an `image` (Image, or a uint8 tensor) and `caption` or `captions` (text, a sequence of texts,
    or a sequence of dicts with a `text`). Without captions, a `label` (ClassLabel) makes them: one per template.

    Args:
      name: dataset name, with its config where there is one: "shapes/quickstart".
      split: a split of the dataset, or a part of one in TFDS syntax: "train[:10%]".
      data_dir: the folder that holds the datasets.

    Raises:
      FileNotFoundError: the dataset is not prepared in `data_dir`.
      ValueError: unknown name or split, another file format, or features without image or captions.
    """

    def __init__(self, name: str, split: str, data_dir: str | Path):
        builder = _builder(name, data_dir)
        _check_split(name, split.split("[")[0], tuple(builder.info.splits))
        self.name, self.split, self._data_dir = name, split, data_dir
        self._caption_key = _caption_key(name, builder.info.features)
        self._classes = _record_classes(name, builder.info.features)
        if "array_record" not in str(builder.info.file_format).lower():
            raise ValueError(
                f"{name} in {data_dir} must be prepared as array_record, got {builder.info.file_format}; "
                'prepare it with file_format="array_record"'
            )
        # Images are decoded here: TFDS would decode them with whichever of OpenCV and PIL it finds.
        is_encoded = isinstance(builder.info.features["image"], tfds.features.Image)
        decoders = {"image": tfds.decode.SkipDecoding()} if is_encoded else None
        self._records = builder.as_data_source(split, decoders=decoders)

    def __reduce__(self) -> tuple[type[RecordSource], tuple[str, str, str | Path]]:
        return RecordSource, (self.name, self.split, self._data_dir)

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> Example:
        if not 0 <= index < len(self):
            raise IndexError(f"index must be in [0, {len(self)}), got {index}")
        try:
            return self._example(self._records[index])
        except Exception as error:  # record readers, protobuf and image decoders raise anything
            raise self._bad(f"record {index}", error) from error

    def __getitems__(self, indices: Sequence[int]) -> list[Example]:
        try:
            return [self._example(record) for record in self._records.__getitems__(list(indices))]
        except Exception as error:
            raise self._bad(f"record among {min(indices)} to {max(indices)}", error) from error

    def _bad(self, which: str, error: Exception) -> BadRecordError:
        reason = " ".join(str(error).split())[:200]
        return BadRecordError(f"bad {which} of {self.name}, split {self.split}: {type(error).__name__}: {reason}")

    def _example(self, record: dict[str, Any]) -> Example:
        label = int(record["label"]) if self._classes else -1
        if self._caption_key:
            captions = _texts(record[self._caption_key])
        else:
            assert self._classes is not None
            captions = tuple(template.format(self._classes.names[label]) for template in self._classes.templates)
        if not captions:
            raise ValueError("no captions")
        image = _decode(record["image"])
        return {"image": image, "caption": captions[0], "captions": captions, "label": label}


def _decode(image: bytes | np.ndarray) -> np.ndarray:
    if isinstance(image, bytes):
        with Image.open(io.BytesIO(image)) as decoded:
            return np.asarray(decoded if decoded.mode == "RGB" else decoded.convert("RGB"))
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] not in (1, 3):
        raise ValueError(f"expected a uint8 image with 1 or 3 channels, got {image.dtype} {list(image.shape)}")
    return np.repeat(image, 3, axis=2) if image.shape[2] == 1 else image


def _texts(value: Any) -> tuple[str, ...]:
    """Flattens what TFDS makes of a text, a sequence of texts, or a sequence of dicts with a text."""
    if isinstance(value, dict):
        return _texts(value["text"])
    if isinstance(value, bytes):
        return (value.decode("utf-8"),)
    return tuple(text for item in value for text in _texts(item))


def _caption_key(name: str, features: tfds.features.FeaturesDict) -> str | None:
    if "image" not in features:
        raise ValueError(f"{name} must have an image feature, got features {', '.join(features)}")
    for key in ("caption", "captions"):
        if key in features:
            return key
    if _record_classes(name, features) is None:
        raise ValueError(
            f"{name} must have a caption, captions or label (ClassLabel) feature, got features {', '.join(features)}"
        )
    return None


def _record_classes(name: str, features: tfds.features.FeaturesDict) -> Classes | None:
    if "label" not in features or not isinstance(features["label"], tfds.features.ClassLabel):
        return None
    if name.split("/")[0] == Shapes.name:
        return Classes(shapes.CLASS_NAMES, shapes.TEMPLATES)
    return Classes(tuple(label.replace("_", " ") for label in features["label"].names), _PHOTO_TEMPLATES)


def _check_split(name: str, split: str, known: Sequence[str]) -> None:
    if split not in known:
        raise ValueError(f"split of {name} must be one of {', '.join(known)}, got {split!r}")


def dataset_dir(name: str, data_dir: str | Path) -> Path | None:
    """The folder of a prepared TFDS dataset's newest version.

    Args:
      name: dataset name, with its config where there is one.
      data_dir: the folder that holds the datasets.

    Returns:
      `data_dir/name/version`, or None where no complete version is there.
    """
    versions = [
        path
        for path in (Path(data_dir) / name).glob("*.*.*")
        if re.fullmatch(r"\d+\.\d+\.\d+", path.name) and (path / "dataset_info.json").is_file()
    ]
    return max(versions, key=lambda path: tuple(int(part) for part in path.name.split(".")), default=None)


def check_name(name: str) -> None:
    """Checks that a dataset is one that can be prepared.

    Args:
      name: a built-in dataset, or a dataset of the TFDS catalogue with its config where there is one.

    Raises:
      ValueError: it is not.
    """
    catalogue = set(tfds.list_builders(with_community_datasets=False)) - {Shapes.name}
    if name not in BUILT_IN and name.split("/")[0] not in catalogue:
        raise ValueError(
            f"dataset must be one of {', '.join(BUILT_IN)}, or a name of the TFDS catalogue such as coco_captions/2014,"
            f" got {name!r}"
        )


def _builder(name: str, data_dir: str | Path) -> tfds.core.DatasetBuilder:
    directory = dataset_dir(name, data_dir)
    if directory is None:
        check_name(name)
        raise FileNotFoundError(
            f"{name} is not prepared in {Path(data_dir) / name}; run "
            f"`python -m experiments.prepare_data --dataset={name} --data_dir={data_dir}`"
        )
    return tfds.builder_from_directory(directory)


def load_source(name: str, split: str, data_dir: str | Path = "data") -> Source:
    """Opens one split of a dataset.

    Args:
      name: "shapes/quickstart", "shapes/full", "digits", or any TFDS dataset on disk (see `RecordSource`).
      split: "train", "validation" or "zero_shot" for the built-in datasets.
      data_dir: the folder that holds the prepared datasets; "digits" needs none.

    Returns:
      A `Source`.

    Raises:
      FileNotFoundError: the dataset is not prepared; the message has the command that does it.
      ValueError: unknown name or split, or a dataset without images or captions.
      ImportError: "digits" without scikit-learn.
    """
    return DigitsSource(split) if name == DIGITS else RecordSource(name, split, data_dir)


def classes(name: str, data_dir: str | Path = "data") -> Classes | None:
    """The classes of a dataset, for zero-shot classification.

    Args:
      name: see `load_source`.
      data_dir: the folder that holds the prepared datasets; the built-in datasets need none.

    Returns:
      `Classes` (class names in the order of the labels, prompt templates), or None where the dataset has no labels.

    Raises:
      FileNotFoundError: the dataset is not built in and not prepared.
      ValueError: unknown name.
    """
    if name == DIGITS:
        return Classes(_DIGIT_NAMES, _DIGIT_TEMPLATES)
    if name in BUILT_IN:
        return Classes(shapes.CLASS_NAMES, shapes.TEMPLATES)
    return _record_classes(name, _builder(name, data_dir).info.features)
