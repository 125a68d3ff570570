"""Plan of packed texts: the place of each text in rows of tokens.

See `infcl_jax.ops.packing`.
"""

import dataclasses
import heapq

import numpy as np
from jaxtyping import Int32, Integer

from infcl_jax.ops.packing import PackedTokens, rows_of

ROW_LENGTH = 128  # tokens; a multiple of the attention kernels' tile
DRAWS = 200  # random shards of a profile; about as many batches pass until one does not fit
HEAVIEST = 5  # of these, by their tokens, which are then placed


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
    def of(cls, lengths: Integer[np.ndarray, "n"], shard: int, row_length: int = ROW_LENGTH) -> "Packing":
        """Choose the number of rows by a profile of text lengths.

        The fullest of some random shards fits.

        Args:
          lengths: tokens of some texts of the dataset.
          shard: texts of a full shard.
          row_length: tokens of a row, at least the longest text.

        Raises:
          ValueError: there are no lengths, or one is not from 1 to `row_length`.
        """
        if not len(lengths) or lengths.min() < 1 or lengths.max() > row_length:
            given = f"{lengths.min()} to {lengths.max()}" if len(lengths) else "no texts"
            raise ValueError(f"expected texts of 1 to {row_length} tokens, the row length, got {given}")
        rng = np.random.default_rng(0)
        draws = (rng.choice(lengths, shard) for _ in range(DRAWS))
        return cls(row_length, max(_rows_needed(d, row_length) for d in heapq.nlargest(HEAVIEST, draws, np.sum)), shard)

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
          The tokens with their plan; None if the texts of a shard do not fit.
        """
        row, offset = (np.empty(len(tokens), np.int32) for _ in range(2))
        for first in range(0, len(tokens), block):
            for start in range(first, first + block, self.shard):
                texts = slice(start, min(start + self.shard, first + block))
                rows = rows_of(texts.stop - texts.start, self.rows, self.shard)
                positions = _places(lengths[texts], rows, self.row_length)
                if positions is None:
                    return None
                row[texts], offset[texts] = positions
        length = lengths.astype(np.int32)
        return PackedTokens(tokens, row, offset, length, **dataclasses.asdict(self))


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
