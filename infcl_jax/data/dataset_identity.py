"""Identity of a dataset, whose path may change between two starts of a run."""

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from infcl_jax.data.sources.base import BadRecordError, Source

_PROBES = 16  # samples whose contents are compared
SIZE = "num_examples"  # key of a position in the data
_DATASET, _RECORDS = "dataset", "records"

_logger = logging.getLogger(__name__)


def hash_samples(digest: Any, source: Source, *, count: int = _PROBES, messages: bool = False) -> None:
    """Add the contents of `count` evenly spaced samples to a hash, an object of `hashlib`.

    With `messages`, the messages of bad records count, which name files.
    """
    for index in np.linspace(0, len(source) - 1, count).astype(int).tolist():
        try:
            example: Any = source[index]
        except BadRecordError as error:
            digest.update(str(error if messages else "bad").encode())
            continue
        if not isinstance(example, dict):  # of text retrieval
            digest.update(repr(example).encode())
            continue
        image = example["image"]
        digest.update(image if isinstance(image, bytes) else np.ascontiguousarray(image).tobytes())
        digest.update(json.dumps(example["captions"]).encode())


def dataset_identity(source: Source) -> dict[str, Any]:
    """Return the size of a dataset, its name and the hash of some samples, to save with the position in the data."""
    digest = hashlib.sha256()
    hash_samples(digest, source)
    return {SIZE: len(source), _DATASET: f"{source.name}, split {source.split}", _RECORDS: digest.hexdigest()}


def same_place(old: str, new: str) -> bool:
    """Return whether two datasets have the same name, or paths of the same files."""
    return os.path.realpath(old) == os.path.realpath(new)


def check_same_data(
    saved: Mapping[str, Any],
    identity: Mapping[str, Any],
    workdir: str,
    *,
    forked: bool,
    moved: bool = False,
    indexed: bool = False,
) -> bool:
    """Check that a run continues with its own records, wherever they are now.

    A run that starts from the state of another one may have another number of samples.

    Args:
      saved: position in the data that the checkpoint has.
      identity: identity of the dataset, from `dataset_identity`.
      workdir: work directory of the checkpoint, for the error message.
      forked: whether this run starts from the state of another one.
      moved: whether path or split of the dataset differ from the run's.
      indexed: whether the state has values for each sample.

    Returns:
      Whether the number of samples has changed, so that the run continues at the same batch of another order.
    """
    size, name = identity[SIZE], identity[_DATASET]
    if saved.get(SIZE, size) != size:
        if not forked:
            raise ValueError(
                f"expected {saved[SIZE]} samples, with which the run in {workdir} was trained, got {size} in {name}; "
                "restore the data; if it is unchanged, another version leaves out other samples: continue in a new"
                f" order with another --workdir and --config.resume={workdir}"
            )
        if indexed:
            raise ValueError(
                f"expected the {saved[SIZE]} samples whose state the run in {workdir} has, got {size} in {name}; start "
                f"a new run with --config.init.model={workdir}"
            )
        _logger.warning(
            "%s has %d samples, %d in the run in %s; continues in a new order", name, size, saved[SIZE], workdir
        )
        return True
    if moved and _RECORDS not in saved:
        raise ValueError(
            f"expected the dataset of the run in {workdir}, whose checkpoint has no records to compare with, got "
            f"{name}; resume it once with the old path, for example a link, until its next checkpoint"
        )
    if saved.get(_RECORDS, identity[_RECORDS]) != identity[_RECORDS]:
        if saved[_DATASET] != name:
            raise ValueError(
                f"expected the records of {saved[_DATASET]}, with which the run in {workdir} was trained, got others "
                f"in {name}; name the moved data, or start a new run with --config.init.model={workdir}"
            )
        _logger.warning("records of %s have changed since the run in %s was trained", name, workdir)
    return False
