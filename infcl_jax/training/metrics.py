"""Training metrics: crash-safe JSON lines, TensorBoard and console progress."""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from infcl_jax.training.outputs import AppendFile, Outputs
from infcl_jax.training.outputs import print_line as print_flushed
from infcl_jax.training.tensorboard import EventFile

METRICS_FILE = "metrics.jsonl"

DATA_WAIT_SHOWN = 0.05  # fraction of the time from which on waiting for data is printed

_RESERVED = ("step", "time")


class MetricWriter:
    """Append metrics to `workdir/metrics.jsonl` and, optionally, to TensorBoard.

    Every line is one JSON object `{"step": ..., "time": ..., <name>: <value>, ...}`, with the time in seconds since the
    Unix epoch. JSON cannot represent NaN and infinities, so they are written as the strings "NaN", "Infinity" and
    "-Infinity". `read_metrics` converts them back to floats. Each line is flushed when written.

    The constructor repairs an existing file. It drops a last line truncated by a crash. With `resume_step` it also
    drops the lines of later steps, which the resumed run writes again. An atomic rename replaces the file.

    A line that cannot be written is no error: see `infcl_jax.training.outputs.AppendFile`.

    Example:
        with MetricWriter(workdir, resume_step=restored_step, lead=is_lead()) as writer:
            writer.write(step, {"loss": loss, "logit_scale": scale})
    """

    def __init__(
        self,
        workdir: str | os.PathLike[str],
        *,
        tensorboard: bool = False,
        lead: bool = True,
        resume_step: int | None = None,
        outputs: Outputs | None = None,
    ) -> None:
        """Open the metrics file and repair it if needed.

        Args:
            workdir: directory of the run, created if missing.
            tensorboard: whether to also write event files to `workdir/tensorboard`; needs tensorboardX.
            lead: whether this process writes; True on exactly one process.
            resume_step: last step whose lines are kept; None keeps all lines.
            outputs: handling of write errors; None: one of its own.

        Raises:
            ImportError: `tensorboard` is True and tensorboardX is not installed.
            ValueError: a line before the last of the existing file is not a metrics object.
        """
        self._lines: AppendFile | None = None
        self._events: EventFile | None = None
        self._closed = False
        if not lead:
            return
        outputs = outputs or Outputs()
        folder = Path(workdir)
        if tensorboard:
            self._events = EventFile(folder / "tensorboard", resume_step, outputs)
        path = folder / METRICS_FILE
        if path.exists():
            _repair(path, resume_step)
        self._lines = AppendFile(path, outputs)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write one line of metrics.

        Args:
            step: training step of the metrics.
            metrics: Python, NumPy or JAX scalars by name; a JAX array blocks until it is computed. "step" and "time"
                are reserved names.

        Raises:
            ValueError: a name is reserved, a value is not a real scalar, or the writer is closed. Raised on the lead
                process only.
        """
        if self._lines is None:
            if self._closed:
                raise ValueError("expected an open MetricWriter, got a write after close()")
            return
        reserved = [name for name in _RESERVED if name in metrics]
        if reserved:
            raise ValueError(f"expected metric names other than {_RESERVED}, got {reserved}; rename them")
        values = {name: _scalar(name, value) for name, value in metrics.items()}
        line = {"step": int(step), "time": round(time.time(), 3)} | {k: _jsonable(v) for k, v in values.items()}
        self._lines.write(json.dumps(line, allow_nan=False).encode() + b"\n")
        if self._events is not None:
            self._events.write(int(step), values)

    def close(self) -> None:
        """Close the files; repeated calls have no effect."""
        if self._lines is not None:
            self._lines.close()
            self._lines = None
            self._closed = True
        if self._events is not None:
            self._events.close()
            self._events = None

    def __enter__(self) -> MetricWriter:
        """Return the writer."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Close the files."""
        self.close()


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, int | float]]:
    """Read a `metrics.jsonl` file into one dict per line.

    "NaN", "Infinity" and "-Infinity" become floats. A truncated last line is skipped.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: a line before the last is not a metrics object.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"expected a metrics file at {path}, found none; pass the {METRICS_FILE} of a run")
    return [{k: float(v) if isinstance(v, str) else v for k, v in line.items()} for line, _ in _parse(path)]


class ProgressPrinter:
    """Print training progress at regular intervals.

    Each line has the step, loss, logit scale, examples per second and remaining time. It also has the fraction of time
    that the devices wait for data, from `DATA_WAIT_SHOWN` on.

    Rates start at the first update, so they exclude the first step, which includes compilation. They also exclude time
    inside `paused()`. The remaining time assumes the mean rate so far and covers training alone.

    Example:
        progress = ProgressPrinter(total_steps, batch_size=batch_size, lead=is_lead())
        for step in range(start + 1, total_steps + 1):
            ...
            progress.update(step, metrics)  # metrics on the host: the step is finished
            with progress.paused():
                evaluate()
    """

    def __init__(
        self,
        total_steps: int,
        *,
        batch_size: int,
        every: int = 1,
        lead: bool = True,
        print_line: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Initialize the printer.

        Args:
            total_steps: last step of the run.
            batch_size: examples per step, over all devices.
            every: print interval in steps; the first update and the last step also print.
            lead: whether this process prints; all processes measure.
            print_line: function that receives each line; None: `print` with flushing.
            clock: monotonic clock, in seconds.

        Raises:
            ValueError: total_steps, batch_size or every is < 1.
        """
        for name, value in (("total_steps", total_steps), ("batch_size", batch_size), ("every", every)):
            if value < 1:
                raise ValueError(f"expected {name} >= 1, got {value}")
        self.examples_per_second: float | None = None
        self._total_steps, self._batch_size, self._every = total_steps, batch_size, every
        self._print = (print_line or print_flushed) if lead else None
        self._clock = clock
        self._pause_depth, self._pause_start, self._paused_seconds = 0, 0.0, 0.0
        self._first: tuple[int, float] | None = None  # step and active time (seconds) at the first update
        self._last: tuple[int, float] = (0, 0.0)  # step and active time (seconds) at the last printed line

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Record that `step` has finished and print its line if due.

        Call it after the metrics of the step have reached the host. Dispatch is asynchronous, so an earlier call would
        not measure the step. At each line, `examples_per_second` becomes the rate since the previous line; it is None
        before the second line.

        Args:
            step: training step, later than the step of the previous call.
            metrics: scalars by name; "loss", "logit_scale" and "data/wait_fraction" are printed if present.
        """
        first = self._first is None
        if not (first or step % self._every == 0 or step == self._total_steps):
            return
        now = self._active_time()
        if not first:
            self.examples_per_second = _ratio((step - self._last[0]) * self._batch_size, now - self._last[1])
        if self._print is not None:
            self._print(self._line(step, metrics, now))
        self._last = (step, now)
        self._first = self._first or self._last

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the clock during evaluation and checkpoints; may be nested.

        Wait for the last step before entering. Otherwise the rates exclude the rest of its time.
        """
        if self._pause_depth == 0:
            self._pause_start = self._clock()
        self._pause_depth += 1
        try:
            yield
        finally:
            self._pause_depth -= 1
            if self._pause_depth == 0:
                self._paused_seconds += self._clock() - self._pause_start

    def _active_time(self) -> float:
        """Return the clock time in seconds, excluding pauses."""
        now = self._pause_start if self._pause_depth else self._clock()
        return now - self._paused_seconds

    def _line(self, step: int, metrics: Mapping[str, Any], now: float) -> str:
        width = len(str(self._total_steps))
        fields = [f"step {step:>{width}}/{self._total_steps}"]
        if "loss" in metrics:
            fields.append(f"loss {float(_scalar('loss', metrics['loss'])):.4f}")
        if "logit_scale" in metrics:
            fields.append(f"scale {float(_scalar('logit_scale', metrics['logit_scale'])):.2f}")
        if self._first is not None and self.examples_per_second is not None:
            seconds_per_step = _ratio(now - self._first[1], step - self._first[0])
            fields.append(f"{self.examples_per_second:,.0f} examples/s")
            fields.append(f"left {_duration((seconds_per_step or 0.0) * (self._total_steps - step))}")
        if (waiting := metrics.get("data/wait_fraction", 0.0)) >= DATA_WAIT_SHOWN:
            fields.append(f"waiting for data {100 * waiting:.0f} %")
        return "  ".join(fields)


