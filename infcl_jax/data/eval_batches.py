"""Ordered batches for evaluation.

Each global batch is split into one contiguous block of rows per process. A bad record is an error, because a score over
a subset of a benchmark would be misleading.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import grain
import numpy as np

from infcl_jax.data.checks import check_at_least, process_rows
from infcl_jax.data.decode.api import DecodedExample
from infcl_jax.data.iterator import Batch
from infcl_jax.data.reader import RecordReader
from infcl_jax.data.sources.base import Source
from infcl_jax.data.tokenizers import Tokenizer
from infcl_jax.data.transforms import resize_center_crop


class EvalBatches:
    """Ordered batches of one split; see `eval_batches`.

    Each `iter` starts a new pass over the split. `len` is the number of batches.
    """

    def __init__(
        self,
        source: Source,
        tokenizer: Tokenizer | None,
        image_size: int,
        batch_size: int,
        offset: int,
        local_size: int,
    ):
        self._source, self._tokenizer, self._image_size = source, tokenizer, image_size
        self._reader = RecordReader(source, replace=False)
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
            "index": np.full(self._local_size, -1, np.int64),
            "label": np.full(self._local_size, -1, np.int32),
            "mask": np.arange(self._local_size) < len(indices),
        }
        read, _ = self._reader.read(indices)
        for row, (example, index) in enumerate(read):
            batch["image"][row] = resize_center_crop(example["image"], self._image_size)
            batch["index"][row], batch["label"][row] = index, example["label"]
        return batch if self._tokenizer is None else batch | _captions(read, self._tokenizer)


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
    image_size: int,
    batch_size: int,
    process_index: int = 0,
    process_count: int = 1,
) -> EvalBatches:
    """Create ordered batches that contain every image and every caption once.

    All processes get the same number of batches. Images have the same shapes in all batches. The number of captions c
    of a batch varies, because images have different numbers of captions.

    Args:
      source: source of examples.
      tokenizer: tokenizer of the captions; None: batches without captions.
      image_size: side S of the center-cropped images, in pixels.
      batch_size: global batch size B in images, over all processes; it may exceed the source.
      process_index: index of this process, in [0, process_count).
      process_count: number of processes that share each batch; each gets b = B / process_count rows.

    Returns:
      A reusable iterable of {"image": uint8 [b, S, S, 3], "index": int64 [b], "label": int32 [b] (-1 without class),
      "mask": bool [b], "text": int32 [c, L], "text_index": int64 [c]}. Rows with a False mask are padding: zeros, with
      index and label -1. "text" has all captions of the images, in order, and "text_index" the index of their images.

    Raises:
      ValueError: batch_size is not a multiple of the number of processes, or another argument is out of range.
      BadRecordError: a record cannot be decoded; raised during iteration.
    """
    local_size = process_rows(batch_size, process_index, process_count)
    check_at_least(1, image_size=image_size)
    return EvalBatches(source, tokenizer, image_size, batch_size, process_index * local_size, local_size)
