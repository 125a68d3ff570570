"""Counts of the bad records of a training run.

Readers in threads, worker processes and gradient-cache passes only report the bad records of a chunk, under a reserved
key of the chunk. `BadRecords` takes them from the batch. The counts and the limit thus depend on the batches alone.
"""

import collections
import logging
import threading
from collections.abc import Iterable, Mapping, Sized

import numpy as np

from infcl_jax.data.sources.base import BadRecordError, Source, describe, source_name
from infcl_jax.data.sources.mixture import MixtureSource

BAD_RECORDS = "bad_records"  # key of the bad records of a chunk or batch
_FEWEST = 100  # largest number of bad records of a small dataset
_DTYPE = np.dtype([("index", np.int64), ("message", "U512")])  # a longer message is cut

_logger = logging.getLogger(__name__)


def as_array(messages: Mapping[int, str]) -> np.ndarray:
    """Pack messages by sample index, for the key `BAD_RECORDS` of a chunk."""
    return np.array(sorted(messages.items()), _DTYPE)


def bad_record_limit(limit: float | None, source: Sized) -> int:
    """Return the largest number of bad records: `limit` from 1 on, or 0; below 1 a fraction of the samples.

    None is 1 % of the samples, at least 100.
    """
    if limit is None:
        return max(_FEWEST, len(source) // 100)
    return int(round(limit * len(source), 6) if 0 < limit < 1 else limit)  # 0.29 * 100 is below 29


def describe_limit(limit: float | None) -> str:
    """Name the setting of `bad_record_limit`, with the meaning of None."""
    return f"max_bad_records={limit}" + (f" (1 % of the samples, at least {_FEWEST})" if limit is None else "")


class BadRecords:
    """Different bad records of a run, with a limit, see `bad_record_limit`."""

    def __init__(self, source: Source, limit: float | None):
        self.source, self._setting, self._limit = source, limit, bad_record_limit(limit, source)
        self._indices: set[int] = set()
        self._lock = threading.RLock()  # gradient caching reads chunks in several threads

    def counts(self) -> dict[str, int]:
        """Count the bad records of each source; the components of a mixture are sources."""
        names = self.source.names if isinstance(self.source, MixtureSource) else (self.source.name,)
        counts = collections.Counter(source_name(self.source, index) for index in self.indices())
        return {name: counts[name] for name in names}

    def summary(self) -> str:
        """List the counts in one line; "" without bad records."""
        counts = ", ".join(f"{count} of {name}" for name, count in self.counts().items() if count)
        return counts and f"replaced bad records: {counts}"

    def indices(self) -> list[int]:
        """Return the sample indices in ascending order."""
        with self._lock:
            return sorted(self._indices)

    def restore(self, indices: Iterable[int]) -> None:
        """Replace all records by those of a checkpoint."""
        with self._lock:
            self._indices = set(indices)

    def add(self, indices: Iterable[int]) -> None:
        """Add records that another process read.

        Raises:
          BadRecordError: there are more than the limit.
        """
        for index in indices:
            self._add(index, f"bad {describe(self.source, index)}")

    def take(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Remove the bad records from a batch or chunk and count them.

        A new record gives one warning.

        Raises:
          BadRecordError: there are more than the limit.
        """
        batch = dict(batch)
        for index, message in batch.pop(BAD_RECORDS).tolist():
            if self._add(index, message):
                _logger.warning("%s; replaced by the next record", message)
        return batch

    def _add(self, index: int, message: str) -> bool:
        """Add a record; tell if it is new."""
        with self._lock:
            if index in self._indices:
                return False
            if len(self._indices) >= self._limit:
                raise BadRecordError(
                    f"{message}; more than the {self._limit} bad records that {describe_limit(self._setting)} allows, "
                    "check the data" + (f" ({self.summary()})" if self._indices else "")
                )
            self._indices.add(index)
            return True
