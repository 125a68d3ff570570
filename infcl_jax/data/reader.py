"""Reading of decoded examples, with replacements for bad records."""

from __future__ import annotations

import collections
import contextlib
import logging
from collections.abc import Sequence

from infcl_jax.data.decode.api import DecodedExample, decode_example
from infcl_jax.data.sources.base import BadRecordError, BatchedSource, Example, Source, source_name

_MAX_REPLACEMENTS = 16  # maximum number of consecutive records tried, the bad record included

_logger = logging.getLogger(__name__)


class RecordReader:
    """Reader of (example, index) pairs that replaces bad records by good ones.

    The next good record replaces a bad one, whatever was read before, so a resumed run reads the same examples. Each
    training process and each worker process counts its own bad records.
    """

    def __init__(self, source: Source, max_bad_records: int):
        self._source = source
        self._max_bad_records = max_bad_records
        self._bad: set[int] = set()

    def bad_records(self) -> dict[str, int]:
        """Count the different bad records so far by the name of their source."""
        return dict(collections.Counter(source_name(self._source, index) for index in sorted(self._bad)))

    def read(self, indices: Sequence[int]) -> list[tuple[DecodedExample, int]]:
        """Read records, replacing bad ones."""
        examples: Sequence[Example | None] = [None] * len(indices)
        # One call for all records is much cheaper. After a bad record, they are read one by one.
        if isinstance(self._source, BatchedSource):
            with contextlib.suppress(BadRecordError):
                examples = self._source.__getitems__(indices)
        return [self._decode_or_replace(*row) for row in zip(indices, examples, strict=True)]

    def _decode_or_replace(self, index: int, example: Example | None) -> tuple[DecodedExample, int]:
        size = len(self._source)
        for offset in range(min(_MAX_REPLACEMENTS, size)):
            candidate = (index + offset) % size
            try:
                encoded = example if offset == 0 and example is not None else self._source[candidate]
                return decode_example(self._source, candidate, encoded), candidate
            except BadRecordError as error:
                self._record_bad(candidate, error)
                last = error
        raise BadRecordError(f"{last}; the {offset + 1} records from {index} on are all bad")

    def _record_bad(self, index: int, error: BadRecordError) -> None:
        if index in self._bad:
            return
        if len(self._bad) >= self._max_bad_records:
            counts = ", ".join(f"{count} of {name}" for name, count in self.bad_records().items())
            raise BadRecordError(
                f"{error}; more bad records than the {self._max_bad_records} allowed, check the data"
                + (f" (before it: {counts})" if counts else "")
            )
        self._bad.add(index)
        _logger.warning("%s; replaced by the next record", error)
