"""Metrics of a run: a JSON-lines file that survives crashes, TensorBoard, and one console line an interval."""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import numpy as np

METRICS_FILE = "metrics.jsonl"

_RESERVED = ("step", "time")


class MetricWriter:
    """Appends metrics to `metrics.jsonl` in the work directory, and to TensorBoard if asked.

    Every line is one JSON object `{"step": ..., "time": ..., <name>: <value>, ...}`, time in seconds since the epoch.
    JSON has no infinities, so NaN and infinite values are written as the strings "NaN", "Infinity" and "-Infinity";
    `read_metrics` turns them back into floats. Each line is flushed when written.

    On start the file of an earlier run in the same directory is repaired: a last line torn by a crash is dropped, and
    with `resume_step` so are the lines of later steps, which the resumed run will write again. The repaired file
    replaces the old one in one atomic rename.

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
    ) -> None:
        """Opens (and repairs) the file.

        Args:
            workdir: directory of the run, created if missing.
            tensorboard: also write event files to `workdir/tensorboard`; needs tensorboardX.
            lead: False on all processes but one; such a writer touches no file.
            resume_step: the last step whose lines are kept; None keeps all of them.

        Raises:
            ImportError: `tensorboard` without tensorboardX.
            ValueError: the existing file holds something else than metrics before its last line.
        """
        self._file: TextIO | None = None
        self._board: Any = None
        self._closed = False
        if not lead:
            return
        folder = Path(workdir)
        folder.mkdir(parents=True, exist_ok=True)
        if tensorboard:
            self._board = _summary_writer(folder / "tensorboard", resume_step)
        path = folder / METRICS_FILE
        if path.exists():
            _repair(path, resume_step)
        self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Writes one line.

        Args:
            step: the training step the metrics belong to.
            metrics: scalars (Python, NumPy or JAX; reading a JAX array waits for it). Names are free but for "step"
                and "time".

        Raises:
            ValueError: a reserved name, a value that is not a real scalar, or a closed writer. On the lead only.
        """
        if self._file is None:
            if self._closed:
                raise ValueError("expected an open MetricWriter, got a write after close()")
            return
        taken = [name for name in _RESERVED if name in metrics]
        if taken:
            raise ValueError(f"expected metric names other than {_RESERVED}, got {taken}; rename them")
        values = {name: _scalar(name, value) for name, value in metrics.items()}
        line = {"step": int(step), "time": round(time.time(), 3)} | {k: _jsonable(v) for k, v in values.items()}
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(name, value, int(step))
            self._board.flush()

    def close(self) -> None:
        """Closes the files; calling it again does nothing."""
        if self._file is not None:
            self._file.close()
            self._file = None
            self._closed = True
        if self._board is not None:
            self._board.close()
            self._board = None

    def __enter__(self) -> MetricWriter:
        """The writer itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Closes the files."""
        self.close()


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, int | float]]:
    """Reads a `metrics.jsonl`, one dict a line, with "NaN" and the infinities as floats; a torn last line is left out.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a line before the last is not a metrics object.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"expected a metrics file at {path}, found none; pass the {METRICS_FILE} of a run")
    return [{k: float(v) if isinstance(v, str) else v for k, v in line.items()} for line, _ in _parse(path)]


class ProgressPrinter:
    """Prints one console line an interval: step, loss, logit scale, examples per second and time left.

    Rates count from the first update, so the first step, which waits for compilation, is in none of them,
    and the clock stands still inside `paused()`. The time left is that of training alone, at the mean rate so far.

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
        """Prepares the printer.

        Args:
            total_steps: the last step of the run.
            batch_size: examples a step, over all devices.
            every: an update prints if its step is a multiple of this, the last one or the first seen.
            lead: False on all processes but one; such a printer measures but prints nothing.
            print_line: receives each line; `print` with flushing by default.
            clock: seconds, monotonic.

        Raises:
            ValueError: total_steps, batch_size or every is < 1.
        """
        for name, value in (("total_steps", total_steps), ("batch_size", batch_size), ("every", every)):
            if value < 1:
                raise ValueError(f"expected {name} >= 1, got {value}")
        self.examples_per_second: float | None = None
        self._total, self._batch, self._every = total_steps, batch_size, every
        self._print = (print_line or _print_flushed) if lead else None
        self._clock = clock
        self._pauses, self._pause_start, self._idle = 0, 0.0, 0.0
        self._first: tuple[int, float] | None = None  # step and active time when the rates start
        self._last: tuple[int, float] = (0, 0.0)  # the same at the last interval

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Notes that `step` is finished and prints its line if it is due.

        Call it when the metrics of the step have reached the host: a step that was only dispatched takes no time.
        After a line, `examples_per_second` holds the rate since the line before (None for the first).

        Args:
            step: a step later than that of the previous call.
            metrics: scalars; "loss" and "logit_scale" are shown where present.
        """
        first = self._first is None
        if not (first or step % self._every == 0 or step == self._total):
            return
        now = self._active_time()
        if not first:
            self.examples_per_second = _ratio((step - self._last[0]) * self._batch, now - self._last[1])
        if self._print is not None:
            self._print(self._line(step, metrics, now))
        self._last = (step, now)
        self._first = self._first or self._last

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stops the clock, for evaluation and checkpoints; may be nested.

        Wait for the last step before entering, or the rest of its time is lost to the pause.
        """
        if self._pauses == 0:
            self._pause_start = self._clock()
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1
            if self._pauses == 0:
                self._idle += self._clock() - self._pause_start

    def _active_time(self) -> float:
        """Seconds on the clock outside of pauses."""
        now = self._pause_start if self._pauses else self._clock()
        return now - self._idle

    def _line(self, step: int, metrics: Mapping[str, Any], now: float) -> str:
        width = len(str(self._total))
        parts = [f"step {step:>{width}}/{self._total}"]
        if "loss" in metrics:
            parts.append(f"loss {float(_scalar('loss', metrics['loss'])):.4f}")
        if "logit_scale" in metrics:
            parts.append(f"scale {float(_scalar('logit_scale', metrics['logit_scale'])):.2f}")
        if self._first is not None and self.examples_per_second is not None:
            seconds_a_step = _ratio(now - self._first[1], step - self._first[0])
            parts.append(f"{self.examples_per_second:,.0f} examples/s")
            parts.append(f"left {_duration((seconds_a_step or 0.0) * (self._total - step))}")
        return "  ".join(parts)


