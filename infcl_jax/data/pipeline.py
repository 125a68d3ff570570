"""Deterministic, resumable batches for training.

The order of the data depends on the seed alone. Each global batch is split into one contiguous block of rows per
process. Concatenating the blocks in process order gives the same rows for any number of processes or workers.

Training replaces an undecodable record by the next good record, counts it and logs one warning for it. It stops after
`max_bad_records` different bad records: one broken image must not end a long run, but a broken disk must.
"""

import dataclasses
import functools
import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import UInt8

from infcl_jax.data.decode.api import DecodedExample, pixels
from infcl_jax.data.decode.device import DeviceDecoder, DeviceStage, EncodedImage, encoded_image, pack
from infcl_jax.data.decode.pillow import MAX_PIXELS, decode_crop
from infcl_jax.data.feature_store import FeatureStore, PrecomputedSource, TeacherFeatures, TeacherTokens
from infcl_jax.data.iterator import STATS, TrainIterator
from infcl_jax.data.packing import PADDED, TextPacker
from infcl_jax.data.parallelism import TOKENIZE, check_at_least, take_seconds, timed
from infcl_jax.data.positive_ids import POSITIVES, image_id, positive_id
from infcl_jax.data.reader import BAD_RECORDS, RecordReader, as_array
from infcl_jax.data.sources.base import Example, Source
from infcl_jax.data.tokenizers import Tokenizer
from infcl_jax.data.transforms import Augmentation, Geometry, resize_center_crop
from infcl_jax.ops.common.checks import check_choice

TRUNCATED = "truncated_captions"  # name in `TrainIterator.stats`; counted by worker processes

# Offsets of the seed in the keys of random generators; [0, 2**32) are the streams of `data.shapes`.
_STREAM = 2**32  # captions and geometry
_COLOR_STREAM = 2**33
_DEFAULT_AUGMENTATION = Augmentation()


@dataclasses.dataclass(frozen=True)
class _TrainChunk:
    """Function that makes one chunk of a batch from (global row, sample index) pairs.

    With `precomputed`, the images of the source are rows of features. `positives` other than "pair" adds "ids", and
    `teacher` adds its entries.
    """

    reader: RecordReader
    tokenizer: Callable[[list[Any]], np.ndarray]
    image_size: int
    augmentation: Augmentation | None
    seed: int
    precomputed: bool = False
    max_pixels: int = MAX_PIXELS
    positives: str = "pair"
    teacher: TeacherTokens | TeacherFeatures | None = None

    def __call__(self, rows: Sequence[tuple[int, int]]) -> dict[str, Any]:
        chunk = self.read(rows, self.image)
        return chunk | {"image": np.stack(chunk["image"])}

    def read(self, rows: Sequence[tuple[int, int]], to_image: Callable[[int, Example], Any]) -> dict[str, Any]:
        """Read the records of rows; "image" is the list of results of `to_image(row, example)`."""
        take_seconds()  # of a chunk that raised
        image_ids: dict[int, np.ndarray] = {}  # by row

        def decode(row: int, example: Example) -> Any:
            if self.positives == "image":
                image_ids[row] = image_id(example["image"])
            return to_image(row, example)

        decoders = [functools.partial(decode, row) for row, _ in rows]
        read, bad = self.reader.read([index for _, index in rows], decoders)
        numbers = [self._caption(row, example)[0] for (row, _), (example, _) in zip(rows, read, strict=True)]
        captions = [example["captions"][number] for (example, _), number in zip(read, numbers, strict=True)]
        truncated = _truncated_captions(self.tokenizer)
        with timed(TOKENIZE):
            tokens = self.tokenizer(captions)
        chunk = {
            "image": [example["image"] for example, _ in read],
            "text": tokens,
            "index": np.array([index for _, index in read], np.int64),
            BAD_RECORDS: as_array(bad),
        }
        if self.positives != "pair":
            chunk["ids"] = np.stack(
                [
                    image_ids[row] if self.positives == "image" else positive_id(self.positives, example, caption)
                    for (row, _), (example, _), caption in zip(rows, read, captions, strict=True)
                ]
            )
        if self.teacher is not None:
            with timed(TOKENIZE):
                chunk |= self.teacher([index for _, index in read], captions, numbers)
        if self.augmentation is not None and self.augmentation.adjusts_colors:
            chunk["color"] = np.stack([self.augmentation.draw_color(self._rng(_COLOR_STREAM, row)) for row, _ in rows])
        stats = take_seconds()
        if multiprocessing.parent_process() is not None:  # counts of a worker's copy of the tokenizer
            stats[TRUNCATED] = _truncated_captions(self.tokenizer) - truncated
        return chunk | {STATS: stats}

    def _caption(self, row: int, example: Example | DecodedExample) -> tuple[int, np.random.Generator]:
        """Draw the number of a row's caption, and return it with the random generator for the row's image."""
        rng = self._rng(_STREAM, row)
        captions = example["captions"]
        if not captions:
            raise ValueError(
                "expected captions to train on, got a dataset opened with caption=none; leave the option out"
            )
        return (int(rng.integers(len(captions))) if len(captions) > 1 else 0), rng

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
        if self.precomputed:
            return np.asarray(example["image"])
        if self.augmentation is None:
            return resize_center_crop(pixels(example, self.max_pixels), self.image_size)
        rng = self._caption(row, example)[1]
        return transform_image(example, self.augmentation, self.image_size, rng, self.max_pixels)


