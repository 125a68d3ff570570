"""Warnings of loss spikes, slow steps and batches that do not arrive."""

from __future__ import annotations

import collections
import statistics
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from infcl_jax.runtime.outputs import print_line

_WINDOW = 100  # steps whose median is the recent level
_MIN_STEPS = 20  # steps before the first warning; the median of fewer is noise
_QUIET_STEPS = 100  # least distance of two warnings of the same kind
# A normal distribution has a standard deviation of 1.48 median absolute deviations. Wortsman et al. 2023 (Stable and
# low-precision training for large-scale vision-language models) call 3.2 standard deviations of the loss a spike.
_SPIKE_DEVIATIONS = 8.0
_SPIKE_NATS = 0.2  # least rise: late in training the deviations are tiny
_SLOW_FACTOR, _SLOW_SECONDS = 5.0, 10.0  # a slow step takes more than both, the factor times the median
DATA_SECONDS = 30.0  # wait for a batch before the first warning, which is repeated after twice the time
_POLL_SECONDS = 1.0  # far below `DATA_SECONDS`, and rare enough to cost nothing


class LossSpikes:
    """Detect losses far above the recent ones.

    A loss is a spike if it is above the median of the last 100 steps by more than 8 times their median absolute
    deviation, and by more than 0.2. At most one line is returned in 100 steps. Losses that are not finite are ignored.
    """

    def __init__(self) -> None:
        """Start without history."""
        self._losses: collections.deque[float] = collections.deque(maxlen=_WINDOW)
        self._quiet_until = 0
        self._count = 0

    def update(self, step: int, loss: float) -> str | None:
        """Add the loss of a step.

        Args:
          step: training step.
          loss: its loss.

        Returns:
          A line if the loss is a spike and no line was returned lately.
        """
        if loss - loss != 0:  # NaN or infinite
            return None
        line = None
        if len(self._losses) >= _MIN_STEPS:
            median = statistics.median(self._losses)
            deviation = statistics.median(abs(value - median) for value in self._losses)
            if loss - median > max(_SPIKE_DEVIATIONS * deviation, _SPIKE_NATS):
                self._count += 1
                if step >= self._quiet_until:
                    self._quiet_until = step + _QUIET_STEPS
                    line = (
                        f"warning: step {step}: loss {loss:.4f} is far above {median:.4f}, the median of the last "
                        f"{len(self._losses)} steps"
                    )
        self._losses.append(loss)
        return line

    def take(self) -> dict[str, int]:
        """Return the spikes since the last call as a metric; empty without any."""
        count, self._count = self._count, 0
        return {"loss_spikes": count} if count else {}


class SlowSteps:
    """Detect steps that take much longer than the recent ones.

    A step is slow if it takes more than 10 s and 5 times the median of the last 100 steps.
    """

    def __init__(self, start: int = 0, *, process: str = "", say: Callable[[str], None] = print_line) -> None:
        """Start without history.

        Args:
          start: number of completed steps.
          process: prefix of the lines that names this process.
          say: function that prints a line.
        """
        self._seconds: collections.deque[float] = collections.deque(maxlen=_WINDOW)
        self._step, self._quiet_until = start, 0
        self._process, self._say = process, say

    def update(self, host: float, data: float, devices: float) -> None:
        """Add the next step and print a line if it is slow.

        Args:
          host: seconds until the training loop asked for its batch.
          data: seconds until the batch was on the devices.
          devices: seconds until its results were ready.
        """
        self._step += 1
        total = host + data + devices
        if len(self._seconds) >= _MIN_STEPS and self._step >= self._quiet_until:
            median = statistics.median(self._seconds)
            if total > max(_SLOW_FACTOR * median, _SLOW_SECONDS):
                self._quiet_until = self._step + _QUIET_STEPS
                waits = {"for the training loop": host, "for data": data, "for the devices": devices}
                cause = max(waits, key=waits.__getitem__)
                self._say(
                    f"warning: {self._process}step {self._step} took {total:.1f} s (median {median:.2f} s), "
                    f"{waits[cause]:.1f} s of it waiting {cause}"
                )
        self._seconds.append(total)


class DataStall:
    """Warn while the training loop waits long for a batch.

    The first line is printed after 30 s, the next ones after 60 s, 120 s and so on.

    Examples:
      with DataStall(data.awaited) as stall:
          batch = stall.guard(lambda: next(data))
    """

    def __init__(
        self,
        describe: Callable[[], str] = lambda: "the next batch",
        *,
        process: str = "",
        say: Callable[[str], None] = print_line,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Initialize without starting the thread.

        Args:
          describe: function that names what the batch waits for, called in a thread.
          process: prefix of the lines that names this process.
          say: function that prints a line.
          clock: monotonic clock, in seconds.
        """
        self._describe, self._process, self._say, self._clock = describe, process, say, clock
        self._since: float | None = None  # time at which the training loop asked for the batch
        self._next = DATA_SECONDS  # seconds of waiting before the next line
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="data_stall", daemon=True)

    def guard[T](self, next_batch: Callable[[], T]) -> T:
        """Return `next_batch()`, with lines while it runs long."""
        self._next, self._since = DATA_SECONDS, self._clock()
        try:
            return next_batch()
        finally:
            self._since = None

    def check(self) -> None:
        """Print a line if one is due."""
        since = self._since
        if since is None or (waited := self._clock() - since) < self._next:
            return
        self._next *= 2
        self._say(f"warning: {self._process}waiting for data for {waited:.0f} s: {self._describe()}")

    def __enter__(self) -> Self:
        """Start the thread."""
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Stop the thread."""
        self._stopped.set()
        self._thread.join(timeout=1.0)

    def _watch(self) -> None:
        while not self._stopped.wait(_POLL_SECONDS):
            self.check()
