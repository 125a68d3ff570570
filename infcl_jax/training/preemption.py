"""Notice of a signal to stop, in time for a last checkpoint."""

import signal
from types import FrameType, TracebackType
from typing import Any

import jax
from jax.experimental import multihost_utils

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Preemption:
    """Watches for SIGTERM and SIGINT.

    Schedulers send SIGTERM before they stop a job; Ctrl-C sends SIGINT.
    `noticed(step)` is the same on all processes at the same step, so that all of them save together. A second signal
    ends a single-process run at once. Several processes learn of SIGTERM from the service of `jax.distributed`; SIGINT
    interrupts them as before.

    Example:
      with Preemption() as preemption:
          for step in range(1, total_steps + 1):
              ...
              if preemption.noticed(step):
                  break
    """

    def __init__(self) -> None:
        """Prepares to watch."""
        self._received = False
        self._watches = jax.process_count() == 1
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Preemption":
        """Starts to watch. Only the main thread may do so."""
        if self._watches:
            # An ignored signal stays ignored: shells start background jobs with SIGINT ignored, so that Ctrl-C in the
            # terminal does not reach them.
            watched = [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
            self._previous = {number: signal.signal(number, self._receive) for number in watched}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Stops to watch: both signals do again what they did before."""
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def noticed(self, step: int) -> bool:
        """Whether the run should save now and stop; to be called by all processes at every step."""
        if jax.process_count() > 1:
            return multihost_utils.reached_preemption_sync_point(step)
        return self._received

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        self._received = True
        for number in self._previous:
            signal.signal(number, signal.SIG_DFL)
