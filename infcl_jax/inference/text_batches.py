"""Batches of padded or packed texts for an encoder."""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from jaxtyping import Bool, Int, Integer

from infcl_jax.data.packing import MOST, PACKED_TEXTS, Packing
from infcl_jax.ops.packing import PackedTokens
from infcl_jax.runtime.processes import gather

TextBatch = tuple[PackedTokens | np.ndarray, Bool[np.ndarray, "b"]]  # inputs of the encoder, and a mask of the texts


@dataclasses.dataclass(frozen=True)
class TextBatches:
    """Shape of batches of texts, so that one compiled program encodes all.

    A packed batch has at most as many tokens as a padded one, and up to `PACKED_TEXTS` times as many texts.

    Attributes:
      rows: texts of a padded batch.
      devices: devices that share a batch evenly.
      tower: text tower of packed texts; None: padded.
      packing: packing of the texts of a device; None: padded.
    """

    rows: int
    devices: int
    tower: Any = None
    packing: Packing | None = None

    @classmethod
    def packed(cls, tower: Any, length: int, rows: int, devices: int) -> "TextBatches | None":
        """Return the shape of packed texts; None if padded texts do not fill a row."""
        packing = Packing.within(rows // devices, length)
        return None if packing is None else cls(rows, devices, tower, packing)

    def first(self, tokens: Integer[np.ndarray, "n t"]) -> TextBatch:
        """Make a batch of the first texts that fit, padded if one cannot be packed."""
        if self.packing is not None and self.packs(tokens):
            return self.packing.pack_first(tokens, self._lengths(tokens, self.packing.row_length), self.devices)
        padding = max(0, self.rows - len(tokens))
        return np.pad(tokens[: self.rows], ((0, padding), (0, 0))), np.arange(self.rows) < len(tokens)

    def split(self, stream: Iterable[Integer[np.ndarray, "n t"]]) -> Iterator[TextBatch]:
        """Make batches of texts in order.

        Args:
          stream: token ids of `rows` texts at a time, the last of fewer. It is read as far as a batch needs.
        """
        stream, ahead = iter(stream), 1 if self.packing is None else PACKED_TEXTS
        waiting = list(itertools.islice(stream, ahead))
        while waiting:
            tokens = np.concatenate(waiting)
            inputs, is_text = self.first(tokens)
            yield inputs, is_text
            left = tokens[is_text.sum() :]
            waiting = [left] if len(left) else []
            waiting += itertools.islice(stream, ahead - -(-len(left) // self.rows))

    def packs(self, tokens: Integer[np.ndarray, "n t"]) -> bool:
        """Return whether all texts can be packed."""
        return bool(self.tower.lengths(tokens).all())

    def _lengths(self, tokens: Integer[np.ndarray, "n t"], row_length: int) -> Int[np.ndarray, "n"]:
        """Return the space of each text in a row.

        A text with an id outside of the vocabulary gets a whole row, since its NaN would spread to others.
        """
        unknown = (tokens >= self.tower.vocab_size).any(1)
        return np.where(unknown, row_length, self.tower.lengths(tokens))


def text_batches(
    tower: Any, stream: Iterable[Integer[np.ndarray, "n t"]], rows: int, devices: int
) -> Iterator[TextBatch]:
    """Make batches of texts in order.

    All have one shape, unless some texts cannot be packed.

    Args:
      tower: text tower that encodes packed texts; None: they stay padded.
      stream: token ids of `rows` texts at a time, the last of fewer.
      rows: texts of a padded batch, a multiple of `devices`.
      devices: devices that share a batch evenly.
    """
    if tower is None:
        return TextBatches(rows, devices).split(stream)
    stream = iter(stream)
    known = list(itertools.islice(stream, PACKED_TEXTS))
    return _choose(tower, np.concatenate(known), rows, devices).split(itertools.chain(known, stream))


def agreed_batches(tower: Any, tokens: Integer[np.ndarray, "n t"], rows: int, devices: int) -> Iterator[TextBatch]:
    """Make batches of this process's texts, alike on all processes.

    Processes have different numbers of texts but must run the same steps, so some batches may have no text. All
    processes must call this. They pack their texts if that saves steps.

    Args:
      tower: text tower that encodes packed texts; None: they stay padded.
      tokens: token ids [n, t] of the texts of this process.
      rows: texts of a padded batch of this process, a multiple of `devices`.
      devices: devices of this process.
    """
    stream = [tokens[start : start + rows] for start in range(0, len(tokens), rows)]
    padded = TextBatches(rows, devices)
    packed = (tower and TextBatches.packed(tower, tokens.shape[1], rows, devices)) or padded
    counts = [sum(1 for _ in batches.split(stream)) for batches in (packed, padded)]
    if packed is not padded and not packed.packs(tokens):
        counts[0] = len(tokens)  # more than padded batches, or as many
    packed_steps, padded_steps = (max(column) for column in zip(*gather(counts), strict=True))
    batches = packed if packed_steps < padded_steps else padded
    inputs, is_text = batches.first(np.zeros((1, tokens.shape[1]), tokens.dtype))
    empty = itertools.repeat((inputs, np.zeros_like(is_text)))
    return itertools.islice(itertools.chain(batches.split(stream), empty), min(packed_steps, padded_steps))


def _choose(tower: Any, tokens: Integer[np.ndarray, "n t"], rows: int, devices: int) -> TextBatches:
    """Choose the smallest batch of all texts, or else the largest one.

    The sizes are powers of two, so programs are few. Texts stay padded if the largest batch saves few tokens.
    """
    smaller = itertools.takewhile(lambda size: size < rows, (devices << n for n in itertools.count()))
    for size in (*smaller, rows):
        batches = TextBatches.packed(tower, tokens.shape[1], size, devices)
        least = len(tokens) if size < rows else rows / MOST  # texts
        if batches is not None and batches.first(tokens)[1].sum() >= least:
            return batches
    return TextBatches(rows, devices)
