"""Noticing that this run is about to be stopped, in time for a last checkpoint."""

import signal
from types import FrameType

import jax
from jax.experimental import multihost_utils


class Preemption:
    """Watches for SIGTERM, which schedulers send before they stop a job.

    `noticed(step)` is the same on all processes at the same step, so that all of them save together. A second SIGTERM
    ends a single-process run at once. (Several processes learn of it from the service of `jax.distributed`.)
    """

    def __init__(self) -> None:
        """Starts to watch. Only the main thread may do so."""
        self._received = False
        if jax.process_count() == 1:
            signal.signal(signal.SIGTERM, self._receive)

    def noticed(self, step: int) -> bool:
        """Whether the run should save now and stop; to be called by all processes at every step."""
        if jax.process_count() > 1:
            return multihost_utils.reached_preemption_sync_point(step)
        return self._received

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        self._received = True
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
