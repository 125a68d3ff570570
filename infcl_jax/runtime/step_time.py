"""Time of training steps: waits for data, slow steps, traces, and rare garbage collection."""

from __future__ import annotations

import collections
import contextlib
import functools
import gc
import operator
import os
import queue
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax

from infcl_jax.runtime.console import process_prefix
from infcl_jax.runtime.outputs import print_line, reason

_WINDOW = 100  # steps whose median is the recent level
_MIN_STEPS = 20  # steps before the first warning; the median of fewer is noise
_QUIET_STEPS = 100  # least distance of two warnings
_SLOW_FACTOR, _SLOW_SECONDS = 5.0, 10.0  # a slow step takes more than both, the factor times the median
PROFILE_FOLDER = "profile"
# Allocations before a collection of the youngest generation, and collections of one before the next older one.
_THRESHOLDS = (50_000, 20, 20)


class DataWait:
    """Time that the devices spend on steps and wait for data.

    A step's time starts when the results of the previous step are ready, or when its batch is requested if that is
    later, as after an evaluation. It ends when its own results are ready. The devices wait from its start until the
    batch is on the devices. A batch that arrives while the previous step runs costs nothing, since dispatch is
    asynchronous.

    A thread waits for the arrays, so the training loop does not. It prints a warning of a step that takes more than
    10 s and 5 times the median of the last 100 steps, with what the step waited for.

    Examples:
      >>> with DataWait() as wait:
      ...     batch = wait.batch(lambda: shard_batch(mesh, image))
      ...     wait.step(clip_loss(batch, batch, 14.3))
      >>> waited, total = wait.take()  # seconds
      >>> 0 <= waited <= total
      True

    Args:
      start: number of completed steps.
      clock: monotonic clock, in seconds.
    """

    def __init__(self, start: int = 0, clock: Callable[[], float] = time.perf_counter) -> None:
        self._first = start + 1
        self._clock = clock
        self._events: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._recorded = threading.Condition()
        self._steps = 0
        self._seconds: collections.deque[tuple[float, float]] = collections.deque()  # of each step since `take`
        self._start = self._arrived = self._ready = -float("inf")
        self._resumed = -float("inf")  # end of the last pause
        self._host = 0.0  # seconds between the last results and the request for the next batch
        self._recent: collections.deque[float] = collections.deque(maxlen=_WINDOW)  # seconds of all steps but the first
        self._quiet_until = 0
        self._thread = threading.Thread(target=self._watch, name="data_wait", daemon=True)
        self._thread.start()

    def batch(self, next_batch: Callable[[], Any], others: Callable[[], float] = lambda: 0.0) -> Any:
        """Return `next_batch()`, the batch of the next step.

        `others` returns the seconds that it has waited for other processes so far, which are no wait for data.
        """
        requested = self._clock() - others()
        arrays = next_batch()
        self._events.put(functools.partial(self._record_batch, requested + others(), self._clock(), arrays))
        return arrays

    def step(self, metrics: Any) -> None:
        """Record the metrics of the last batch's step, which must not be donated."""
        self._events.put(functools.partial(self._record_step, metrics))

    def resume(self) -> None:
        """Note the end of a pause, such as an evaluation; it is no wait for the training loop."""
        self._events.put(functools.partial(setattr, self, "_resumed", self._clock()))

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
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Stop the thread, unless the devices hang."""
        self._events.put(None)
        self._thread.join(timeout=1.0)

    def _watch(self) -> None:
        while (event := self._events.get()) is not None:
            try:
                event()
            except Exception:  # the training loop raises the error of the same arrays
                return
            del event  # frees the batch

    def _record_batch(self, requested: float, returned: float, arrays: Any) -> None:
        """Wait for a batch that was requested and returned at times in seconds."""
        self._host = max(0.0, requested - max(self._ready, self._resumed))
        self._start = max(self._ready, requested)
        on_devices = any(hasattr(leaf, "block_until_ready") for leaf in jax.tree.leaves(arrays))
        jax.block_until_ready(arrays)
        self._arrived = max(self._start, self._clock() if on_devices else returned)

    def _record_step(self, metrics: Any) -> None:
        """Wait for the results of a step."""
        jax.block_until_ready(metrics)
        self._ready = self._clock()
        waited, total = self._arrived - self._start, self._ready - self._start
        if self._steps:  # the first one includes compilation
            self._warn_if_slow(self._host + total, waited)
        with self._recorded:
            self._steps += 1
            self._recorded.notify_all()
            self._seconds.append((waited, total))

    def _warn_if_slow(self, total: float, waited: float) -> None:
        """Print a line if a step is slow, which took `total` seconds and waited for data."""
        step = self._first + self._steps
        if len(self._recent) >= _MIN_STEPS and step >= self._quiet_until:
            median = statistics.median(self._recent)
            if total > max(_SLOW_FACTOR * median, _SLOW_SECONDS):
                self._quiet_until = step + _QUIET_STEPS
                waits = (
                    ("the training loop", self._host),
                    ("data", waited),
                    ("the devices", self._ready - self._arrived),
                )
                cause, seconds = max(waits, key=operator.itemgetter(1))
                print_line(
                    f"warning: {process_prefix()}step {step} took {total:.1f} s (median {median:.2f} s), "
                    f"{seconds:.1f} s of it waiting for {cause}"
                )
        self._recent.append(total)


class Profile:
    """Trace some training steps with `jax.profiler`, on the leading process.

    The trace has the local devices and the host threads. Tracing slows these steps down.

    Examples:
      >>> loss_fn = jax.jit(clip_loss)
      >>> with Profile((2, 3), prepare_workdir("runs/profiled"), say=lambda line: None) as profile:
      ...     for step in range(1, 5):
      ...         profile.start(step)
      ...         metrics = {"loss": loss_fn(image, text, 14.3)}  # the training step
      ...         profile.stop(step, metrics)

    Args:
      steps: first and last step of the trace; empty: none.
      workdir: directory of the run; the trace is in its folder `profile`.
      lead: whether this process traces.
      say: function that prints a line.
    """

    def __init__(
        self,
        steps: Sequence[int] = (),
        workdir: str | os.PathLike[str] = ".",
        *,
        lead: bool = True,
        say: Callable[[str], None] = print_line,
    ) -> None:
        self._steps = range(steps[0], steps[1] + 1) if steps and lead else range(0)
        self._folder = Path(workdir, PROFILE_FOLDER)
        self._say = say
        self._first: int | None = None  # first traced step, while tracing

    def start(self, step: int) -> None:
        """Start the trace before its first step; a resumed run may start inside."""
        if step not in self._steps or self._first is not None:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            jax.profiler.start_trace(self._folder)
        except (OSError, RuntimeError) as error:  # RuntimeError: another profiler is active
            self._fail(error)
        else:
            self._first = step

    def stop(self, step: int, metrics: Any) -> None:
        """End the trace after its last step.

        Args:
          step: training step.
          metrics: device results of the step; the call waits for them.
        """
        if self._first is not None and step == self._steps[-1]:
            jax.block_until_ready(metrics)
            self._end(f"{self._first} to {step}")

    def _end(self, steps: str) -> None:
        self._first, self._steps = None, range(0)
        try:
            jax.profiler.stop_trace()
        except (OSError, RuntimeError) as error:
            self._fail(error)
            return
        self._say(
            f"profile of steps {steps}: tensorboard --logdir={self._folder} (pip install tensorboard xprof), or open "
            "its trace.json.gz in https://ui.perfetto.dev"
        )

    def _fail(self, error: Exception) -> None:
        self._steps = range(0)
        why = reason(error) if isinstance(error, OSError) else " ".join(str(error).split())
        self._say(f"warning: no profile in {self._folder}: {why}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """End a trace that the run did not finish."""
        if self._first is not None:
            self._end(f"from {self._first} on")


@contextlib.contextmanager
def rare_garbage_collection() -> Iterator[None]:
    """Leave existing objects out of garbage collection, and collect new ones rarely.

    Training makes few cycles of references. A full collection of a loaded model and its compiled programs holds
    Python's global lock for 0.3 to 0.4 s, every 40 steps of ViT-B/32 on files (H200, 2026-11-24). Frequent collections
    take a tenth of the time to trace and lower a step, whose objects stay (ViT-B/32, 2026-11-26).

    Contexts may be nested: the inner one also leaves out what the outer one has made.

    Examples:
      >>> with rare_garbage_collection():
      ...     loss = clip_loss(image, text, 14.3)  # train
    """
    thresholds, frozen = gc.get_threshold(), gc.get_freeze_count()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        if not frozen:
            gc.unfreeze()
