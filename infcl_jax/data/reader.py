"""Reading of decoded examples, with replacements for bad records."""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence

from infcl_jax.data.decode.api import DecodedExample, ToImage, decode_example, pixels
from infcl_jax.data.sources.base import BadRecordError, BatchedSource, Example, Source
from infcl_jax.data.stages import DECODE, READ, timed

MAX_ATTEMPTS = 16  # maximum number of consecutive records tried, the bad record included


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
