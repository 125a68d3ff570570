"""Random-access sources of captioned images: shapes, digits and TFDS datasets."""

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
    """Captioned image.

    Attributes:
      image: uint8 [H, W, 3].
      caption: caption for evaluation, one of `captions`.
      captions: all captions, at least one.
      label: class index, -1 without class.
    """

    image: np.ndarray
    caption: str
    captions: tuple[str, ...]
    label: int


class Source(Protocol):
    """Random-access examples of one split, picklable for worker processes."""

    name: str
    split: str

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Example:
        """Read an example; raise `BadRecordError` if it cannot be decoded."""
        ...


@runtime_checkable
class BatchedSource(Source, Protocol):
    """Source that reads several examples at lower cost in one call."""

    def __getitems__(self, indices: Sequence[int]) -> list[Example]:
        """Read examples; raise `BadRecordError` if any cannot be read or decoded."""
        ...


class Classes(NamedTuple):
    """Class names in label order and prompt templates for zero-shot classification.

    Each template contains one `{}` for the class name.
    """

    names: tuple[str, ...]
    templates: tuple[str, ...]


class BadRecordError(ValueError):
    """Error for a record that cannot be read or decoded.

    The message names the dataset, the split and the index.
    """


class DigitsSource:
    """Handwritten digits of scikit-learn with generated captions.

    The dataset has 1797 images (UCI, 8 x 8 pixels), resized to 32 x 32. The split is stratified and fixed: 70 % train,
    15 % validation and 15 % zero_shot of every class.

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
        # Evaluation captions cycle through the forms, so that evaluation covers all of them.
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
    """TFDS dataset in array_record format, read without TensorFlow.

    Its features must have an `image` (Image, or a uint8 tensor) and `caption` or `captions` (text, a sequence of texts,
    or a sequence of dicts with a `text`). Without captions, they are generated from a `label` (ClassLabel), one per
    template.

    Args:
      name: dataset name, with its config if it has one, such as "shapes/quickstart".
      split: split of the dataset, or a subset in TFDS syntax such as "train[:10%]".
      data_dir: directory of the prepared datasets.

    Raises:
      FileNotFoundError: the dataset is not prepared in `data_dir`.
      ValueError: the name or split is unknown, the file format is not array_record, or the features lack image or
        captions.
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
        # Images are decoded with PIL here, because TFDS uses OpenCV or PIL depending on what is installed.
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
        except Exception as error:  # record readers, protobuf and image decoders raise any exception
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
    """Flatten a text, a sequence of texts, or dicts with texts."""
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
    """Find the newest prepared version of a TFDS dataset.

    Args:
      name: dataset name, with its config if it has one.
      data_dir: directory of the prepared datasets.

    Returns:
      `data_dir/name/version`, or None without a complete version.
    """
    versions = [
        path
        for path in (Path(data_dir) / name).glob("*.*.*")
        if re.fullmatch(r"\d+\.\d+\.\d+", path.name) and (path / "dataset_info.json").is_file()
    ]
    return max(versions, key=lambda path: tuple(int(number) for number in path.name.split(".")), default=None)


def check_name(name: str) -> None:
    """Check that a dataset name is known.

    Args:
      name: built-in dataset, or dataset of the TFDS catalog with its config if it has one.

    Raises:
      ValueError: the name is neither built in nor in the TFDS catalog.
    """
    catalog = set(tfds.list_builders(with_community_datasets=False)) - {Shapes.name}
    if name not in BUILT_IN and name.split("/")[0] not in catalog:
        raise ValueError(
            f"dataset must be one of {', '.join(BUILT_IN)}, or a name of the TFDS catalog such as coco_captions/2014,"
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
    """Open one split of a dataset.

    Args:
      name: "shapes/quickstart", "shapes/full", "digits", or a prepared TFDS dataset (see `RecordSource`).
      split: "train", "validation" or "zero_shot" for the built-in datasets.
      data_dir: directory of the prepared datasets; unused by "digits".

    Returns:
      A `Source`.

    Raises:
      FileNotFoundError: the dataset is not prepared; the message gives the command to prepare it.
      ValueError: the name or split is unknown, or the dataset has no images or captions.
      ImportError: the dataset is "digits" and scikit-learn is not installed.
    """
    return DigitsSource(split) if name == DIGITS else RecordSource(name, split, data_dir)


def classes(name: str, data_dir: str | Path = "data") -> Classes | None:
    """Get the classes of a dataset for zero-shot classification.

    Args:
      name: dataset name of `load_source`.
      data_dir: directory of the prepared datasets; unused by built-in datasets.

    Returns:
      `Classes` (class names in label order, prompt templates), or None for a dataset without labels.

    Raises:
      FileNotFoundError: the dataset is neither built in nor prepared.
      ValueError: the name is unknown.
    """
    if name == DIGITS:
        return Classes(_DIGIT_NAMES, _DIGIT_TEMPLATES)
    if name in BUILT_IN:
        return Classes(shapes.CLASS_NAMES, shapes.TEMPLATES)
    return _record_classes(name, _builder(name, data_dir).info.features)
