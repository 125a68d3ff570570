"""Plan of packed texts: the place of each text in rows of tokens.

See `infcl_jax.ops.packing`.
"""

import dataclasses
import heapq
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Int32, Integer

from infcl_jax.ops.packing import PackedTokens, rows_of
from infcl_jax.runtime.processes import anywhere

ROW_LENGTH = 128  # tokens; a multiple of the attention kernels' tile
MOST = 0.9  # of the padded tokens that packing may compute; it costs a little of its own
BATCHES = 200  # random batches of a profile
HEAVIEST = 5  # of their shards, by tokens, which are then placed
MARGIN = 0.35  # of the rows beyond the mean, added: 2.8 standard deviations become 3.8, one batch of some 10,000
PACKED_TEXTS = 8  # packed texts of a shard for each padded one; CLIP's prompts have about 10 of 77 tokens


@dataclasses.dataclass(frozen=True)
class Packing:
    """Size of the rows of packed texts.

    Examples:
      >>> lengths = np.array([9, 9, 5, 4, 2])
      >>> packing = Packing.of(lengths, shard=3, row_length=16)
      >>> packed = packing.pack(np.ones((5, 9), np.int32), lengths, block=5)
      >>> packed.row.tolist(), packed.offset.tolist()
      ([0, 1, 1, 0, 0], [0, 0, 9, 0, 4])

    Attributes:
      row_length: tokens of a row.
      rows: rows of a full shard.
      shard: texts of a full shard: those of one device, or with gradient caching of one chunk on one device.
    """

    row_length: int
    rows: int
    shard: int

    @classmethod
    def of(
        cls, lengths: Integer[np.ndarray, "n"], shard: int, row_length: int = ROW_LENGTH, shards: int = 1
    ) -> "Packing":
        """Choose the number of rows by a profile of text lengths.

        The fullest shard of some random batches fits, with a margin. The lengths are a sample, so each batch is of
        another sample of as many of them.

        Args:
          lengths: tokens of some texts of the dataset.
          shard: texts of a full shard.
          row_length: tokens of a row, at least the longest text.
          shards: shards of a batch.

        Raises:
          ValueError: there are no lengths, or one is not from 1 to `row_length`.
        """
        if not len(lengths) or lengths.min() < 1 or lengths.max() > row_length:
            given = f"{lengths.min()} to {lengths.max()}" if len(lengths) else "no texts"
            raise ValueError(f"expected texts of 1 to {row_length} tokens, the row length, got {given}")
        rng = np.random.default_rng(0)

        def fullest() -> np.ndarray:
            batch = rng.choice(rng.choice(lengths, len(lengths)), (shards, shard))
            return batch[batch.sum(1).argmax()]

        draws = heapq.nlargest(HEAVIEST, (fullest() for _ in range(BATCHES)), np.sum)
        needed, mean = max(_rows_needed(draw, row_length) for draw in draws), shard * lengths.mean() / row_length
        return cls(row_length, min(shard, needed + int(MARGIN * (needed - mean))), shard)

    def __str__(self) -> str:
        """Format as "12 rows of 128 tokens for 64 texts (24.0 each)"."""
        return f"{self.rows} rows of {self.row_length} tokens for {self.shard} texts ({self.tokens_per_text:.1f} each)"

    @property
    def tokens_per_text(self) -> float:
        """Tokens that a step computes for each text."""
        return self.rows * self.row_length / self.shard

    def pack(
        self, tokens: Integer[np.ndarray, "b t"], lengths: Integer[np.ndarray, "b"], block: int
    ) -> PackedTokens | None:
        """Plan the rows of a batch.

        Args:
          tokens: token ids [b, t].
          lengths: tokens of each text that count, from the text tower's `lengths`.
          block: texts of one device, whose shards are consecutive; the last may be smaller.

        Returns:
          The tokens with their plan; None if the texts of a shard do not fit, or one has no length.
        """
        if lengths.min() < 1:
            return None
        row, offset = (np.empty(len(tokens), np.int32) for _ in range(2))
        for first in range(0, len(tokens), block):
            for start in range(first, first + block, self.shard):
                texts = slice(start, min(start + self.shard, first + block))
                rows = rows_of(texts.stop - texts.start, self.rows, self.shard)
                positions = _places(lengths[texts], rows, self.row_length)
                if positions is None:
                    return None
                row[texts], offset[texts] = positions
        return PackedTokens(tokens, row, offset, lengths.astype(np.int32), **dataclasses.asdict(self))

    def shapes(self, tokens: jax.ShapeDtypeStruct) -> PackedTokens:
        """Return the shapes of packed texts, given the shape of their tokens [b, t]."""
        vector = jax.ShapeDtypeStruct(tokens.shape[:1], np.int32)
        return PackedTokens(tokens, vector, vector, vector, **dataclasses.asdict(self))

    @classmethod
    def within(cls, texts: int, length: int) -> "Packing | None":
        """Return rows of at most as many tokens as padded texts.

        The rows do not depend on the texts, so one compiled program encodes all.

        Args:
          texts: number of padded texts. A shard has up to `PACKED_TEXTS` times as many.
          length: tokens of a padded text.

        Returns:
          The packing; None if the padded texts have fewer tokens than a row.
        """
        row_length = -(-length // ROW_LENGTH) * ROW_LENGTH
        rows = texts * length // row_length
        return cls(row_length, rows, PACKED_TEXTS * texts) if rows else None

    def pack_first(
        self, tokens: Integer[np.ndarray, "n t"], lengths: Integer[np.ndarray, "n"], devices: int
    ) -> tuple[PackedTokens, Bool[np.ndarray, "b"]]:
        """Pack the first texts that fit into full shards, in order.

        Examples:
          >>> lengths = np.array([9, 9, 5, 4, 2])
          >>> packing = Packing(row_length=16, rows=1, shard=3)
          >>> packed, is_text = packing.pack_first(np.ones((5, 9), np.int32), lengths, devices=2)
          >>> packed.length.tolist(), is_text.tolist()
          ([9, 0, 0, 9, 5, 0], [True, False, False, True, True, False])

        Args:
          tokens: token ids [n, t] of n >= 1 texts.
          lengths: space of each text in a row, at least its tokens that count.
          devices: devices, which encode a shard each.

        Returns:
          The texts of all shards, and a mask of them; other slots have length 0.
        """
        slots = devices * self.shard
        row, length, offset = np.zeros(slots, np.int32), np.zeros(slots, np.int32), np.ones(slots, np.int32)
        index, is_text, start = np.zeros(slots, int), np.zeros(slots, bool), 0
        for first in range(0, slots if len(tokens) else 0, self.shard):
            own_row, own_offset = self._fill(lengths[start:])
            filled, texts = slice(first, first + len(own_row)), slice(start, start + len(own_row))
            index[filled], is_text[filled] = np.arange(texts.start, texts.stop), True
            row[filled], offset[filled], length[filled] = own_row, own_offset, lengths[texts]
            start = texts.stop
        length = np.minimum(length, tokens.shape[1])
        return PackedTokens(tokens[index], row, offset, length, **dataclasses.asdict(self)), is_text

    def _fill(self, lengths: Integer[np.ndarray, "n"]) -> tuple[Int32[np.ndarray, "m"], Int32[np.ndarray, "m"]]:
        """Place the first texts that fit into a shard."""
        space = self.rows * self.row_length
        count = int(np.searchsorted(np.cumsum(lengths[: self.shard]), space, side="right"))
        while (positions := _places(lengths[:count], self.rows, self.row_length)) is None:
            count -= -(-count // 64)  # rows are nearly full, or hold few texts each
        return positions


class PackedEntry(NamedTuple):
    """Packing of one entry of a batch.

    Attributes:
      packing: size of its rows.
      lengths: function from token ids to the tokens of each text that count, of its tower.
      tokens: mean number of these tokens in the profile.
    """

    packing: Packing
    lengths: Callable[[Integer[np.ndarray, "b t"]], Integer[np.ndarray, "b"]]
    tokens: float


@dataclasses.dataclass(eq=False)
class TextPacker:
    """Packing of the texts of batches, by entry.

    A batch whose texts do not all fit stays padded, on all processes.

    Examples:
      >>> lengths = np.array([9, 9, 5, 4, 2])
      >>> entry = PackedEntry(Packing.of(lengths, shard=5, row_length=16), np.count_nonzero, lengths.mean())
      >>> packer = TextPacker({"text": entry}, devices=1)

    Attributes:
      entries: packing by name; others are left as they are.
      devices: devices of this process, which share the rows of a batch evenly.
      padded: batches so far that did not fit, or chunks that are packed alone.
      waits: whether a process waits for the others.
      seconds: time of these waits so far.
    """

    entries: Mapping[str, PackedEntry]
    devices: int
    padded: int = 0
    waits: bool = False
    seconds: float = 0.0

    def plan(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Pack the texts of this process's rows, unless some do not fit."""
        packed = {
            name: entry.packing.pack(batch[name], entry.lengths(batch[name]), len(batch[name]) // self.devices)
            for name, entry in self.entries.items()
        }
        return batch if any(texts is None for texts in packed.values()) else batch | packed

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Pack the texts of a batch, see `plan` and `agree`."""
        return self.agree(self.plan(batch))

    def agree(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return a planned batch, padded unless all processes have packed theirs.

        All processes must call this.
        """
        if not self.entries or not self._anywhere(not all(isinstance(batch[n], PackedTokens) for n in self.entries)):
            return batch
        self.padded += 1
        return {name: rows.tokens if isinstance(rows, PackedTokens) else rows for name, rows in batch.items()}

    def _anywhere(self, flag: bool) -> bool:
        """Call `anywhere`, and measure its time."""
        start, self.waits = time.perf_counter(), True
        try:
            return anywhere(flag)
        finally:
            self.waits, self.seconds = False, self.seconds + time.perf_counter() - start


PADDED = TextPacker({}, devices=1)  # packs nothing


def _rows_needed(lengths: Integer[np.ndarray, "n"], row_length: int) -> int:
    """Return the number of rows that `_places` needs."""
    row, _ = _places(lengths, len(lengths), row_length)  # type: ignore[misc]  # a row for each always suffices
    return int(row.max()) + 1


def _places(
    lengths: Integer[np.ndarray, "n"], rows: int, row_length: int
) -> tuple[Int32[np.ndarray, "n"], Int32[np.ndarray, "n"]] | None:
    """Place texts by best fit in decreasing length.

    Each goes to the row with the least space that holds it. Texts of one length are placed together, so the time
    hardly grows with their number.

    Returns:
      Row of each text and its offset there; None if the rows do not hold all.
    """
    order = np.argsort(-lengths, kind="stable")
    row, offset = np.empty(len(lengths), np.int32), np.empty(len(lengths), np.int32)
    spaces = {row_length: list(range(rows - 1, -1, -1))}  # rows by their space; the last is filled first
    available = 1 << row_length  # bit s: whether a row has space s
    placed = 0
    values, counts = np.unique(lengths, return_counts=True)
    for length, count in zip(values.tolist()[::-1], counts.tolist()[::-1], strict=True):
        while count:
            fitting = available >> length
            if not fitting:
                return None
            space = length + (fitting & -fitting).bit_length() - 1
            each = space // length
            free = spaces[space]
            taken = min(len(free), -(-count // each))
            chosen, free[-taken:] = free[: -taken - 1 : -1], []
            number = min(count, taken * each)
            texts = order[placed : placed + number]
            row[texts] = np.repeat(chosen, each)[:number]
            offset[texts] = row_length - space + length * (np.arange(number) % each)
            available ^= 0 if free else 1 << space
            partial = number - (taken - 1) * each  # texts in the last row
            for rows_left, used in ((chosen[:-1], each), (chosen[-1:], partial)):
                left = space - used * length
                if rows_left and left:
                    spaces.setdefault(left, []).extend(rows_left[::-1])
                    available |= 1 << left
            placed, count = placed + number, count - number
    return row, offset
