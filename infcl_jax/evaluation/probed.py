"""Checks of a few records of an evaluation, before a run starts."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from infcl_jax.data import BadRecordError, Source, classes
from infcl_jax.data.sources.base import describe

_PROBED = 16  # records of a split, read and not decoded


def check_records(source: Source) -> None:
    """Check that a few records of a split can be read.

    Raises:
      ValueError: the split is empty.
      BadRecordError: none of them can be read; the message is that of the first.
    """
    if not len(source):
        raise ValueError(f"expected records in {source.name}, split {source.split}, got none")
    errors = []
    for index in _probed(source):
        try:
            source[index]
            return
        except BadRecordError as error:
            errors.append(error)
    raise BadRecordError(f"{errors[0]}; the {len(errors)} records tried, across the split, are all bad")


def check_labels(source: Source, names: int, task: str) -> None:
    """Check that labels have class names.

    Reads a few records, and all of them if the dataset has more classes than there are names or those have no label.

    Args:
      source: readable dataset.
      names: number of class names.
      task: name of the task, for messages.

    Raises:
      ValueError: a label has no class name, or no record has a label.
    """
    labeled = _check(source, _probed(source), names, task)
    if not labeled or own_class_count(source) > names:
        labeled = _check(source, range(len(source)), names, task)
    if not labeled:
        raise ValueError(
            f"expected labels in {source.name}, split {source.split}, for {task}, got none; use a split with classes"
        )


def own_class_count(source: Source) -> int:
    """Return the number of classes that a dataset names; 0 for one without names."""
    try:
        return len(classes(source).names)
    except (ValueError, FileNotFoundError):
        return 0


def _check(source: Source, indices: Iterable[int], names: int, task: str) -> bool:
    """Check the labels of records; return whether there is one."""
    labeled = False
    for index in indices:
        try:
            label = source[index]["label"]
        except BadRecordError:
            continue
        if label >= names:
            raise ValueError(
                f"expected at least {label + 1} class names for {task}, got {names}: {describe(source, index)} has the"
                f" label {label}"
            )
        labeled = labeled or label >= 0
    return labeled


def _probed(source: Source) -> list[int]:
    """Return evenly spaced indices."""
    return np.unique(np.linspace(0, len(source) - 1, _PROBED).astype(np.int64)).tolist()
