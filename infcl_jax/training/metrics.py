"""Training metrics: crash-safe JSON lines, and further writers."""

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from infcl_jax.ops.common.checks import check_choice
from infcl_jax.runtime.file_io import LINES_BYTES, read_regular, replacing
from infcl_jax.runtime.outputs import AppendFile, Outputs
from infcl_jax.training.writers import WRITERS, Target, Writer

METRICS_FILE = "metrics.jsonl"

_LINE_BYTES = 16 * 2**20  # longest line, some 300,000 metrics

DATA_WAIT_SHOWN = 0.05  # fraction of the time from which on waiting for data is printed

_RESERVED = ("step", "time")


class MetricWriter:
    """Append metrics to `workdir/metrics.jsonl`, and give them to further writers.

    Every line is one JSON object `{"step": ..., "time": ..., <name>: <value>, ...}`, with the time in seconds since the
    Unix epoch. JSON cannot represent NaN and infinities, so they are written as the strings "NaN", "Infinity" and
    "-Infinity". `read_metrics` converts them back to floats. Each line is flushed when written.

    The constructor repairs an existing file. It drops a last line truncated by a crash. With `resume_step` it also
    drops the lines of later steps, which the resumed run writes again. An atomic rename replaces the file.

    A line that cannot be written is no error: see `infcl_jax.runtime.outputs.AppendFile`.

    Examples:
      >>> with MetricWriter("runs/written") as writer:
      ...     writer.write(1, {"loss": 4.1, "logit_scale": 14.3})
      >>> read_metrics("runs/written/metrics.jsonl")[0]["loss"]
      4.1
    """

    def __init__(
        self,
        workdir: str | os.PathLike[str],
        *,
        writers: Sequence[str] = (),
        lead: bool = True,
        resume_step: int | None = None,
        outputs: Outputs | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """Open the metrics file and repair it if needed.

        Args:
            workdir: directory of the run, created if missing.
            writers: further writers, keys of `infcl_jax.training.writers.WRITERS`.
            lead: whether this process writes; True on exactly one process.
            resume_step: last step whose lines are kept; None keeps all lines.
            outputs: handling of write errors; None: one of its own.
            settings: settings of the run, for writers that record them.

        Raises:
            ImportError: the package of a writer is not installed.
            ValueError: a line before the last of the existing file is not a metrics object, a writer is unknown, or
                Weights & Biases refuses the login.
        """
        self._lines: AppendFile | None = None
        self._writers: list[Writer] = []
        self._closed = False
        if not lead:
            return
        outputs = outputs or Outputs()
        folder = Path(workdir)
        path = folder / METRICS_FILE
        if path.exists():
            _repair(path, resume_step)
        target = Target(folder, resume_step, outputs, settings or {})
        for name in writers:
            check_choice("writer", name, tuple(WRITERS))
            self._writers.append(WRITERS[name](target))
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
        for writer in self._writers:
            writer.write(int(step), values)

    def close(self, failed: bool = False) -> None:
        """Close the files; repeated calls have no effect.

        Args:
            failed: whether an error ends the run.
        """
        if self._lines is not None:
            self._lines.close()
            self._lines = None
            self._closed = True
        while self._writers:
            self._writers.pop(0).close(failed)

    def __enter__(self) -> "MetricWriter":
        """Return the writer."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Close the files."""
        self.close(failed=kind is not None)


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, int | float]]:
    """Read a `metrics.jsonl` file into one dict per line.

    "NaN", "Infinity" and "-Infinity" become floats. A truncated last line is skipped.

    Examples:
      >>> with MetricWriter("runs/read") as writer:
      ...     writer.write(1, {"loss": 4.1})
      >>> [(line["step"], line["loss"]) for line in read_metrics("runs/read/metrics.jsonl")]
      [(1, 4.1)]

    Raises:
      FileNotFoundError: the file does not exist.
      ValueError: a line before the last is not a metrics object, or the path names no regular file or one above 1 GiB.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"expected a metrics file at {path}, found none; pass the {METRICS_FILE} of a run")
    return [line for line, _ in _parse(path)]


def _repair(path: Path, resume_step: int | None) -> None:
    """Drop a truncated last line and all lines after `resume_step`."""
    kept = [raw for line, raw in _parse(path) if resume_step is None or line["step"] <= resume_step]
    content = b"".join(raw + b"\n" for raw in kept)
    if content == read_regular(path, LINES_BYTES):
        return
    with replacing(path) as temporary, temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _parse(path: Path) -> list[tuple[dict[str, int | float], bytes]]:
    """Parse a metrics file into (object, raw line) pairs, without an invalid last line."""
    lines = read_regular(path, LINES_BYTES).split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    parsed = []
    for number, raw in enumerate(lines, start=1):
        line = parse_line(raw)
        if line is not None:
            parsed.append((line, raw))
        elif number < len(lines):
            raise ValueError(f"expected a metrics object on line {number} of {path}, got {raw[:60]!r}; remove the line")
    return parsed


def parse_line(raw: bytes) -> dict[str, int | float] | None:
    """Parse a line of a metrics file; None if it is damaged.

    Args:
      raw: JSON object of numbers by name, with an int64 step >= 0. "NaN", "Infinity" and "-Infinity" become floats.
    """
    if len(raw) > _LINE_BYTES:
        return None
    try:
        line = {name: float(value) if isinstance(value, str) else value for name, value in json.loads(raw).items()}
        for value in line.values():
            float(value)
        return line if isinstance(line["step"], int) and 0 <= line["step"] < 2**63 else None
    except (ValueError, TypeError, AttributeError, KeyError, OverflowError, RecursionError):
        return None


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
