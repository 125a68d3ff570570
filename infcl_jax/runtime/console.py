"""Output of the leading process."""

import datetime
import time

from infcl_jax.runtime.distributed import is_lead
from infcl_jax.runtime.outputs import print_line

_PROGRESS_SECONDS = 10.0


def say(*lines: str) -> None:
    """Print a line, or the lines of a table, on the leading process only."""
    if is_lead():
        print_line(*lines)


class Progress:
    """Print the progress, rate and remaining time of a command every ten seconds.

    The rate excludes items of an earlier start.
    """

    def __init__(self, total: int, unit: str, done: int = 0):
        """Start the clock.

        Args:
          total: number of items.
          unit: name of the items, such as "images".
          done: items of an earlier start.
        """
        self._total, self._unit, self._done, self._first = total, unit, done, done
        self._start = self._last = time.monotonic()

    def add(self, count: int) -> None:
        """Count finished items and print a line if one is due."""
        self._done += count
        now = time.monotonic()
        if now - self._last >= _PROGRESS_SECONDS:
            self._last = now
            rate = (self._done - self._first) / (now - self._start)
            left = datetime.timedelta(seconds=round((self._total - self._done) / rate)) if rate else "unknown"
            say(f"{self._done} of {self._total} {self._unit}  {rate:.0f} {self._unit}/s  left {left}")
