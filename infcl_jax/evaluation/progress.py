"""Progress of an evaluation, with the estimated time left."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

_SECONDS = 10.0  # between two lines


def with_progress[Batch](
    batches: Iterable[Batch], count: int, name: str, say: Callable[[str], None], seconds: float = _SECONDS
) -> Iterator[Batch]:
    """Iterate over batches and report the progress from time to time.

    The first batch, which includes compilation, does not count for the estimate.

    Args:
      batches: batches.
      count: number of batches.
      name: name of the dataset.
      say: function that prints a line.
      seconds: least time between two lines.
    """
    start = last = time.monotonic()
    for number, batch in enumerate(batches):
        now = time.monotonic()
        if number == 1:
            start = now
        if number > 1 and now - last >= seconds:
            left = (now - start) / (number - 1) * (count - number)
            say(f"{name}: {number} of {count} batches, {format_seconds(left)} left")
            last = now
        yield batch


def format_seconds(seconds: float) -> str:
    """Format a duration as "1:02:03" or "2:03"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
