"""Noticing that this run is about to be stopped, in time for a last checkpoint."""

import signal
from types import FrameType, TracebackType
from typing import Any

import jax
from jax.experimental import multihost_utils


class Preemption:
    """Watches for SIGTERM, which schedulers send before they stop a job.

    `noticed(step)` is the same on all processes at the same step, so that all of them save together. A second SIGTERM
    ends a single-process run at once. (Several processes learn of it from the service of `jax.distributed`.)

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
        self._previous: Any = None

    def __enter__(self) -> "Preemption":
        """Starts to watch. Only the main thread may do so."""
        if self._watches:
            self._previous = signal.signal(signal.SIGTERM, self._receive)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Stops to watch: SIGTERM does again what it did before."""
        if self._watches:
            signal.signal(signal.SIGTERM, signal.SIG_DFL if self._previous is None else self._previous)

    def noticed(self, step: int) -> bool:
        """Whether the run should save now and stop; to be called by all processes at every step."""
        if jax.process_count() > 1:
            return multihost_utils.reached_preemption_sync_point(step)
        return self._received

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        self._received = True
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
