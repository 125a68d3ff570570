"""Computation of the features of a frozen tower, once per sample of a source."""

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import itertools
import json
import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import grain
import numpy as np

from infcl_jax.data.dataset_identity import hash_samples
from infcl_jax.data.decode.api import DecodedExample
from infcl_jax.data.decode.pillow import MAX_PIXELS
from infcl_jax.data.feature_store import SEGMENT_SAMPLES, FeatureStore, pack_strings
from infcl_jax.data.pipeline import transform_image
from infcl_jax.data.reader import RecordReader
from infcl_jax.data.sources.base import Example, OrderedSource, Source
from infcl_jax.data.tokenizers import BaseTokenizer
from infcl_jax.data.transforms import Augmentation
from infcl_jax.runtime.progress import Progress

Encode = Callable[[np.ndarray], np.ndarray]

_CHUNK = 64  # samples that a thread reads at once
_VERSION = 1  # of the files
_CENTRAL_SQUARE = Augmentation(scale=(1.0, 1.0))

_logger = logging.getLogger(__name__)


def check_deterministic(augmentation: Augmentation) -> None:
    """Check that every epoch shows a tower the same pixels of an image.

    Examples:
      >>> check_deterministic(Augmentation(scale=(1.0, 1.0)))

    Raises:
      ValueError: the augmentation is random; the message has the settings to change.
    """
    fixed = {"scale": (1.0, 1.0), "shift": 0, "flip": 0.0, "color_jitter_prob": 0.0, "gray_scale_prob": 0.0}
    values = dataclasses.asdict(augmentation) | {"scale": tuple(map(float, augmentation.scale))}
    random = [name for name, value in fixed.items() if values[name] != value]
    if random:
        got = ", ".join(f"augmentation.{name}={values[name]}" for name in random)
        advice = ", ".join(f"augmentation.{name}={fixed[name]}" for name in random)
        raise ValueError(f"expected images that are the same in every epoch with cache_frozen, got {got}; set {advice}")


class TowerInput(NamedTuple):
    """Input of a frozen tower.

    Examples:
      >>> tower = TowerInput("image", image_size=16, tokenizer=load_tokenizer("bytes", 36))
      >>> tower.name
      'image'

    Attributes:
      name: tower, "image" or "text".
      image_size: side of the square images, in pixels.
      tokenizer: tokenizer of the captions.
      max_image_pixels: largest number of pixels of an encoded image; larger ones are bad samples.
    """

    name: str
    image_size: int
    tokenizer: BaseTokenizer
    max_image_pixels: int = MAX_PIXELS

    def image(self, example: Example) -> np.ndarray | None:
        """Decode the central square of an example's image; None for a tower of text."""
        if self.name == "text":
            return None
        rng = np.random.default_rng(0)  # nothing is drawn
        return transform_image(example, _CENTRAL_SQUARE, self.image_size, rng, self.max_image_pixels)

    def fingerprint(self) -> str:
        """Describe the transform of images, or hash the files of the tokenizer."""
        if self.name == "image":
            return f"central square, {self.image_size} pixels, Pillow, files of at most {self.max_image_pixels} pixels"
        digest = hashlib.sha256()
        with tempfile.TemporaryDirectory() as folder:
            self.tokenizer.save(folder)
            for path in sorted(Path(folder).rglob("*")):
                if path.is_file():
                    digest.update(path.name.encode() + path.read_bytes())
        return digest.hexdigest()


def feature_key(source: Source, tower: TowerInput, model: str, weights: Mapping[str, np.ndarray]) -> str:
    """Hash all that determines the features: weights, model, transform or tokenizer, and dataset.

    The dataset counts with its name, split, size and 16 of its samples.

    Examples:
      >>> tower = TowerInput("image", 16, load_tokenizer("bytes", 36))
      >>> key = feature_key(load_source("photos", "train"), tower, repr(model.visual), {"kernel": np.ones(3)})
      >>> len(key)
      64

    Args:
      source: source of the samples.
      tower: input of the tower.
      model: description of the tower, such as its `repr`.
      weights: arrays of the tower by name.
    """
    order = source.fingerprint() if isinstance(source, OrderedSource) else 0
    facts = [_VERSION, tower.name, tower.fingerprint(), model, source.name, source.split, len(source), order]
    digest = hashlib.sha256(json.dumps(facts).encode())
    hash_samples(digest, source, messages=True)
    for name in sorted(weights):
        array = np.ascontiguousarray(weights[name])
        digest.update(json.dumps([name, str(array.dtype), array.shape]).encode())
        digest.update(array.reshape(-1).view(np.uint8))
    return digest.hexdigest()