def _summary_writer(folder: Path, resume_step: int | None) -> Any:
    """A tensorboardX writer that makes viewers forget the events after `resume_step`."""
    try:
        import tensorboardX
    except ImportError as error:
        raise ImportError(
            "expected tensorboardX for tensorboard=True, found none; pip install tensorboardX or turn it off"
        ) from error
    purge = None if resume_step is None else resume_step + 1
    return tensorboardX.SummaryWriter(str(folder), purge_step=purge)


def _repair(path: Path, resume_step: int | None) -> None:
    """Rewrites the file without a torn tail and without lines after `resume_step`, if there is any of either."""
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
    """The objects of a metrics file with their raw lines; a last line that is no such object is left out."""
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
    """The object on one line, None if the line holds anything else."""
    try:
        line = json.loads(raw)
    except ValueError:
        return None
    return line if isinstance(line, dict) and isinstance(line.get("step"), int) else None


def _scalar(name: str, value: Any) -> int | float:
    """A Python number from any real scalar."""
    array = np.asarray(value)
    if array.size != 1 or array.dtype.kind in "cOSUMm":
        raise ValueError(f"expected a real scalar for metric {name!r}, got {array.dtype} of shape {array.shape}")
    return int(array.item()) if array.dtype.kind in "iub" else float(array.item())


def _jsonable(value: int | float) -> int | float | str:
    """The number, or its name if JSON has no such number."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _ratio(amount: float, per: float) -> float | None:
    """amount / per, None for a clock that has not moved."""
    return amount / per if per > 0 else None


def _duration(seconds: float) -> str:
    """Hours, minutes and seconds as h:mm:ss."""
    minutes, second = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{second:02d}"


def _print_flushed(line: str) -> None:
    print(line, flush=True)
