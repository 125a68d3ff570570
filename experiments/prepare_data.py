r"""Prepares a dataset on disk, once; does nothing where it is there already.

    python -m experiments.prepare_data --dataset=shapes/quickstart --data_dir=data

Built-in datasets: shapes/quickstart (35 MB, about 15 s on two cores), shapes/full (0.5 GB, minutes), digits (nothing to
prepare). Another name is looked up in the TFDS catalogue: some of those need TensorFlow to prepare, none to read.
"""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import tensorflow_datasets as tfds
from absl import app, flags, logging

from infcl_jax.data import sources

_DATASET = flags.DEFINE_string("dataset", "shapes/quickstart", "Dataset name, with its config where there is one.")
_DATA_DIR = flags.DEFINE_string("data_dir", "data", "Folder that holds the prepared datasets.")


def prepare(name: str, data_dir: str | Path) -> str:
    """Writes a dataset as array_record, unless it is there. A killed preparation leaves nothing that looks complete.

    Args:
      name: "shapes/quickstart", "shapes/full", "digits", or a dataset of the TFDS catalogue.
      data_dir: the folder that holds the datasets; created where missing.

    Returns:
      What was done, in one line: counts, seconds, place.

    Raises:
      ValueError: the name is unknown.
      OSError: the folder cannot be written.
      ImportError: the dataset needs a package that is not installed to be prepared.
    """
    if name == sources.DIGITS:
        return f"{name}: nothing to prepare, scikit-learn has it"
    existing = sources.dataset_dir(name, data_dir)
    if existing is not None:
        return f"{name}: already prepared in {existing}"
    sources.check_name(name)
    _check_writable(Path(data_dir))
    start = time.monotonic()
    builder = tfds.builder(name, data_dir=str(data_dir), file_format="array_record")
    with contextlib.redirect_stdout(io.StringIO()):  # TFDS prints progress there; this command prints one line
        try:
            builder.download_and_prepare()
        except ImportError as error:
            raise ImportError(
                f"{name} needs {error.name or error} to be prepared; install that and run again"
            ) from error
    seconds = time.monotonic() - start
    counts = ", ".join(f"{split.num_examples} {split_name}" for split_name, split in builder.info.splits.items())
    return f"{name}: {counts} in {seconds:.1f} s, {builder.data_path}"


def _check_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OSError(f"cannot write to {folder} ({error.strerror}); choose another --data_dir") from error


def main(argv: Sequence[str]) -> None:
    """Command line entry point; expected mistakes end with one line and exit code 1."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
    logging.set_verbosity(logging.WARNING)
    tfds.disable_progress_bar()
    try:
        print(prepare(_DATASET.value, _DATA_DIR.value))
    except (ValueError, OSError, ImportError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    app.run(main)