def cache_features(
    source: Source,
    tower: TowerInput,
    encode: Encode,
    rows: int,
    folder: Path,
    key: str,
    *,
    threads: int = 1,
    process_index: int = 0,
    process_count: int = 1,
    segment_samples: int = SEGMENT_SAMPLES,
    say: Callable[[str], None] = _logger.info,
) -> FeatureStore:
    """Compute the missing features of a tower, and check the others.

    A killed computation continues after its last complete segment. Segments that are damaged, or of another tower or
    dataset, are computed again, with one line each. Processes take turns in the segments, so `folder` must be the same
    for all.

    Examples:
      >>> from pathlib import Path
      >>> source, tower = load_source("photos", "train"), TowerInput("image", 16, load_tokenizer("bytes", 36))
      >>> def encode(pixels):
      ...     return pixels.reshape(len(pixels), -1)[:, :8].astype(np.float32)
      >>> key = feature_key(source, tower, "first pixels", {})
      >>> store = cache_features(source, tower, encode, rows=4, folder=Path("cache"), key=key)

    Args:
      source: source of the samples.
      tower: input of the tower.
      encode: function from `rows` images, uint8 [rows, S, S, 3], or texts, int32 [rows, L], to features [rows, D].
      rows: rows encoded at once.
      folder: folder of the cache, in which the key names a folder.
      key: hash from `feature_key`.
      threads: threads that read and decode.
      process_index: index of this process.
      process_count: number of processes that share the segments.
      segment_samples: samples per segment.
      say: function that gets lines of progress.

    Returns:
      The features. Segments of other processes may not exist yet.
    """
    store = FeatureStore(folder / f"{tower.name}-{key[:16]}", key, len(source), segment_samples)
    own = range(process_index, store.segments, process_count)
    with concurrent.futures.ThreadPoolExecutor(threads) as executor:
        problems = dict(zip(own, executor.map(store.problem, own), strict=True))
    pending = {segment: problem for segment, problem in problems.items() if problem is not None}
    progress = Progress(f"features of the {tower.name} tower", len(pending), "files", say)
    for segment, problem in pending.items():
        if problem != "missing":
            _logger.warning("%s is %s; its features are computed again", store.path(segment), problem)
        arrays, bad = _segment_arrays(source, tower, encode, rows, store.segment_range(segment), threads)
        store.write(segment, arrays)
        if bad:
            lines = store.path(segment), len(bad), bad[0]
            _logger.warning("%s is without %d samples that cannot be read, such as %s; delete it to try again", *lines)
        progress.add()
    return store


def _segment_arrays(
    source: Source, tower: TowerInput, encode: Encode, rows: int, samples: range, threads: int
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Compute the arrays of a segment for `FeatureStore`, and the messages of its bad samples."""
    messages: list[str] = []  # "" for good samples
    captions: list[tuple[str, ...]] = []

    def inputs() -> Iterator[np.ndarray]:
        """Yield the input of each row of features; collect captions and bad samples."""
        for example in _read(source, tower, samples, threads):
            messages.append(example if isinstance(example, str) else "")
            captions.append(() if isinstance(example, str) else example["captions"])
            if isinstance(example, str):
                continue
            if tower.name == "image":
                yield example["image"]
            else:
                yield from tower.tokenizer(captions[-1])

    features = np.concatenate([*_encode_rows(encode, rows, inputs())] or [_no_features(tower, encode, rows)])
    caption_starts = np.cumsum([0, *map(len, captions)], dtype=np.int64)
    bad = [message for message in messages if message]
    if tower.name == "text":
        return {"features": features, "starts": caption_starts}, bad
    arrays = {
        "features": features,
        "starts": np.cumsum([0, *(not message for message in messages)], dtype=np.int64),
        "caption_starts": caption_starts,
        **pack_strings("captions", [caption for texts in captions for caption in texts]),
        **pack_strings("bad", messages),
    }
    return arrays, bad


def _encode_rows(encode: Encode, rows: int, inputs: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
    """Encode `rows` inputs at a time, the last ones padded to the compiled shape."""
    for batch in itertools.batched(inputs, rows):
        padding = [np.zeros_like(batch[0])] * (rows - len(batch))
        yield encode(np.stack([*batch, *padding]))[: len(batch)]


def _no_features(tower: TowerInput, encode: Encode, rows: int) -> np.ndarray:
    """Return an array without rows, for a segment whose samples are all bad."""
    size = tower.image_size
    empty = np.zeros((rows, size, size, 3), np.uint8) if tower.name == "image" else tower.tokenizer([""] * rows)
    return encode(empty)[:0]


def _read(source: Source, tower: TowerInput, samples: range, threads: int) -> Iterator[DecodedExample | str]:
    """Read samples in order; a sample that cannot be read gives its message."""
    reader = RecordReader(source, replace=False, skip=True)

    def read(chunk: int) -> list[DecodedExample | str]:
        indices = samples[chunk * _CHUNK : (chunk + 1) * _CHUNK]
        examples, bad = reader.read(indices, [tower.image] * len(indices))
        by_index = bad | {index: example for example, index in examples}
        return [by_index[index] for index in indices]

    options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=2 * threads)
    chunks = grain.MapDataset.range(-(-len(samples) // _CHUNK)).map(read).to_iter_dataset(options)
    with contextlib.closing(iter(chunks)) as opened:
        for examples in opened:
            yield from examples
