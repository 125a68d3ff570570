"""Time that the devices wait for data."""

from __future__ import annotations

import collections
import queue
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple, Self

import jax


class _Batch(NamedTuple):
    """Batch of a step, requested and returned at times in seconds."""

    requested: float
    returned: float
    arrays: Any


class _Resumed(NamedTuple):
    """End of a pause, in seconds."""

    time: float


class DataWait:
    """Time that the devices spend on steps and wait for data.

    A step's time starts when the results of the previous step are ready, or when its batch is requested if that is
    later, as after an evaluation. It ends when its own results are ready. The devices wait from its start until the
    batch is on the devices. A batch that arrives while the previous step runs costs nothing, since dispatch is
    asynchronous.

    A thread waits for the arrays, so the training loop does not.

    Examples:
      >>> with DataWait() as wait:
      ...     batch = wait.batch(lambda: shard_batch(mesh, image))
      ...     wait.step(clip_loss(batch, batch, 14.3))
      >>> waited, total = wait.take()  # seconds
      >>> 0 <= waited <= total
      True
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        observe: Callable[[float, float, float], None] = lambda host, data, devices: None,
    ) -> None:
        """Start the thread.

        Args:
            clock: monotonic clock, in seconds.
            observe: function that the thread calls after each step but the first, with the seconds of waiting for the
                training loop, for data and for the devices, see `infcl_jax.runtime.watchdog.SlowSteps.update`.
        """
        self._observe = observe
        self._clock = clock
        self._events: queue.SimpleQueue[_Batch | Any | None] = queue.SimpleQueue()
        self._recorded = threading.Condition()
        self._steps = 0
        self._seconds: collections.deque[tuple[float, float]] = collections.deque()  # of each step since `take`
        self._start = self._arrived = self._ready = -float("inf")
        self._resumed = -float("inf")  # end of the last pause
        self._host = 0.0  # seconds between the last results and the request for the next batch
        self._thread = threading.Thread(target=self._watch, name="data_wait", daemon=True)
        self._thread.start()

    def batch(self, next_batch: Callable[[], Any]) -> Any:
        """Return `next_batch()`, the batch of the next step."""
        requested = self._clock()
        arrays = next_batch()
        self._events.put(_Batch(requested, self._clock(), arrays))
        return arrays

    def step(self, metrics: Any) -> None:
        """Record the metrics of the last batch's step, which must not be donated."""
        self._events.put(metrics)

    def resume(self) -> None:
        """Note the end of a pause, such as an evaluation; it is no wait for the training loop."""
        self._events.put(_Resumed(self._clock()))

    def take(self, steps: int | None = None) -> tuple[float, float]:
        """Return the seconds of waiting and of all steps since the last call.

        Args:
          steps: number of steps since the start, which have finished. Later ones are left for the next call. None: all
            finished steps.
        """
        with self._recorded:
            if steps is not None:
                self._recorded.wait_for(lambda: self._steps >= steps or not self._thread.is_alive(), timeout=10.0)
            count = len(self._seconds) if steps is None else max(0, steps - (self._steps - len(self._seconds)))
            taken = [self._seconds.popleft() for _ in range(min(count, len(self._seconds)))]
        return sum(waited for waited, _ in taken), sum(total for _, total in taken)

    def __enter__(self) -> Self:
        """Return the measurement."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Stop the thread, unless the devices hang."""
        self._events.put(None)
        self._thread.join(timeout=1.0)

    def _watch(self) -> None:
        while (event := self._events.get()) is not None:
            try:
                self._record(event)
            except Exception:  # the training loop raises the error of the same arrays
                return
            del event  # frees the batch

    def _record(self, event: _Batch | Any) -> None:
        if isinstance(event, _Resumed):
            self._resumed = event.time
        elif isinstance(event, _Batch):
            self._host = max(0.0, event.requested - max(self._ready, self._resumed))
            self._start = max(self._ready, event.requested)
            on_devices = any(hasattr(leaf, "block_until_ready") for leaf in jax.tree.leaves(event.arrays))
            jax.block_until_ready(event.arrays)
            arrived = self._clock() if on_devices else event.returned
            self._arrived = max(self._start, arrived)
        else:
            jax.block_until_ready(event)
            self._ready = self._clock()
            if self._steps:
                self._observe(self._host, self._arrived - self._start, self._ready - self._arrived)
            with self._recorded:
                self._steps += 1
                self._recorded.notify_all()
                self._seconds.append((self._arrived - self._start, self._ready - self._start))
