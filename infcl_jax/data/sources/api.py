"""Sources and class names by dataset name or path."""

from __future__ import annotations

from pathlib import Path

from infcl_jax.data import shapes
from infcl_jax.data.sources.base import Classes, Source
from infcl_jax.data.sources.builtin import DIGIT_NAMES, DIGIT_TEMPLATES, DIGITS, DigitsSource
from infcl_jax.data.sources.tfds import BUILT_IN, RecordSource, open_builder, record_classes


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
        return Classes(DIGIT_NAMES, DIGIT_TEMPLATES)
    if name in BUILT_IN:
        return Classes(shapes.CLASS_NAMES, shapes.TEMPLATES)
    return record_classes(name, open_builder(name, data_dir).info.features)
