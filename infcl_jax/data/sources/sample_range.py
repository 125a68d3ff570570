"""Ranges of the samples of a source."""

from __future__ import annotations

from infcl_jax.data.sources.base import (
    Classes,
    DroppingSource,
    Example,
    Source,
    check_index,
    classes,
    describe,
    is_captioned,
    record_key,
    shard_name,
    source_name,
)


class SampleRange:
    """Samples [start, stop) of a source.

    Args:
      source: source of the samples.
      start: first sample.
      stop: sample after the last one.
      split: name of the range.
    """

    def __init__(self, source: Source, start: int, stop: int, split: str):
        self.name, self.split = source.name, split
        self.captioned = is_captioned(source)
        self._source, self._start, self._size = source, start, stop - start

    @property
    def dropped(self) -> dict[str, int]:
        """Number of samples that the whole source leaves out, by reason."""
        return dict(self._source.dropped) if isinstance(self._source, DroppingSource) else {}

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Example:
        check_index(index, self._size)
        return self._source[self._start + index]

    def classes(self) -> Classes:
        """Return the classes of the underlying source."""
        return classes(self._source)

    def key(self, index: int) -> str:
        """Return the name of a record in the underlying source."""
        return record_key(self._source, self._start + index)

    def describe(self, index: int) -> str:
        """Name a record of the underlying source."""
        return describe(self._source, self._start + index)

    def shard(self, index: int) -> str:
        """Name the file of a record."""
        return shard_name(self._source, self._start + index)

    def source_name(self, index: int) -> str:
        """Name the dataset of a record."""
        return source_name(self._source, self._start + index)
