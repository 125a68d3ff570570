"""Progress of an evaluation, with the estimated time left."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

from infcl_jax.runtime.train_progress import format_seconds

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
