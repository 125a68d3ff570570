"""Preemption signals, handled so that a run can save a last checkpoint."""

import signal
from types import FrameType, TracebackType
from typing import Any

import jax
from jax.experimental import multihost_utils

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Preemption:
    """Detect SIGTERM and SIGINT.

    Schedulers send SIGTERM before they stop a job; Ctrl-C sends SIGINT. All processes get the same `noticed(step)` at
    the same step, so they save together.

    A single-process run handles both signals, and a second signal ends it at once. A multi-process run receives SIGTERM
    through the `jax.distributed` service and keeps its previous SIGINT handler.

    Example:
      with Preemption() as preemption:
          for step in range(1, total_steps + 1):
              ...
              if preemption.noticed(step):
                  break
    """

    def __init__(self) -> None:
        """Initialize without installing signal handlers."""
        self._received = False
        self._handles_signals = jax.process_count() == 1
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Preemption":
        """Install the signal handlers. Python allows this in the main thread only."""
        if self._handles_signals:
            # Shells start background jobs with SIGINT ignored, so that Ctrl-C does not stop them. Keep it ignored.
            watched = [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
            self._previous = {number: signal.signal(number, self._receive) for number in watched}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Restore the previous signal handlers."""
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def noticed(self, step: int) -> bool:
        """Return whether to save and stop after this step.

        All processes must call it at every step.
        """
        if jax.process_count() > 1:
            return multihost_utils.reached_preemption_sync_point(step)
        return self._received

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        """Record the first signal and let the next one end the process."""
        self._received = True
        for number in self._previous:
            signal.signal(number, signal.SIG_DFL)
