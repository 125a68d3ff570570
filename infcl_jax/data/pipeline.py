"""Deterministic, resumable batches for training and evaluation.

The order of the data depends on the seed alone. Each global batch is split into one contiguous block of rows per
process. Concatenating the blocks in process order gives the same rows for any number of processes or workers.

Training replaces an undecodable record by the next good record and logs one warning for it. It stops after
`max_bad_records` different bad records: one broken image must not end a long run, but a broken disk must. Evaluation
raises at the first bad record, because a score over a subset of a benchmark would be misleading.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import math
from collections.abc import Iterator, Sequence
from typing import Any

import grain
import numpy as np

from infcl_jax.data.decode.api import DecodedExample, decode_example
from infcl_jax.data.iterator import STATS, Batch, TrainIterator
from infcl_jax.data.parallelism import choose_parallelism
from infcl_jax.data.sources.base import BadRecordError, BatchedSource, Example, OrderedSource, Source, source_name
from infcl_jax.data.stages import DECODE, READ, TOKENIZE, take_seconds, timed
from infcl_jax.data.tokenizers import Tokenizer
from infcl_jax.data.transforms import Augmentation, resize_center_crop

_CHUNK = 64  # maximum rows per chunk; a thread or worker prepares one chunk at a time, with full images in memory
_DEFAULT_AUGMENTATION = Augmentation()
_MAX_REPLACEMENTS = 16  # maximum number of consecutive records tried, the bad record included

_logger = logging.getLogger(__name__)


class _Reader:
    """Reader of (example, index) pairs that replaces bad records by good ones.

    The next good record replaces a bad one, whatever was read before, so a resumed run reads the same examples. Each
    training process and each worker process counts its own bad records.
    """

    def __init__(self, source: Source, max_bad_records: int):
        self._source = source
        self._max_bad_records = max_bad_records
        self._bad: set[int] = set()

    def bad_records(self) -> dict[str, int]:
        """Count the different bad records so far by the name of their source."""
        return dict(collections.Counter(source_name(self._source, index) for index in sorted(self._bad)))

    def read(self, indices: Sequence[int]) -> list[tuple[DecodedExample, int]]:
        """Read and decode records, replacing bad ones."""
        examples: Sequence[Example | None] = [None] * len(indices)
        # One call for all records is much cheaper. After a bad record, they are read one by one.
        if isinstance(self._source, BatchedSource):
            with contextlib.suppress(BadRecordError), timed(READ):
                examples = self._source.__getitems__(indices)
        return [self._decode_or_replace(*row) for row in zip(indices, examples, strict=True)]

    def _decode_or_replace(self, index: int, example: Example | None) -> tuple[DecodedExample, int]:
        size = len(self._source)
        for offset in range(min(_MAX_REPLACEMENTS, size)):
            candidate = (index + offset) % size
            try:
                if offset or example is None:
                    with timed(READ):
                        example = self._source[candidate]
                with timed(DECODE):
                    return decode_example(self._source, candidate, example), candidate
            except BadRecordError as error:
                self._record_bad(candidate, error)
                last = error
        raise BadRecordError(f"{last}; the {offset + 1} records from {index} on are all bad")

    def _record_bad(self, index: int, error: BadRecordError) -> None:
        if index in self._bad:
            return
        if len(self._bad) >= self._max_bad_records:
            counts = ", ".join(f"{count} of {name}" for name, count in self.bad_records().items())
            raise BadRecordError(
                f"{error}; more bad records than the {self._max_bad_records} allowed, check the data"
                + (f" (before it: {counts})" if counts else "")
            )
        self._bad.add(index)
        _logger.warning("%s; replaced by the next record", error)


@dataclasses.dataclass(frozen=True)
class _TrainChunk:
    """Function that makes one chunk of a batch from (global row, sample index) pairs."""

    reader: _Reader
    tokenizer: Tokenizer
    image_size: int
    augmentation: Augmentation | None
    seed: int

    def __call__(self, rows: Sequence[tuple[int, int]]) -> dict[str, Any]:
        take_seconds()  # those of a chunk that raised
        read = self.reader.read([index for _, index in rows])
        images, texts = [], []
        for (row, _), (example, _) in zip(rows, read, strict=True):
            # Keyed by the global row, which increases across epochs, so that the stream does not depend on the process
            # or worker. The offset 2**32 avoids the streams of `data.shapes`.
            rng = np.random.Generator(np.random.Philox(key=np.array([2**32 + self.seed, row], np.uint64)))
            captions = example["captions"]
            texts.append(captions[int(rng.integers(len(captions)))] if len(captions) > 1 else captions[0])
            with timed(DECODE):
                images.append(self._transform(example["image"], rng))
        with timed(TOKENIZE):
            tokens = self.tokenizer(texts)
        index = np.array([index for _, index in read], np.int64)
        return {"image": np.stack(images), "text": tokens, "index": index, STATS: take_seconds()}

    def _transform(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        if self.augmentation is None:
            return resize_center_crop(image, self.image_size)
        return self.augmentation(image, self.image_size, rng)


class _ProcessRows(grain.MapDataset):
    """Rows of one process as (global row, sample index) pairs.

    A process has one contiguous block of each global batch. The parent dataset has the sample indices of an epoch.
    Indices beyond its length address further epochs, in the parent and in this dataset.
    """

    def __init__(self, parent: grain.MapDataset, batch_size: int, process_index: int, process_count: int):
        super().__init__(parent)
        self._batch_size = batch_size
        self._local_size = batch_size // process_count
        self._offset = process_index * self._local_size

    def __len__(self) -> int:
        return len(self._parent) // self._batch_size * self._local_size

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.slice(index)
        step, local_row = divmod(index, self._local_size)
        row = step * self._batch_size + self._offset + local_row
        return row, self._parent[row]


def train_iterator(
    source: Source,
    *,
    tokenizer: Tokenizer,
    image_size: int,
    batch_size: int,
    seed: int,
    process_index: int = 0,
    process_count: int = 1,
    num_workers: int | None = None,
    num_threads: int | None = None,
    prefetch_batches: int | None = None,
    cores: int | None = None,
    processes_per_host: int = 1,
    augmentation: Augmentation | None = _DEFAULT_AUGMENTATION,
    max_bad_records: int = 100,
) -> TrainIterator:
    """Create an endless iterator of training batches.

    An epoch has `len(source) // batch_size` batches and every sample at most once. Each epoch has another order and
    leaves out other samples. Each component of a mixture has its own epochs.

    Args:
      source: source of examples.
      tokenizer: tokenizer of the captions.
      image_size: side S of the images, in pixels.
      batch_size: global batch size B, over all processes.
      seed: seed of order, augmentation and choice of captions, in [0, 2**32).
      process_index: index of this process, in [0, process_count).
      process_count: number of processes that share each batch; each gets b = B / process_count rows.
      num_workers: number of worker processes that read and transform; 0: threads of this process; None: chosen from the
        cores, see `infcl_jax.data.parallelism`.
      num_threads: number of reading threads without workers; None: one per core. Decoding and resizing run in parallel;
        other Python code does not.
      prefetch_batches: number of batches to prefetch; None: 2, or 1 if host memory is small. Host memory holds about
        three more.
      cores: number of CPU cores for this process; None: all that it may use.
      processes_per_host: number of processes that share the memory of this host.
      augmentation: image transform; None resizes and crops the center, as in evaluation.
      max_bad_records: maximum number of different bad records to replace, per reading process.

    Returns:
      An iterator of {"image": uint8 [b, S, S, 3], "text": int32 [b, L], "index": int64 [b]}, with `get_state` and
      `set_state`. Close it to stop its threads and workers.

    Raises:
      ValueError: batch_size is not a multiple of the number of processes or exceeds the source, or another argument is
        out of range.
      BadRecordError: raised during iteration, for more than `max_bad_records` bad records or 16 in a row.
    """
    local_size = _local_size(batch_size, process_index, process_count)
    if batch_size > len(source):
        raise ValueError(
            f"batch_size must be at most the {len(source)} examples of {source.name}, split {source.split}, got"
            f" {batch_size}; every sample appears at most once an epoch"
        )
    _check_at_least(0, num_workers=num_workers, max_bad_records=max_bad_records)
    _check_at_least(1, num_threads=num_threads, prefetch_batches=prefetch_batches, image_size=image_size)
    _check_at_least(1, cores=cores, processes_per_host=processes_per_host)
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed must be in [0, 2**32), got {seed}")
    chunk = _chunk_size(local_size)
    identity = {"num_examples": len(source), "batch_size": batch_size, "seed": seed}
    if isinstance(source, OrderedSource):
        order = source.order(seed)
        identity["order"] = source.fingerprint()
    else:
        order = grain.MapDataset.range(len(source)).seed(seed).shuffle()  # reshuffles every epoch
        order = order[: len(source) // batch_size * batch_size]
    rows = _ProcessRows(order, batch_size, process_index, process_count)
    reader = _Reader(source, max_bad_records)
    make_chunk = _TrainChunk(reader, tokenizer, image_size, augmentation, seed)
    return TrainIterator(
        rows.batch(chunk, drop_remainder=True, batch_fn=make_chunk).repeat(),
        chunks_per_batch=local_size // chunk,
        rows_per_chunk=chunk,
        identity=identity,
        bad_records=reader.bad_records,
        parallelism=choose_parallelism(
            batch_bytes=local_size * (3 * image_size**2 + 4 * tokenizer.context_length),
            num_workers=num_workers,
            num_threads=num_threads,
            prefetch_batches=prefetch_batches,
            cores=cores,
            processes=processes_per_host,
        ),
    )


def _chunk_size(local_size: int) -> int:
    """Return the largest divisor of `local_size` that is at most `_CHUNK`."""
    return max(size for size in range(1, min(_CHUNK, local_size) + 1) if local_size % size == 0)


def _local_size(batch_size: int, process_index: int, process_count: int) -> int:
    _check_at_least(1, batch_size=batch_size, process_count=process_count)
    if batch_size % process_count:
        raise ValueError(f"batch_size must be a multiple of the {process_count} processes, got {batch_size}")
    if not 0 <= process_index < process_count:
        raise ValueError(f"process_index must be in [0, {process_count}), got {process_index}")
    return batch_size // process_count


def _check_at_least(low: int, **values: int | None) -> None:
    for name, value in values.items():
        if value is not None and value < low:
            raise ValueError(f"{name} must be at least {low}, got {value}")


class EvalBatches:
    """Ordered batches of one split; see `eval_batches`.

    Each `iter` starts a new pass over the split. `len` is the number of batches.
    """

    def __init__(
        self, source: Source, tokenizer: Tokenizer, image_size: int, batch_size: int, offset: int, local_size: int
    ):
        self._source, self._tokenizer, self._image_size = source, tokenizer, image_size
        self._reader = _Reader(source, max_bad_records=0)
        self._batch_size, self._offset, self._local_size = batch_size, offset, local_size

    def __len__(self) -> int:
        return math.ceil(len(self._source) / self._batch_size)

    def __iter__(self) -> Iterator[Batch]:
        read = grain.ReadOptions(num_threads=2, prefetch_buffer_size=2)
        batches = iter(grain.MapDataset.range(len(self)).map(self._batch).to_iter_dataset(read))
        try:
            yield from batches
        finally:
            batches.close()

    def _batch(self, step: int) -> Batch:
        start = step * self._batch_size + self._offset
        indices = range(start, max(start, min(start + self._local_size, len(self._source))))
        batch: Batch = {
            "image": np.zeros((self._local_size, self._image_size, self._image_size, 3), np.uint8),
            "text": np.zeros((self._local_size, self._tokenizer.context_length), np.int32),
            "index": np.full(self._local_size, -1, np.int64),
            "label": np.full(self._local_size, -1, np.int32),
            "mask": np.arange(self._local_size) < len(indices),
        }
        read = self._reader.read(indices)
        for row, (example, index) in enumerate(read):
            batch["image"][row] = resize_center_crop(example["image"], self._image_size)
            batch["index"][row], batch["label"][row] = index, example["label"]
        if read:
            batch["text"][: len(read)] = self._tokenizer([example["caption"] for example, _ in read])
        return batch


def eval_batches(
    source: Source,
    *,
    tokenizer: Tokenizer,
    image_size: int,
    batch_size: int,
    process_index: int = 0,
    process_count: int = 1,
) -> EvalBatches:
    """Create ordered batches that contain every example once.

    All processes get the same number of batches of the same shapes.

    Args:
      source: source of examples.
      tokenizer: tokenizer of the captions.
      image_size: side S of the center-cropped images, in pixels.
      batch_size: global batch size B, over all processes; it may exceed the source.
      process_index: index of this process, in [0, process_count).
      process_count: number of processes that share each batch; each gets b = B / process_count rows.

    Returns:
      A reusable iterable of {"image": uint8 [b, S, S, 3], "text": int32 [b, L],
      "index": int64 [b], "label": int32 [b] (-1 without class), "mask": bool [b]}. Rows with a False
      mask are padding: zeros, with index and label -1.

    Raises:
      ValueError: batch_size is not a multiple of the number of processes, or another argument is out of range.
      BadRecordError: a record cannot be decoded; raised during iteration.
    """
    local_size = _local_size(batch_size, process_index, process_count)
    _check_at_least(1, image_size=image_size)
    return EvalBatches(source, tokenizer, image_size, batch_size, process_index * local_size, local_size)