def transform_image(
    example: Example,
    augmentation: Augmentation,
    size: int,
    rng: np.random.Generator,
    max_pixels: int = MAX_PIXELS,
) -> UInt8[np.ndarray, "s s 3"]:
    """Decode and augment the image of an example; its colors are left to the device."""
    if isinstance(example["image"], bytes):
        return decode_crop(example["image"], functools.partial(augmentation.draw, rng=rng), size, max_pixels)
    return augmentation(pixels(example), size, rng)


def _truncated_captions(tokenizer: Any) -> int:
    """Return the number of captions that a tokenizer of this process has truncated."""
    return getattr(tokenizer, "truncated", 0)


@dataclasses.dataclass(frozen=True)
class _EncodedChunk:
    """Function that makes one chunk of a batch with encoded images."""

    host: _TrainChunk

    def __call__(self, rows: Sequence[tuple[int, int]]) -> dict[str, Any]:
        chunk = self.host.read(rows, self._image)
        return chunk | pack([row for row, _ in rows], chunk.pop("image"))

    def _image(self, row: int, example: Example) -> EncodedImage | np.ndarray:
        """Read the header of a row's image, or decode it if a device cannot."""
        if isinstance(example["image"], bytes):
            encoded = encoded_image(example["image"], self.host.draw(row, example), self.host.max_pixels)
            if encoded is not None:
                return encoded
        return self.host.image(row, example)


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
    max_bad_records: float | None = None,
    max_image_pixels: int = MAX_PIXELS,
    decoders: Mapping[jax.Device, DeviceDecoder] | None = None,
    sharding: NamedSharding | None = None,
    features: Mapping[str, FeatureStore] | None = None,
    positives: str = "pair",
    teacher: TeacherTokens | TeacherFeatures | None = None,
    packer: TextPacker = PADDED,
) -> TrainIterator:
    """Create an endless iterator of training batches.

    An epoch has `len(source) // batch_size` batches and every sample at most once. Each epoch has another order and
    leaves out other samples. Each component of a mixture has its own epochs.

    Examples:
      >>> source, tokenizer = load_source("photos", "train"), load_tokenizer("bytes", 36)
      >>> batches = train_iterator(source, tokenizer=tokenizer, image_size=16, batch_size=4, seed=0, num_workers=0)
      >>> batch = next(batches)
      >>> batch["image"].shape, batch["text"].shape
      ((4, 16, 16, 3), (4, 36))
      >>> batches.close()

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
      max_bad_records: maximum number of different bad records to replace, over all workers of this process; below 1: a
        fraction of the samples; None: 1 % of them, at least 100.
      max_image_pixels: largest number of pixels of an encoded image; larger ones are bad records.
      decoders: decoder of each device of this process; None: the host decodes.
      sharding: sharding of the rows over the devices, with `decoders`.
      features: cached features by tower, "image" or "text", see `infcl_jax.data.cache_features`; they replace images
        and token ids. Images with cached features are neither read nor decoded.
      positives: "pair", or what samples with equal ids share, see `infcl_jax.data.positive_ids`.
      teacher: token ids or cached features of a teacher, see `infcl_jax.data.feature_store`.
      packer: packing of the texts, which then are `PackedTokens`.

    Returns:
      An iterator of {"image": uint8 [b, S, S, 3], "text": int32 [b, L], "index": int64 [b]}, with `get_state` and
      `set_state`. An augmentation of colors adds "color", float32 [b, 7], see `infcl_jax.ops.color.ColorBatch`. Other
      `positives` than "pair" add "ids", int32 [b, 2], and `teacher` adds "teacher_text" and, of cached features,
      "teacher_image". With `decoders`, "image" is the global array [B, S, S, 3] on the
      devices. Close the iterator to stop its threads and workers.

    Raises:
      ValueError: batch_size is not a multiple of the number of processes or exceeds the source, another argument is
        out of range, or worker processes have too little shared memory or cannot import the main script.
      infcl_jax.data.workers.WorkerLost: raised during iteration, for a worker that is killed.
      BadRecordError: raised during iteration, for more than `max_bad_records` bad records or 16 in a row.
    """
    check_choice("positives", positives, POSITIVES)
    check_at_least(1, image_size=image_size, max_image_pixels=max_image_pixels)
    if augmentation is not None and augmentation.shift >= image_size:
        raise ValueError(
            f"expected augmentation.shift < {image_size}, the side of the images, got {augmentation.shift}"
        )
    if decoders is not None and features and "image" in features:
        raise ValueError("expected no decoders with features of the images, got both; leave decoders out")
    if decoders is not None and (augmentation is None or sharding is None):
        raise ValueError("expected an augmentation and a sharding with decoders, got None; leave decoders out")
    features = features or {}
    host = _TrainChunk(
        RecordReader(PrecomputedSource(source, features) if features else source),
        np.stack if "text" in features else tokenizer,
        image_size,
        augmentation,
        seed,
        precomputed="image" in features,
        max_pixels=max_image_pixels,
        positives=positives,
        teacher=teacher,
    )
    row_bytes = 3 * image_size**2 + 4 * tokenizer.context_length
    return TrainIterator(
        source,
        host if decoders is None else _EncodedChunk(host),
        batch_size=batch_size,
        seed=seed,
        row_bytes=row_bytes,
        max_bad_records=max_bad_records,
        process_index=process_index,
        process_count=process_count,
        num_workers=num_workers,
        num_threads=num_threads,
        prefetch_batches=prefetch_batches,
        cores=cores,
        processes_per_host=processes_per_host,
        shared_row_bytes=row_bytes if decoders is None and "image" not in features else 0,
        packer=packer,
        finish=None if decoders is None else DeviceStage(decoders, sharding, host, image_size),
    )


def text_reader(
    source: Source, tokenizer: Tokenizer, seed: int, teacher: TeacherTokens | None = None
) -> Callable[[Sequence[tuple[int, int]]], dict[str, Any]]:
    """Make a function that reads texts of (global row, sample index) pairs, without images."""
    chunk = _TrainChunk(RecordReader(source), tokenizer, image_size=0, augmentation=None, seed=seed, teacher=teacher)
    return functools.partial(chunk.read, to_image=lambda row, example: None)
