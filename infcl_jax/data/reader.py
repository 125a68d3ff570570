"""Reading of decoded examples, with replacements for bad records, and counts of these.

Readers in threads, worker processes and gradient-cache passes only report the bad records of a chunk, under a reserved
key of the chunk. `BadRecords` takes them from the batch. The counts and the limit thus depend on the batches alone.
"""

import collections
import contextlib
import dataclasses
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized

import numpy as np

from infcl_jax.data.decode.api import DecodedExample, ToImage, decode_example, pixels
from infcl_jax.data.parallelism import DECODE, READ, timed
from infcl_jax.data.sources.base import BadRecordError, BatchedSource, Example, Source, describe, source_name
from infcl_jax.data.sources.mixture import MixtureSource

MAX_ATTEMPTS = 16  # maximum number of consecutive records tried, the bad record included
BAD_RECORDS = "bad_records"  # key of the bad records of a chunk or batch
_FEWEST = 100  # largest number of bad records of a small dataset
_DTYPE = np.dtype([("index", np.int64), ("message", "U512")])  # a longer message is cut

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class RecordReader:
    """Reader of decoded examples.

    With `replace`, the next good record replaces a bad one; otherwise bad records are errors, or with `skip` left out.
    The examples depend on their indices alone, not on what was read before, so every worker and every resumed run reads
    the same.
    """

    source: Source
    replace: bool = True
    skip: bool = False

    def read(
        self, indices: Sequence[int], to_image: Sequence[ToImage] | None = None
    ) -> tuple[list[tuple[DecodedExample, int]], dict[int, str]]:
        """Read records, each with its own decoder of images; None: `pixels` for all.

        Returns:
          (example, its sample index) for each requested index that is not left out; and the messages of bad records by
          sample index.

        Raises:
          BadRecordError: a record and its replacements are bad.
        """
        examples: Sequence[Example | None] = [None] * len(indices)
        # One call for all records is much cheaper. After a bad record, they are read one by one.
        if isinstance(self.source, BatchedSource):
            with contextlib.suppress(BadRecordError), timed(READ):
                examples = self.source.__getitems__(indices)
        bad: dict[int, str] = {}
        to_image = [pixels] * len(indices) if to_image is None else to_image
        read = []
        for row in zip(indices, examples, to_image, strict=True):
            try:
                read.append(self._read(*row, bad))
            except BadRecordError:
                if not self.skip:
                    raise
        return read, bad

    def _read(
        self, index: int, example: Example | None, to_image: ToImage, bad: dict[int, str]
    ) -> tuple[DecodedExample, int]:
        def decode(candidate: int) -> DecodedExample:
            known = example if candidate == index else None
            if known is None:
                with timed(READ):
                    known = self.source[candidate]
            with timed(DECODE):
                return decode_example(self.source, candidate, known, to_image)

        return read_good(decode, index, len(self.source), bad, MAX_ATTEMPTS if self.replace else 1)


def read_good[Record](
    read: Callable[[int], Record], index: int, size: int, bad: dict[int, str], attempts: int = MAX_ATTEMPTS
) -> tuple[Record, int]:
    """Read a record, or the next good one in place of a bad one; the first one follows the last.

    Args:
      bad: dictionary that receives the messages of bad records by sample index.
      attempts: number of records to try.

    Returns:
      The record and its sample index.

    Raises:
      BadRecordError: all of them are bad.
    """
    count = min(attempts, size)
    for candidate in (offset % size for offset in range(index, index + count)):
        try:
            return read(candidate), candidate
        except BadRecordError as error:
            bad[candidate] = last = str(error)
    raise BadRecordError(last if count == 1 else f"{last}; the {count} records from {index} on are all bad")


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
        """Replace all records by a checkpoint's."""
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
