"""Contents of work directories, also of unfinished or damaged ones."""

import collections
import dataclasses
import io
import math
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from infcl_jax.evaluation.writers import EVALUATION_FILE, EXAMPLES_FILE, GRID_FILE
from infcl_jax.report.files import (
    bounded,
    byte_size,
    integer,
    number,
    read_bytes,
    read_examples,
    read_json,
    read_picture,
)
from infcl_jax.runtime.environment import ENVIRONMENT_FILE
from infcl_jax.runtime.file_io import LINES_BYTES
from infcl_jax.runtime.run_console import LOG_FILE
from infcl_jax.runtime.workdir import CONFIG_FILE, LOCK_FILE, STALE
from infcl_jax.settings import flattened
from infcl_jax.training.metrics import METRICS_FILE, parse_line

_LATEST = 2.0**38  # seconds since the Unix epoch, the year 10680
_MESSAGES = 12  # latest messages of the log that a report shows
_MESSAGE_BYTES = 2000  # longest message; later bytes are left out
_LOG_BYTES = 16 * 2**20  # end of the log that is read, some 100,000 lines
# Date and first word of a line, without the word for messages of checkpoints. Takes linear time.
_DATED = re.compile(
    rb"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\S*  (?:process \d+: )?(?:.*(?:NOT saved|is damaged)|(\w+|waiting for data): )"
)


class Point(NamedTuple):
    """Value of a metric at a step, which may be infinite or NaN."""

    step: int
    time: float  # seconds since the Unix epoch
    value: float


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RunRecord:
    """Files of a run, without those that are missing or damaged.

    Examples:
      >>> run = read_run("runs/digits", "digits")
      >>> run.running, run.results
      (False, {})

    Attributes:
      name: name of the run in a report.
      config: settings by dotted name; empty without a readable `config.json`.
      series: points of each metric by name, by increasing step.
      evaluated: names of the metrics of evaluations, the others are of training steps.
      results: metrics of the latest evaluation.
      results_step: step of the latest evaluation; None without one.
      starts: environment of each start of the run, see `infcl_jax.runtime.environment`.
      examples: valid "confusions" and "examples" by task, see `infcl_jax.evaluation.writers.write_examples`.
      grid: PNG file of retrieved images; None without one.
      messages: latest warnings, errors and advice of the log file, with their dates.
      warnings: damaged files and values that are not finite, one sentence each.
      running: whether a process holds the lock of the work directory.
    """

    name: str
    config: dict[str, Any]
    series: dict[str, list[Point]]
    evaluated: frozenset[str]
    results: dict[str, float]
    results_step: int | None
    starts: list[dict[str, Any]]
    examples: dict[str, Any]
    grid: bytes | None
    messages: tuple[str, ...]
    warnings: tuple[str, ...]
    running: bool

    @property
    def last(self) -> Point | None:
        """Latest point of any metric; None without metrics."""
        return max((points[-1] for points in self.series.values()), key=lambda point: point[:2], default=None)

    @property
    def total_steps(self) -> int | None:
        """Last step of the run; None without the configuration."""
        return integer(self.config.get("total_steps"))

    @property
    def batch_size(self) -> int | None:
        """Examples of a step; None without the configuration."""
        return integer(self.config.get("batch_size"))

    @property
    def finished(self) -> bool:
        """True if the run has ended after its last step."""
        return not self.running and None not in (self.last, self.total_steps) and self.last.step >= self.total_steps

    @property
    def times(self) -> tuple[float, float]:
        """First and last time of the metrics in seconds since the Unix epoch, or NaN."""
        times = [point.time for points in self.series.values() for point in points if math.isfinite(point.time)]
        return min(times, default=math.nan), max(times, default=math.nan)

    @property
    def plan(self) -> dict[str, Any]:
        """Memory plan of the latest start, see `infcl_jax.runtime.environment`; empty without one."""
        plan = self.starts[-1].get("memory_plan") if self.starts else None
        if not (isinstance(plan, dict) and isinstance(plan.get("components"), dict)):
            return {}
        components = {name: byte_size(size) for name, size in plan["components"].items()}
        return {"components": components} | {name: byte_size(plan.get(name)) for name in ("peak", "limit")}

    def values(self, name: str) -> list[float]:
        """Return the finite values of a metric, by increasing step."""
        return [point.value for point in self.series.get(name, ()) if math.isfinite(point.value)]

    def state(self, now: float | None = None) -> str:
        """Describe how far the run is at a time in seconds since the Unix epoch; None: now."""
        if self.running:
            return "running"
        if self.last is None:
            return "no metrics"
        if self.finished:
            return "finished"
        idle = (time.time() if now is None else now) - self.last.time
        return "stopped" + (f" {format_seconds(idle)} ago" if math.isfinite(idle) else "")


