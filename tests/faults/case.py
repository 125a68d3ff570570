"""Dataset with damaged or hostile samples."""

import dataclasses
from collections.abc import Collection, Mapping

import numpy as np


@dataclasses.dataclass(frozen=True)
class Case:
    """Dataset of one input, and what must come of it."""

    name: str  # kind of damage
    dataset: str  # of `load_source`
    expected: Mapping[str, np.ndarray | None]  # pixels of captions that must be read, uint8 [H, W, 3]; None: any pixels
    refused: Collection[str] = ()  # captions of samples that must be bad
    tolerance: int = 0  # largest difference of the expected pixels, in levels
    may_be_refused: bool = False  # the whole dataset


def flip(data: bytes, rng: np.random.Generator) -> bytes:
    """Flip up to 8 random bits."""
    changed = bytearray(data)
    for position in rng.integers(0, len(data), rng.integers(1, 9)):
        changed[position] ^= 1 << int(rng.integers(8))
    return bytes(changed)


def cut(data: bytes, rng: np.random.Generator) -> bytes:
    """Truncate at a random byte."""
    return data[: rng.integers(len(data))]


def delete(data: bytes, rng: np.random.Generator) -> bytes:
    """Delete up to 700 bytes."""
    start = rng.integers(len(data))
    return data[:start] + data[start + rng.integers(1, 700) :]


def repeat(data: bytes, rng: np.random.Generator) -> bytes:
    """Repeat up to 700 bytes."""
    start = rng.integers(len(data))
    return data[:start] + data[start : start + rng.integers(1, 700)] + data[start:]


def overwrite(data: bytes, rng: np.random.Generator) -> bytes:
    """Overwrite a range with random bytes."""
    start, stop = sorted(rng.integers(0, len(data) + 1, 2).tolist())
    return data[:start] + rng.integers(0, 256, stop - start, dtype=np.uint8).tobytes() + data[stop:]


def zeros(data: bytes, rng: np.random.Generator) -> bytes:
    """Zero a range, as a lost block of a disk does."""
    start, stop = sorted(rng.integers(0, len(data) + 1, 2).tolist())
    return data[:start] + bytes(stop - start) + data[stop:]


BYTES = (flip, cut, delete, repeat, overwrite, zeros)


def choose(options, rng: np.random.Generator):
    """Choose one of a sequence."""
    return options[int(rng.integers(len(options)))]
