"""Features of the samples of a source on disk, and what batches read of them."""

import dataclasses
import itertools
import json
import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from infcl_jax.data.sources.base import BadRecordError, BatchedSource, Example, Source, bad_record, describe
from infcl_jax.data.tokenizers import BaseTokenizer
from infcl_jax.runtime.file_io import open_regular, parse_json, replacing

# Dtypes of safetensors that segments have.
_DTYPES: dict[str, Any] = {"F32": "<f4", "F16": "<f2", "BF16": np.dtype(jnp.bfloat16), "I64": "<i8", "U8": "u1"}

SEGMENT_SAMPLES = 2**14  # samples per file; the most that a killed run computes again


class FeatureStore:
    """Features of every sample of a source, in files of `segment_samples` samples.

    A segment is a safetensors file, which is memory-mapped. It has the arrays

    - "features": [rows, D], one row per image or caption, in the order of the samples;
    - "starts": int64 [samples + 1], first row of each sample;
    - strings for sources that read them, as in `pack_strings`: "captions" of the samples of an image tower, first
      caption of each sample in "caption_starts"; "bad", messages of samples that cannot be read, "" for all others.

    Picklable for worker processes.

    Examples:
      >>> store = FeatureStore("features", key="0123", samples=100_000)
      >>> store.samples
      100000

    Args:
      folder: folder of the segments.
      key: hash of all that determines the features; segments with another one are foreign.
      samples: number of samples n.
      segment_samples: samples per segment.
    """

    def __init__(self, folder: str | os.PathLike[str], key: str, samples: int, segment_samples: int = SEGMENT_SAMPLES):
        self.folder, self.key, self.samples, self.segment_samples = Path(folder), key, samples, segment_samples
        self._segments: dict[int, dict[str, np.ndarray]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_segments": {}}  # memory maps

    @property
    def segments(self) -> int:
        """Number of segments."""
        return -(-self.samples // self.segment_samples)

    def segment_range(self, segment: int) -> range:
        """Samples of a segment."""
        return range(segment * self.segment_samples, min(self.samples, (segment + 1) * self.segment_samples))

    def path(self, segment: int) -> Path:
        """File of a segment."""
        return self.folder / f"segment-{segment:06d}.safetensors"

    def problem(self, segment: int) -> str | None:
        """Check a segment; return why it cannot be used, or None.

        A missing segment has the problem "missing".
        """
        if not self.path(segment).is_file():
            return "missing"
        try:
            with safe_open(self.path(segment), "numpy") as file:
                metadata = file.metadata() or {}
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            return f"damaged: {error}"
        if metadata.get("key") != self.key:
            return "foreign: of other weights or data"
        if metadata.get("checksum") != _checksum(arrays):
            return "damaged: wrong checksum"
        starts, features = arrays.get("starts"), arrays.get("features")
        if starts is None or features is None or starts.shape != (len(self.segment_range(segment)) + 1,):
            return "foreign: of another number of samples"
        in_order = starts[0] == 0 and starts[-1] == len(features) and bool(np.all(np.diff(starts) >= 0))
        return None if in_order else "damaged: wrong first rows of the samples"

    def write(self, segment: int, arrays: Mapping[str, np.ndarray]) -> None:
        """Write a segment; it gets its name only when it is complete."""
        self.folder.mkdir(parents=True, exist_ok=True)
        data = save(dict(arrays), {"key": self.key, "checksum": _checksum(arrays)})
        with replacing(self.path(segment)) as temporary:
            temporary.write_bytes(data)

    def features(self, index: int) -> np.ndarray:
        """Read the features of a sample, [images or captions, D], memory-mapped."""
        segment, row = self._locate(index)
        return segment["features"][segment["starts"][row] : segment["starts"][row + 1]]

    def captions(self, index: int) -> tuple[str, ...]:
        """Read the captions of a sample of an image tower.

        Raises:
          BadRecordError: the sample could not be read or decoded when the features were computed.
        """
        segment, row = self._locate(index)
        (message,) = _unpack_strings(segment, "bad", row, row + 1)
        if message:
            raise BadRecordError(message)
        return _unpack_strings(segment, "captions", segment["caption_starts"][row], segment["caption_starts"][row + 1])

    def rows(self, segment: int) -> tuple[np.ndarray, np.ndarray]:
        """Read the features of a segment, [rows, D], and the sample of each row, int64 [rows]."""
        arrays = _map_arrays(self.path(segment))
        return arrays["features"], np.repeat(np.asarray(self.segment_range(segment)), np.diff(arrays["starts"]))

    def _locate(self, index: int) -> tuple[dict[str, np.ndarray], int]:
        """Return the arrays of a sample's segment, and the sample's number in it."""
        segment, row = divmod(index, self.segment_samples)
        if segment not in self._segments:
            self._segments[segment] = _map_arrays(self.path(segment))
        return self._segments[segment], row


def _map_arrays(path: Path) -> dict[str, np.ndarray]:
    """Memory-map the arrays of a safetensors file; `safe_open` would copy each slice."""
    with open_regular(path) as file:
        data = np.asarray(np.memmap(file, np.uint8, "r"))
    try:
        size = int(data[:8].view("<u8")[0])
        header, data = parse_json(data[8 : 8 + size].tobytes(), path), data[8 + size :]
        return {
            name: data[slice(*entry["data_offsets"])].view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (ValueError, TypeError, LookupError) as error:
        raise ValueError(f"expected a segment of features at {path}, got {error!r}") from error


def pack_strings(name: str, strings: Sequence[str]) -> dict[str, np.ndarray]:
    """Pack strings into `name`_bytes, with the first byte of each in `name`."""
    encoded = [string.encode() for string in strings]
    return {
        name: np.cumsum([0, *map(len, encoded)], dtype=np.int64),
        f"{name}_bytes": np.frombuffer(b"".join(encoded), np.uint8),
    }


def _unpack_strings(segment: Mapping[str, np.ndarray], name: str, start: int, stop: int) -> tuple[str, ...]:
    bounds = segment[name][start : stop + 1].tolist()
    return tuple(segment[f"{name}_bytes"][a:b].tobytes().decode() for a, b in itertools.pairwise(bounds))


def _checksum(arrays: Mapping[str, np.ndarray]) -> str:
    checksum = 0
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        checksum = zlib.crc32(json.dumps([name, str(array.dtype), array.shape]).encode(), checksum)
        checksum = zlib.crc32(array.reshape(-1).view(np.uint8), checksum)
    return f"{checksum:08x}"


class PrecomputedSource:
    """Source with features by tower, "image" or "text", in place of the images or captions of its samples.

    With features of images it reads nothing from the source. "captions" of its examples are rows of features, if there
    are features of captions.
    """

    def __init__(self, source: Source, stores: Mapping[str, FeatureStore]):
        self.name, self.split = source.name, source.split
        self._source, self._stores = source, dict(stores)

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Example:
        if "image" not in self._stores:
            return self._with_features(index, self._source[index])
        store = self._stores["image"]
        captions = store.captions(index)
        example: Example = {
            "image": store.features(index)[0],
            "caption": captions[0],
            "captions": captions,
            "label": -1,  # unused in training
        }
        return self._with_features(index, example)

    def __getitems__(self, indices: Sequence[int]) -> list[Example]:
        """Read several examples, in one call of a `BatchedSource`."""
        if "image" in self._stores or not isinstance(self._source, BatchedSource):
            return [self[index] for index in indices]
        return [self._with_features(*pair) for pair in zip(indices, self._source.__getitems__(indices), strict=True)]

    def describe(self, index: int) -> str:
        """Name a record of the source."""
        return describe(self._source, index)

    def _with_features(self, index: int, example: Example) -> Example:
        if "text" not in self._stores:
            return example
        rows: Any = tuple(self._stores["text"].features(index))
        if len(rows) != len(example["captions"]):
            raise bad_record(
                self.describe(index), f"{len(rows)} cached features of {len(example['captions'])} captions"
            )
        return {**example, "caption": rows[0], "captions": rows}


@dataclasses.dataclass(frozen=True)
class TeacherTokens:
    """Token ids of a teacher whose tokenizer is not the student's."""

    tokenizer: BaseTokenizer

    def __call__(self, samples: Sequence[int], captions: Sequence[str], numbers: Sequence[int]) -> dict[str, Any]:
        """Return {"teacher_text": int32 [rows, L]} of the captions, drawn for the rows of a batch."""
        return {"teacher_text": self.tokenizer(captions)}


@dataclasses.dataclass(frozen=True)
class TeacherFeatures:
    """Cached features of a teacher by tower, "image" and "text"."""

    stores: Mapping[str, FeatureStore]

    def __call__(self, samples: Sequence[int], captions: Sequence[str], numbers: Sequence[int]) -> dict[str, Any]:
        """Return {"teacher_image": [rows, D], "teacher_text": [rows, D]} of captions by their numbers in the samples.

        Raises:
          ValueError: the cache lacks a sample, which could not be read when the features were computed.
        """
        image = [self._row("image", sample, 0) for sample in samples]
        text = [self._row("text", *row) for row in zip(samples, numbers, strict=True)]
        return {"teacher_image": np.stack(image), "teacher_text": np.stack(text)}

    def _row(self, tower: str, index: int, number: int) -> np.ndarray:
        features = self.stores[tower].features(index)
        if number >= len(features):
            raise ValueError(
                f"expected cached {tower} features of the teacher for sample {index}, got {len(features)} rows; the "
                f"sample could not be read when they were computed, delete {self.stores[tower].folder} to try again"
            )
        return features[number]