def read_run(workdir: str | Path, name: str) -> RunRecord:
    """Read the files of a run.

    Examples:
      >>> run = read_run("runs/digits", "digits")
      >>> run.config["model"]
      'tiny'

    Args:
      workdir: directory of the run.
      name: name of the run in the report.

    Raises:
      FileNotFoundError: `workdir` is not a directory.
    """
    folder = Path(workdir)
    if not folder.is_dir():
        raise FileNotFoundError(f"expected the work directory of a run, got {folder}, which is no folder")
    warnings: list[str] = []
    lines = _read_lines(folder / METRICS_FILE, warnings)
    series, evaluated = _series(lines)
    warnings += _nonfinite(series)
    results, step = _latest_results(lines)
    evaluation = read_json(folder / EVALUATION_FILE, dict, warnings)
    if evaluation and (evaluated_step := integer(evaluation.pop("step", None))) is None:
        warnings.append(f"{EVALUATION_FILE} is damaged and left out")
    elif evaluation and evaluated_step >= (step or 0):
        step = evaluated_step
        results |= evaluation
    settings = read_json(folder / CONFIG_FILE, dict, warnings)
    if not os.path.lexists(folder / CONFIG_FILE):
        warnings.append(f"no {CONFIG_FILE}: a run writes it after its first step")
    numbers = {name: number(value) for name, value in results.items()}
    return RunRecord(
        name=name,
        config=flattened(settings),
        series=series,
        evaluated=evaluated,
        results={name: value for name, value in numbers.items() if value is not None},
        results_step=step,
        starts=[start for start in read_json(folder / ENVIRONMENT_FILE, list, warnings) if isinstance(start, dict)],
        examples=read_examples(folder / EXAMPLES_FILE, warnings),
        grid=read_picture(folder / GRID_FILE, warnings),
        messages=_read_messages(folder / LOG_FILE, warnings),
        warnings=tuple(warnings),
        running=_is_held(folder / LOCK_FILE),
    )


def read_runs(workdirs: Sequence[str | Path]) -> list[RunRecord]:
    """Read the files of several runs.

    Runs are named by their folders. If two folders have the same name, all are named by their paths.

    Examples:
      >>> [run.name for run in read_runs(["runs/digits"])]
      ['digits']

    Args:
      workdirs: directories of the runs.

    Raises:
      FileNotFoundError: one is not a directory.
      ValueError: none is given.
    """
    if not workdirs:
        raise ValueError("expected work directories, got none; name those of one or several runs")
    names = [Path(workdir).resolve().name for workdir in workdirs]
    if len(set(names)) < len(names):
        names = [str(workdir) for workdir in workdirs]
    return [read_run(workdir, name) for workdir, name in zip(workdirs, names, strict=True)]


def format_seconds(seconds: float) -> str:
    """Format a duration as "3 h 25 min"."""
    minutes = round(seconds / 60)
    if minutes < 1:
        return f"{seconds:.0f} s"
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"


def _read_lines(path: Path, warnings: list[str]) -> list[dict[str, Any]]:
    """Read the lines of metrics, without damaged ones."""
    content = read_bytes(path, warnings, LINES_BYTES)
    if content is None:
        if not warnings:
            warnings.append(f"no {METRICS_FILE}: the run has not logged a step")
        return []
    lines = [parse_line(raw) for raw in content.splitlines()]
    damaged = [number for number, line in enumerate(lines, start=1) if line is None]
    if damaged:
        plural = f"lines {', '.join(map(str, damaged[:5]))}{' ...' if len(damaged) > 5 else ''} are"
        which = plural if len(damaged) > 1 else f"line {damaged[0]} is"
        last = " (a run that is killed while it writes leaves its last line so)" if damaged == [len(lines)] else ""
        warnings.append(f"{METRICS_FILE}: {which} damaged and left out{last}")
    return [line for line in lines if line is not None]


def _series(lines: list[dict[str, Any]]) -> tuple[dict[str, list[Point]], frozenset[str]]:
    """Collect the points of each metric, and the names of the metrics of evaluations.

    A step that was logged twice has the later value.
    """
    points: dict[str, dict[int, Point]] = collections.defaultdict(dict)
    evaluated = set()
    for line in lines:
        for name in line.keys() - {"step", "time"}:
            points[name][line["step"]] = Point(line["step"], _time(line), bounded(line[name]))
            if "loss" not in line:  # a line of training has it
                evaluated.add(name)
    return {name: [at[step] for step in sorted(at)] for name, at in sorted(points.items())}, frozenset(evaluated)


def _nonfinite(series: dict[str, list[Point]]) -> list[str]:
    """Name the metrics with values that are not finite."""
    messages = []
    for name, points in series.items():
        if steps := [point.step for point in points if not math.isfinite(point.value)]:
            more = f" and {len(steps) - 1} later ones" if len(steps) > 1 else ""
            messages.append(f"{name} is not finite at step {steps[0]}{more}")
    return messages


def _latest_results(lines: list[dict[str, Any]]) -> tuple[dict[str, float], int | None]:
    """Return the metrics and the step of the latest evaluation."""
    latest = max((line for line in lines if "loss" not in line), key=lambda line: line["step"], default={})
    return {name: value for name, value in latest.items() if name not in ("step", "time")}, latest.get("step")


def _read_messages(path: Path, warnings: list[str]) -> tuple[str, ...]:
    """Read the latest warnings, errors and advice of a log file."""
    content = read_bytes(path, warnings, _LOG_BYTES, tail=True) or b""
    lines = (line.rstrip(b"\n")[:_MESSAGE_BYTES] for line in io.BytesIO(content))
    latest = collections.deque(filter(_is_message, lines), maxlen=_MESSAGES)
    return tuple(line.decode(errors="replace") for line in latest)


def _is_message(line: bytes) -> bool:
    """Return whether a line of the log is a warning, an error or advice."""
    dated = _DATED.match(line)
    if dated is None or dated[1] is None:
        return dated is not None
    known = (b"warning", b"error", b"OutOfMemory", b"waiting for data")
    return dated[1] in known or dated[1].endswith(b"Error") or b"Interrupt" in dated[1]


def _time(line: dict[str, int | float]) -> float:
    """Return the time of a line; NaN for one that is no Unix time."""
    seconds = line.get("time", math.nan)
    return float(seconds) if 0 <= seconds < _LATEST else math.nan


def _is_held(lock: Path) -> bool:
    """Return whether a lock names a holder that has touched it recently."""
    try:
        status = lock.stat()
    except OSError:
        return False
    return status.st_size > 0 and time.time() - status.st_mtime < STALE