def _repair(path: Path, resume_step: int | None) -> None:
    """Drop a truncated last line and all lines after `resume_step`."""
    kept = [raw for line, raw in _parse(path) if resume_step is None or line["step"] <= resume_step]
    content = b"".join(raw + b"\n" for raw in kept)
    if content == path.read_bytes():
        return
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _parse(path: Path) -> list[tuple[dict[str, Any], bytes]]:
    """Parse a metrics file into (object, raw line) pairs.

    An invalid last line is skipped. Any other invalid line raises `ValueError`.
    """
    lines = path.read_bytes().split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    parsed = []
    for number, raw in enumerate(lines, start=1):
        line = _metrics_object(raw)
        if line is not None:
            parsed.append((line, raw))
        elif number < len(lines):
            raise ValueError(f"expected a metrics object on line {number} of {path}, got {raw[:60]!r}; remove the line")
    return parsed


def _metrics_object(raw: bytes) -> dict[str, Any] | None:
    """Parse one line; None if it is not a metrics object."""
    try:
        line = json.loads(raw)
    except ValueError:
        return None
    return line if isinstance(line, dict) and isinstance(line.get("step"), int) else None


def _scalar(name: str, value: Any) -> int | float:
    """Convert a real scalar to a Python number."""
    array = np.asarray(value)
    # Kinds of NumPy dtypes: complex, object, bytes, string, datetime and timedelta. bf16 has the kind "V".
    if array.size != 1 or array.dtype.kind in "cOSUMm":
        raise ValueError(f"expected a real scalar for metric {name!r}, got {array.dtype} of shape {array.shape}")
    return int(array.item()) if array.dtype.kind in "iub" else float(array.item())


def _jsonable(value: int | float) -> int | float | str:
    """Replace NaN and infinities, which JSON cannot represent, by their names."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _ratio(amount: float, per: float) -> float | None:
    """Divide; None unless the divisor is positive."""
    # A coarse clock can measure 0 seconds.
    return amount / per if per > 0 else None


def _duration(seconds: float) -> str:
    """Format seconds as h:mm:ss."""
    minutes, second = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{second:02d}"
