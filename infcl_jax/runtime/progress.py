"""Progress of long tasks: how far they are, their rate and the time left."""

from __future__ import annotations

import time
from collections.abc import Callable

_SECONDS = 10.0  # between two lines


class Progress:
    """Say every ten seconds how far a task is.

    A line has the finished items, their rate and the time left, such as
    `photos: 12 of 40 batches, 3.2 batches/s, 0:09 left`. The rate starts at the end of the first items, which include
    compilation.

    Examples:
      >>> progress = Progress("photos: wrote", 12, "tar files", print)
      >>> progress.add()  # prints nothing in the first ten seconds

    Args:
      task: start of the lines, such as the name of a dataset.
      total: number of items.
      unit: name of the items, such as "images".
      say: function that prints a line.
      done: items of an earlier start.
      clock: monotonic clock, in seconds.
    """

    def __init__(
        self,
        task: str,
        total: int,
        unit: str,
        say: Callable[[str], object],
        *,
        done: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._task, self._total, self._unit, self._say, self._clock = task, total, unit, say, clock
        self._done = done
        self._last = clock()  # time of the last line
        self._first: tuple[int, float] | None = None  # finished items and time at the end of the first ones

    def add(self, count: int = 1) -> None:
        """Count finished items and say a line if one is due."""
        self._done += count
        now = self._clock()
        if self._first is None:
            self._first = self._done, now
        if now - self._last < _SECONDS:
            return
        self._last = now
        line, (done, start) = f"{self._task}: {self._done} of {self._total} {self._unit}", self._first
        if self._done > done and now > start:
            rate = (self._done - done) / (now - start)
            left = format_seconds((self._total - self._done) / rate)
            line += f", {format_rate(rate)} {self._unit}/s, {left} left"
        self._say(line)


def format_rate(rate: float) -> str:
    """Format a rate with two significant digits, or as a whole number from 10 on."""
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"


def format_seconds(seconds: float) -> str:
    """Format a duration as "1:02:03" or "2:03"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
