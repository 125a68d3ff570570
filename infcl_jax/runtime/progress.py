"""Progress of long tasks and of training: rates, utilization, memory and the time left."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax

from infcl_jax.runtime.run_console import RunConsole

_SECONDS = 10.0  # between two lines
# Metric, factor and text of fields of the console.
_FIELDS = (
    ("mfu", 100, "MFU {:.1f} %"),
    ("data/wait_fraction", 100, "data wait {:.0f} %"),
    ("memory/peak_bytes", 2**-30, "memory {:.1f} GiB"),
    ("logit_scale", 1, "scale {:.2f}"),
)


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pauses:
    """Steps after which a run evaluates and saves.

    Examples:
      >>> pauses = Pauses(total_steps=1000, eval_every=500)
      >>> [step for step in (250, 500, 1000) if pauses.evaluates_after(step)]
      [500, 1000]

    Attributes:
      total_steps: last step of the run, after which it does both.
      eval_every: steps between evaluations; 0: none before the end.
      checkpoint_every: steps between checkpoints; 0: none before the end.
      saves_evaluated: whether it also saves after each evaluation, if there is anything to evaluate on.
      evaluates: whether there is anything to evaluate on.
    """

    total_steps: int
    eval_every: int = 0
    checkpoint_every: int = 0
    saves_evaluated: bool = False
    evaluates: bool = True

    def evaluates_after(self, step: int) -> bool:
        """Return whether the run evaluates after a step."""
        return step == self.total_steps or _is_multiple(step, self.eval_every)

    def saves_after(self, step: int) -> bool:
        """Return whether the run saves after a step."""
        both = self.saves_evaluated and self.evaluates and self.evaluates_after(step)
        return both or step == self.total_steps or _is_multiple(step, self.checkpoint_every)

    def left(self, step: int) -> dict[str, int]:
        """Count the evaluations and checkpoints left when a step has finished, its own included."""
        evaluated = self._multiples(step, self.eval_every) if self.evaluates else set()
        saved = self._multiples(step, self.checkpoint_every)
        return {"evaluation": len(evaluated), "checkpoint": len(saved | evaluated if self.saves_evaluated else saved)}

    def _multiples(self, step: int, every: int) -> set[int]:
        """Return the steps from `step` on that are the last one or a multiple of an interval."""
        return {self.total_steps, *(range(-(-step // every) * every, self.total_steps, every) if every else ())}


class TrainProgress:
    """Measure the progress of a run and show it on the console.

    Rates start at the first update, so they exclude the first step, which includes compilation. They also exclude time
    inside `pause`. The time left assumes the mean rate so far, and for evaluations and checkpoints the duration of the
    last one. Evaluations are named until one is measured.

    Examples:
      >>> with RunConsole(lead=False) as console:  # the leading process prints lines
      ...     progress = TrainProgress(console, Pauses(total_steps=2), batch_size=256)
      ...     for step in (1, 2):
      ...         values = progress.update(step, {"loss": 4.1, "logit_scale": 14.3, "grad_norm": 1.2})
      >>> sorted(values)
      ['examples_per_second', 'seconds']

    Attributes:
      examples_per_second: rate between the last two due steps, over all devices; None before the second one.

    Args:
      console: console of the run.
      pauses: length of the run, evaluations and checkpoints.
      batch_size: examples per step, over all devices.
      devices: number of devices.
      every: interval of the due steps; the first update and the last step are also due.
      utilization: function from examples per second to the model FLOPs utilization; None if unknown.
      unit: name of the examples on the console.
      clock: monotonic clock, in seconds.

    Raises:
      ValueError: total_steps, batch_size, devices or every is < 1.
    """

    def __init__(
        self,
        console: RunConsole,
        pauses: Pauses,
        *,
        batch_size: int,
        devices: int = 1,
        every: int = 1,
        utilization: Callable[[float], float | None] = lambda rate: None,
        unit: str = "images",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        counts = {"total_steps": pauses.total_steps, "batch_size": batch_size, "devices": devices, "every": every}
        for name, value in counts.items():
            if value < 1:
                raise ValueError(f"expected {name} >= 1, got {value}")
        self.examples_per_second: float | None = None
        self._console, self._pauses, self._utilization, self._clock = console, pauses, utilization, clock
        self._total_steps, self._batch_size, self._devices, self._every = pauses.total_steps, batch_size, devices, every
        self._unit = unit
        self._paused_seconds = 0.0
        self._durations: dict[str, float] = {}  # seconds of the last pause of each kind
        self._first: tuple[int, float] | None = None  # step and clock (seconds) without pauses at the first update
        self._due: tuple[int, float] = (0, 0.0)  # step and clock (seconds) without pauses at the last due step
        self._scalars: dict[str, float] = {}  # latest metrics and measurements

    def update(self, step: int, metrics: Mapping[str, Any]) -> dict[str, float]:
        """Record that a step has finished, and show it.

        Call it after the metrics of the step have reached the host. Dispatch is asynchronous, so an earlier call would
        not measure the step.

        Args:
          step: training step, later than the step of the previous call.
          metrics: scalars by name; nested mappings are ignored.

        Returns:
          Measurements of a due step: `examples_per_second`, `mfu` (model FLOPs utilization), `memory/peak_bytes` and
          `seconds` since the console was created, each if it is known; empty for other steps.
        """
        now, first = self._clock() - self._paused_seconds, self._first is None
        if first:
            self._console.doing(None)
        due = first or step % self._every == 0 or step == self._total_steps
        self._scalars |= {name: float(value) for name, value in metrics.items() if not isinstance(value, Mapping)}
        measured = {}
        if due:
            if not first:
                self.examples_per_second = self._rate(self._due, step, now)
            self._due = (step, now)
            self._first = self._first or self._due
            measured = self._measure()
            self._scalars |= measured
        self._console.progress(self._fields(step, now), due=due)
        return measured

    @contextlib.contextmanager
    def pause(self, kind: str) -> Iterator[None]:
        """Stop the clock of the rates, and measure the time.

        Wait for the last step before entering. Otherwise the rates exclude the rest of its time.

        Args:
          kind: "evaluation" or "checkpoint".
        """
        start = self._clock()
        try:
            with self._console.busy(kind):
                yield
            self._durations[kind] = self._clock() - start
        finally:
            self._paused_seconds += self._clock() - start

    def _measure(self) -> dict[str, float]:
        measured = {"seconds": round(self._console.seconds, 3)}
        if self.examples_per_second is not None:
            measured["examples_per_second"] = self.examples_per_second
            if (utilization := self._utilization(self.examples_per_second)) is not None:
                measured["mfu"] = utilization
        if (peak := peak_memory(jax.local_devices())) is not None:
            measured["memory/peak_bytes"] = peak
        return measured

    def _fields(self, step: int, now: float) -> list[str]:
        """Format the progress, the most important first."""
        scalars = self._scalars
        fields = [f"step {step:>{len(str(self._total_steps))}}/{self._total_steps}"]
        if "loss" in scalars:
            fields.append(f"loss {scalars['loss']:.4f}")
        mean = self._rate(self._first, step, now)
        if mean is not None:
            fields.append(f"left {self._left(step, mean)}")
        if (rate := self.examples_per_second or mean) is not None:
            fields.append(f"{format_rate(rate)} {self._unit}/s")
            if self._devices > 1:
                fields.append(f"{format_rate(rate / self._devices)} per device")
        for name, factor, text in _FIELDS:
            if name in scalars:
                fields.append(text.format(factor * scalars[name]))
        if "grad_norm" in scalars:
            prefix = "grad_norm/"
            towers = [f"{name.removeprefix(prefix)} {scalars[name]:.3g}" for name in scalars if name.startswith(prefix)]
            fields.append(f"grad norm {scalars['grad_norm']:.3g}" + (f" ({', '.join(towers)})" if towers else ""))
        return fields

    def _rate(self, since: tuple[int, float] | None, step: int, now: float) -> float | None:
        """Return the examples per second since a step and time; None if nothing is measured yet."""
        if since is None or step == since[0] or now <= since[1]:  # a coarse clock can measure 0 seconds
            return None
        return (step - since[0]) * self._batch_size / (now - since[1])

    def _left(self, step: int, rate: float) -> str:
        """Format the time left at a rate of examples per second."""
        seconds, unknown = self._batch_size / rate * (self._total_steps - step), ""
        for kind, count in self._pauses.left(step).items():
            if kind in self._durations:
                seconds += count * self._durations[kind]
            elif count and kind == "evaluation":  # the first checkpoints are short against the rest
                unknown = f" + {count} evaluation{'s' if count > 1 else ''}"
        return format_seconds(seconds) + unknown


def peak_memory(devices: Iterable[jax.Device]) -> int | None:
    """Return the bytes of the fullest device at its peak since the start; None on CPUs, which do not report them."""
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in devices]
    return max((peak for peak in peaks if peak is not None), default=None)


def _is_multiple(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
