"""Preparation of datasets and tokenizers on disk."""

import collections
import contextlib
import io
import logging
import time
from collections.abc import Iterator
from pathlib import Path

import tensorflow_datasets as tfds

from infcl_jax.data.sources import DIGITS, BadRecordError, Source, load_source
from infcl_jax.data.sources.tfds import check_name, dataset_dir
from infcl_jax.data.tokenizers import train_bpe
from infcl_jax.data.tokenizers.base import SETTINGS_FILE
from infcl_jax.data.tokenizers.clip import CLIP_VOCAB_SIZE
from infcl_jax.runtime.file_io import make_writable
from infcl_jax.runtime.progress import Progress

_logger = logging.getLogger(__name__)


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
    if name == DIGITS:
        return f"{name}: nothing to prepare, scikit-learn has it"
    existing = dataset_dir(name, data_dir)
    if existing is not None:
        return f"{name}: already prepared in {existing}"
    check_name(name)
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


def prepare_tokenizer(
    dataset: str,
    output: str | Path,
    *,
    vocab_size: int = CLIP_VOCAB_SIZE,
    split: str = "train",
    data_dir: str | Path = "data",
) -> str:
    """Train a byte-pair vocabulary on all captions of a dataset, see `train_bpe`.

    Examples:
      >>> summary = prepare_tokenizer("digits", "bpe", vocab_size=520)
      >>> load_tokenizer("bpe").vocab_size
      520

    Args:
      dataset: dataset of `load_source`.
      output: folder of the tokenizer, created if missing; the `tokenizer` setting of a run.
      vocab_size: number of token ids, at least 515. Few captions give fewer.
      split: split of the dataset; "train[:100000]" takes the captions of the first samples.
      data_dir: directory of the prepared datasets.

    Returns:
      A one-line summary: token ids, captions, bad records, seconds, and the settings for a run.

    Raises:
      FileNotFoundError, ValueError: see `load_source` and `train_bpe`; or the folder has a tokenizer.
      OSError: the folder is not writable.
      ImportError: the package `tokenizers` is not installed.
    """
    start = time.monotonic()
    source, output = load_source(dataset, split, data_dir), Path(output)
    if (output / SETTINGS_FILE).exists():
        raise ValueError(f"expected a folder without a tokenizer, got {output}; delete it or choose another")
    check_writable(output, "--train_tokenizer")
    counts: collections.Counter[str] = collections.Counter()
    size = train_bpe(_captions(source, counts), vocab_size, output).vocab_size
    return (
        f"{dataset}: {size} token ids from {counts['captions']} captions, {counts['bad']} bad records left out, in"
        f" {time.monotonic() - start:.1f} s; train with --config.tokenizer={output}"
        f" --config.model_overrides=text.vocab_size={size}"
    )


def _captions(source: Source, counts: collections.Counter[str]) -> Iterator[str]:
    """Iterate over the captions of all good records, and count both."""
    progress = Progress(f"{source.name}: read", len(source), "records", _logger.info)
    for index in range(len(source)):
        try:
            captions = source[index]["captions"]
        except BadRecordError as error:
            _logger.warning("%s; left out", error)
            counts["bad"] += 1
            continue
        counts["captions"] += len(captions)
        yield from captions
        progress.add()


def check_writable(folder: Path, flag: str) -> None:
    """Create a folder, which a flag of a command names, and check that files can be written to it."""
    try:
        make_writable(folder)
    except OSError as error:
        raise OSError(f"cannot write to {folder} ({error.strerror}); choose another {flag}") from error
