"""Sample indices of training batches, and the names of their records."""

from collections.abc import Sequence
from typing import Any

import grain

from infcl_jax.data.sources.base import Source, shard_name, source_name

_NAMES = 3  # shards named in a line; a chunk of shuffled records can have as many as it has rows


class ProcessRows(grain.MapDataset):
    """Rows of one process as (global row, sample index) pairs.

    A process has one contiguous block of each global batch. Indices beyond the length address further epochs, in the
    parent, which has the sample index of every global row of an epoch, and in this dataset.
    """

    def __init__(self, parent: grain.MapDataset, batch_size: int, process_index: int, process_count: int):
        super().__init__(parent)
        self._batch_size = batch_size
        self._local_size = batch_size // process_count
        self._offset = process_index * self._local_size

    def __len__(self) -> int:
        return len(self.parents[0]) // self._batch_size * self._local_size

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.slice(index)
        step, local_row = divmod(index, self._local_size)
        row = step * self._batch_size + self._offset + local_row
        return row, self.parents[0][row]

    def global_batch(self, number: int) -> list[int]:
        """Return the sample indices of a global batch, over all processes; the first batch has the number 0."""
        rows = range(number * self._batch_size, (number + 1) * self._batch_size)
        return [int(self.parents[0][row]) for row in rows]


def describe_records(source: Source, indices: Sequence[int]) -> str:
    """Name the datasets and shards of records without reading them."""
    sources = ", ".join(dict.fromkeys(source_name(source, index) for index in indices))
    shards = list(dict.fromkeys(filter(None, (shard_name(source, index) for index in indices))))
    text = f"{len(indices)} records of {sources}"
    if shards:
        more = f" and {len(shards) - _NAMES} more" if len(shards) > _NAMES else ""
        text += f" in {', '.join(shards[:_NAMES])}{more}"
    return text
