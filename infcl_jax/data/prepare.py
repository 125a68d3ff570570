"""Preparation of datasets on disk."""

from __future__ import annotations

import contextlib
import io
import tempfile
import time
from pathlib import Path

import tensorflow_datasets as tfds

from infcl_jax.data import sources


def prepare(name: str, data_dir: str | Path) -> str:
    """Write a dataset to disk as array_record, unless it exists.

    An interrupted preparation leaves no dataset that looks complete.

    Examples:
      >>> summary = prepare("digits", "data")

    Args:
      name: "shapes/quickstart", "shapes/full", "digits", or a dataset of the TFDS catalog.
      data_dir: directory of the datasets, created if missing.

    Returns:
      A one-line summary: example counts, seconds and directory.

    Raises:
      ValueError: the name is unknown.
      OSError: the directory is not writable.
      ImportError: preparing the dataset needs a package that is not installed.
    """
    if name == sources.DIGITS:
        return f"{name}: nothing to prepare, scikit-learn has it"
    existing = sources.dataset_dir(name, data_dir)
    if existing is not None:
        return f"{name}: already prepared in {existing}"
    sources.check_name(name)
    check_writable(Path(data_dir), "--data_dir")
    start = time.monotonic()
    builder = tfds.builder(name, data_dir=str(data_dir), file_format="array_record")
    with contextlib.redirect_stdout(io.StringIO()):  # hides the progress of TFDS, so that the command prints one line
        try:
            builder.download_and_prepare()
        except ImportError as error:
            raise ImportError(
                f"{name} needs {error.name or error} to be prepared; install that and run again"
            ) from error
    seconds = time.monotonic() - start
    counts = ", ".join(f"{split.num_examples} {split_name}" for split_name, split in builder.info.splits.items())
    return f"{name}: {counts} in {seconds:.1f} s, {builder.data_path}"


def check_writable(folder: Path, flag: str) -> None:
    """Create a folder, which a flag of a command names, and check that files can be written to it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OSError(f"cannot write to {folder} ({error.strerror}); choose another {flag}") from error
