"""Ordered batches for evaluation and for features of whole datasets.

Each global batch is split into one contiguous block of rows per process.
"""

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import grain
import numpy as np

from infcl_jax.data.decode.api import DecodedExample, pixels
from infcl_jax.data.decode.pillow import MAX_PIXELS
from infcl_jax.data.iterator import STATS, Batch, chunk_size, prefetched_batches
from infcl_jax.data.parallelism import (
    Parallelism,
    check_at_least,
    check_shared_memory,
    choose_parallelism,
    process_rows,
)
from infcl_jax.data.reader import BAD_RECORDS, RecordReader, as_array
from infcl_jax.data.sources.base import Example, Source
from infcl_jax.data.tokenizers import Tokenizer
from infcl_jax.data.transforms import SHORTEST_BICUBIC, Resize, resize_center_crop


class EvalBatches:
    """Ordered batches of one split; see `eval_batches`.

    Each `iter` starts a new pass over the split. `len` is the number of batches.

    Examples:
      >>> batches = eval_batches(load_source("photos", "train"), tokenizer=None, image_size=16, batch_size=3)
      >>> len(batches)
      3
    """

    def __init__(self, chunks: grain.MapDataset, chunks_per_batch: int, parallelism: Parallelism):
        self._chunks, self._chunks_per_batch, self._parallelism = chunks, chunks_per_batch, parallelism

    def __len__(self) -> int:
        return len(self._chunks) // self._chunks_per_batch

    def __iter__(self) -> Iterator[Batch]:
        dataset = prefetched_batches(self._chunks, self._chunks_per_batch, self._parallelism)
        with contextlib.closing(iter(dataset)) as batches:
            for batch in batches:
                yield {key: value for key, value in batch.items() if key != STATS}


@dataclasses.dataclass(frozen=True)
class _EvalChunk:
    """Function that makes one chunk of a batch from its first row."""

    source: Source
    rows: int
    skip_bad: bool
    tokenizer: Tokenizer | None
    image_size: int | None
    resize: Resize
    max_pixels: int

    def __call__(self, first: int) -> dict[str, Any]:
        rows, indices = self.rows, range(first, max(first, min(first + self.rows, len(self.source))))
        read, bad = RecordReader(self.source, replace=False, skip=self.skip_bad).read(
            indices, [self._image] * len(indices)
        )
        chunk: dict[str, Any] = {
            "index": np.full(rows, -1, np.int64),
            "label": np.full(rows, -1, np.int32),
            "mask": np.zeros(rows, np.bool_),
        }
        if self.skip_bad:
            chunk[BAD_RECORDS] = as_array(bad)
        if self.image_size is not None:
            chunk["image"] = np.zeros((rows, self.image_size, self.image_size, 3), np.uint8)
        for example, index in read:
            row = index - first
            chunk["index"][row], chunk["label"][row], chunk["mask"][row] = index, example["label"], True
            if self.image_size is not None:
                chunk["image"][row] = example["image"]
        return chunk if self.tokenizer is None else chunk | _captions(read, self.tokenizer)

    def _image(self, example: Example) -> np.ndarray | None:
        """Decode an image, resize it and crop its center."""
        if self.image_size is None:
            return None
        return resize_center_crop(pixels(example, self.max_pixels), self.image_size, self.resize)


def _captions(read: Sequence[tuple[DecodedExample, int]], tokenizer: Tokenizer) -> Batch:
    """Tokenize all captions of the examples, and give each the index of its sample."""
    texts = [caption for example, _ in read for caption in example["captions"]]
    counts = [len(example["captions"]) for example, _ in read]
    return {
        "text": tokenizer(texts) if texts else np.zeros((0, tokenizer.context_length), np.int32),
        "text_index": np.repeat(np.array([index for _, index in read], np.int64), counts),
    }


def eval_batches(
    source: Source,
    *,
    tokenizer: Tokenizer | None,
    image_size: int | None,
    batch_size: int,
    process_index: int = 0,
    process_count: int = 1,
    first_batch: int = 0,
    skip_bad: bool = False,
    parallelism: Parallelism | None = None,
    resize: Resize = SHORTEST_BICUBIC,
    max_image_pixels: int = MAX_PIXELS,
) -> EvalBatches:
    """Create ordered batches that contain every image and every caption once.

    All processes get the same number of batches. Images have the same shapes in all batches. The number of captions c
    of a batch varies, because images have different numbers of captions.

    Examples:
      >>> source, tokenizer = load_source("photos", "train"), load_tokenizer("bytes", 36)
      >>> batches = eval_batches(source, tokenizer=tokenizer, image_size=16, batch_size=4)
      >>> len(batches), [len(batch["image"]) for batch in batches]
      (2, [4, 4])

    Args:
      source: source of examples.
      tokenizer: tokenizer of the captions; None: batches without captions.
      image_size: side S of the center-cropped images, in pixels; None: batches without images.
      batch_size: global batch size B in images, over all processes; it may exceed the source.
      process_index: index of this process, in [0, process_count).
      process_count: number of processes that share each batch; each gets b = B / process_count rows.
      first_batch: number of batches to leave out at the start.
      skip_bad: whether bad records become padding instead of errors.
      parallelism: number of reading threads or workers; None: a thread per core.
      resize: mode and interpolation of the resize before the crop.
      max_image_pixels: largest number of pixels of an encoded image; larger ones are bad records.

    Returns:
      A reusable iterable of {"image": uint8 [b, S, S, 3], "index": int64 [b], "label": int32 [b] (-1 without class),
      "mask": bool [b], "text": int32 [c, L], "text_index": int64 [c]}. Rows with a False mask are padding: zeros, with
      index and label -1. "text" has all captions of the images, in order, and "text_index" the index of their images.
      With `skip_bad`, "bad_records" has the index and message of each bad record.

    Raises:
      ValueError: batch_size is not a multiple of the number of processes, another argument is out of range,
        or the workers of `parallelism` have too little shared memory.
      infcl_jax.data.workers.WorkerLost: a worker is killed; raised during iteration.
      BadRecordError: a record cannot be decoded; raised during iteration.
    """
    local_size = process_rows(batch_size, process_index, process_count)
    check_at_least(0, first_batch=first_batch)
    check_at_least(1, image_size=image_size)
    if parallelism is None:
        parallelism = choose_parallelism(local_size * 3 * (image_size or 1) ** 2, num_workers=0)
    rows = chunk_size(local_size)
    chunks_per_batch = local_size // rows
    check_shared_memory(parallelism, rows * 3 * (image_size or 0) ** 2, chunks_per_batch)
    first_rows = [
        (batch * process_count + process_index) * local_size + number * rows
        for batch in range(first_batch, math.ceil(len(source) / batch_size))
        for number in range(chunks_per_batch)
    ]
    chunk = _EvalChunk(source, rows, skip_bad, tokenizer, image_size, resize, max_image_pixels)
    return EvalBatches(grain.MapDataset.source(first_rows).map(chunk), chunks_per_batch, parallelism)
