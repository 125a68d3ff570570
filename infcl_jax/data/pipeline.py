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
import functools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import grain
import jax
import numpy as np
from jax.sharding import NamedSharding

from infcl_jax.data.decode.api import DecodedExample, ToImage, decode_example, pixels
from infcl_jax.data.decode.device import DeviceDecoder, DeviceStage, EncodedImage, encoded_image, pack
from infcl_jax.data.decode.pillow import decode_crop
from infcl_jax.data.iterator import Batch, TrainIterator
from infcl_jax.data.sources.base import BadRecordError, BatchedSource, Example, OrderedSource, Source, source_name
from infcl_jax.data.tokenizers import Tokenizer
from infcl_jax.data.transforms import Augmentation, Geometry, resize_center_crop

_CHUNK = 256  # maximum rows per chunk; a thread or worker prepares one chunk at a time
# Offsets of the seed in the keys of random generators; [0, 2**32) are the streams of `data.shapes`.
_STREAM = 2**32  # captions and geometry
_COLOR_STREAM = 2**33
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

    def read(
        self, indices: Sequence[int], to_image: Sequence[ToImage] | None = None
    ) -> list[tuple[DecodedExample, int]]:
        """Read records, replacing bad ones.

        Args:
          indices: sample indices.
          to_image: decoder of each row's image; None: `pixels` for all.
        """
        examples: Sequence[Example | None] = [None] * len(indices)
        # One call for all records is much cheaper. After a bad record, they are read one by one.
        if isinstance(self._source, BatchedSource):
            with contextlib.suppress(BadRecordError):
                examples = self._source.__getitems__(indices)
        to_image = [pixels] * len(indices) if to_image is None else to_image
        return [self._decode_or_replace(*row) for row in zip(indices, examples, to_image, strict=True)]

    def _decode_or_replace(self, index: int, example: Example | None, to_image: ToImage) -> tuple[DecodedExample, int]:
        size = len(self._source)
        for offset in range(min(_MAX_REPLACEMENTS, size)):
            candidate = (index + offset) % size
            try:
                encoded = example if offset == 0 and example is not None else self._source[candidate]
                return decode_example(self._source, candidate, encoded, to_image), candidate
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

    def __call__(self, rows: Sequence[tuple[int, int]]) -> Batch:
        chunk = self.read(rows, self.image)
        return chunk | {"image": np.stack(chunk["image"])}

    def read(self, rows: Sequence[tuple[int, int]], to_image: Callable[[int, Example], Any]) -> dict[str, Any]:
        """Read the records of rows; "image" is the list of results of `to_image(row, example)`."""
        decoders = [functools.partial(to_image, row) for row, _ in rows]
        read = self.reader.read([index for _, index in rows], decoders)
        captions = [self._caption(row, example)[0] for (row, _), (example, _) in zip(rows, read, strict=True)]
        chunk = {
            "image": [example["image"] for example, _ in read],
            "text": self.tokenizer(captions),
            "index": np.array([index for _, index in read], np.int64),
        }
        if self.augmentation is not None and self.augmentation.adjusts_colors:
            chunk["color"] = np.stack([self.augmentation.draw_color(self._rng(_COLOR_STREAM, row)) for row, _ in rows])
        return chunk

    def _caption(self, row: int, example: Example | DecodedExample) -> tuple[str, np.random.Generator]:
        """Draw the caption of a row.

        Returns:
          The caption, and the random generator for the row's image.
        """
        rng = self._rng(_STREAM, row)
        captions = example["captions"]
        return (captions[int(rng.integers(len(captions)))] if len(captions) > 1 else captions[0]), rng

    def _rng(self, stream: int, row: int) -> np.random.Generator:
        """Return a random generator of a row.

        It is keyed by the global row, which increases across epochs, and depends on neither process nor worker.
        """
        return np.random.Generator(np.random.Philox(key=np.array([stream + self.seed, row], np.uint64)))

    def draw(self, row: int, example: Example) -> Callable[[int, int], Geometry]:
        """Return the function from height and width of a row's image to its geometry."""
        return functools.partial(self.augmentation.draw, rng=self._caption(row, example)[1])

    def image(self, row: int, example: Example) -> np.ndarray:
        """Decode and transform the image of a row."""
        if self.augmentation is None:
            return resize_center_crop(pixels(example), self.image_size)
        if isinstance(example["image"], bytes):
            return decode_crop(example["image"], self.draw(row, example), self.image_size)
        return self.augmentation(pixels(example), self.image_size, self._caption(row, example)[1])


@dataclasses.dataclass(frozen=True)
class _EncodedChunk:
    """Function that makes one chunk of a batch with encoded images."""

    host: _TrainChunk

    def __call__(self, rows: Sequence[tuple[int, int]]) -> Batch:
        chunk = self.host.read(rows, self._image)
        return chunk | pack([row for row, _ in rows], chunk.pop("image"))

    def _image(self, row: int, example: Example) -> EncodedImage | np.ndarray:
        """Read the header of a row's image, or decode it if a device cannot."""
        if isinstance(example["image"], bytes):
            encoded = encoded_image(example["image"], self.host.draw(row, example))
            if encoded is not None:
                return encoded
        return self.host.image(row, example)


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
    num_workers: int = 0,
    num_threads: int = 2,
    prefetch_batches: int = 2,
    augmentation: Augmentation | None = _DEFAULT_AUGMENTATION,
    max_bad_records: int = 100,
    decoders: Mapping[jax.Device, DeviceDecoder] | None = None,
    sharding: NamedSharding | None = None,
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
      num_workers: number of worker processes that read and transform; 0 uses threads of this process.
      num_threads: number of reading threads without workers. Decoding and resizing run in parallel; other Python code
        does not.
      prefetch_batches: number of batches to prefetch. Host memory holds about two more during concatenation.
      augmentation: image transform; None resizes and crops the center, as in evaluation.
      max_bad_records: maximum number of different bad records to replace, per reading process.
      decoders: decoder of each device of this process; None: the host decodes.
      sharding: sharding of the rows over the devices, with `decoders`.

    Returns:
      An iterator of {"image": uint8 [b, S, S, 3], "text": int32 [b, L], "index": int64 [b]}, with `get_state` and
      `set_state`. An augmentation of colors adds "color", float32 [b, 7], see `infcl_jax.ops.color.ColorBatch`. With
      `decoders`, "image" is the global array [B, S, S, 3] on the devices. Close the iterator to stop its threads and
      workers.

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
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed must be in [0, 2**32), got {seed}")
    if decoders is not None and (augmentation is None or sharding is None):
        raise ValueError("expected an augmentation and a sharding with decoders, got None; leave decoders out")
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
    host = _TrainChunk(reader, tokenizer, image_size, augmentation, seed)
    make_chunk = host if decoders is None else _EncodedChunk(host)
    return TrainIterator(
        rows.batch(chunk, drop_remainder=True, batch_fn=make_chunk).repeat(),
        chunks_per_batch=local_size // chunk,
        rows_per_chunk=chunk,
        identity=identity,
        bad_records=reader.bad_records,
        finish=None if decoders is None else DeviceStage(decoders, sharding, host, image_size),
        num_workers=num_workers,
        num_threads=num_threads,
        prefetch_batches=prefetch_batches,
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


def _check_at_least(low: int, **values: int) -> None:
    for name, value in values.items():
        if value < low:
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
