"""Sample indices of training batches, and the names of their records."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from infcl_jax.data.sources.base import Source, shard_name, source_name

_NAMES = 3  # shards named in a line; a chunk of shuffled records can have as many as it has rows


@dataclasses.dataclass(frozen=True)
class SampleOrder:
    """Training order of a source, and this process's rows of it.

    Attributes:
      source: source of the records.
      order: sample index of every global row, endless.
      batch_size: rows of a global batch.
      first_row: first row of this process in a global batch.
      local_size: rows of this process in a global batch.
    """

    source: Source
    order: Any
    batch_size: int
    first_row: int
    local_size: int

    def batch(self, number: int) -> list[int]:
        """Return the sample indices of a global batch, int [batch_size].

        Args:
          number: number of the batch, from 0.
        """
        return self._indices(range(number * self.batch_size, (number + 1) * self.batch_size))

    def local(self, start: int, stop: int) -> list[int]:
        """Return the sample indices of rows of this process.

        Args:
          start: first row, over all batches of this process.
          stop: row after the last.
        """
        rows = [divmod(row, self.local_size) for row in range(start, stop)]
        return self._indices([batch * self.batch_size + self.first_row + row for batch, row in rows])

    def describe(self, indices: Sequence[int]) -> str:
        """Name the sources and shards of records without reading them."""
        sources = ", ".join(dict.fromkeys(source_name(self.source, index) for index in indices))
        shards = list(dict.fromkeys(filter(None, (shard_name(self.source, index) for index in indices))))
        text = f"{len(indices)} records of {sources}"
        if shards:
            more = f" and {len(shards) - _NAMES} more" if len(shards) > _NAMES else ""
            text += f" in {', '.join(shards[:_NAMES])}{more}"
        return text

    def _indices(self, rows: Sequence[int]) -> list[int]:
        return [int(self.order[row]) for row in rows]


class ArrivedChunks:
    """Counter of the chunks that leave the reading threads or workers, in order.

    Attributes:
      count: number of chunks.
    """

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, chunk: Any) -> Any:
        """Count a chunk and return it."""
        self.count += 1
        return chunk
