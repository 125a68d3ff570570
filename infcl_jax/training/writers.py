"""Further writers of metrics: CSV, TensorBoard and Weights & Biases."""

from __future__ import annotations

import csv
import dataclasses
import io
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

from infcl_jax.ops.common.checks import check_choice
from infcl_jax.runtime.outputs import AppendFile, Outputs, lines_until
from infcl_jax.training.tensorboard import EventFile
from infcl_jax.training.wandb_run import WandbRun, check_login

CSV_FILE = "metrics.csv"

_COLUMNS = ("step", "time", "name", "value")


class Writer(Protocol):
    """Writer of the metrics of one run, on its leading process.

    A write that fails is no error of the run: it prints a warning, and the values wait or are lost.

    Examples:
      >>> class Printer:
      ...     def write(self, step, scalars):
      ...         print(step, scalars)
      ...
      ...     def close(self, failed=False):
      ...         pass
      >>> writer: Writer = Printer()
      >>> writer.write(1, {"loss": 4.1})
      1 {'loss': 4.1}
    """

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write the scalars of a step.

        Args:
          step: training step; never lower than in the previous call.
          scalars: values by name, which may be NaN or infinite.
        """

    def close(self, failed: bool = False) -> None:
        """Write what waits and close the files.

        Args:
          failed: whether an error ends the run.
        """


@dataclasses.dataclass(frozen=True)
class Target:
    """Run whose metrics are written.

    Attributes:
      workdir: directory of the run.
      resume_step: last step that the run has kept; later ones are written again. None: all are kept.
      outputs: handling of write errors.
      settings: settings of the run, for writers that record them.
    """

    workdir: Path
    resume_step: int | None
    outputs: Outputs
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class CsvFile:
    """Append scalars to `workdir/metrics.csv`, one row for each.

    The columns are step, time (Unix time in seconds), name and value. Rows of one value need no columns known in
    advance, so the file is only appended to.

    Examples:
      pandas.read_csv("metrics.csv").pivot_table(index="step", columns="name", values="value")
    """

    def __init__(self, target: Target) -> None:
        """Open the file; drop a truncated last row and the rows after `resume_step`."""
        path = target.workdir / CSV_FILE
        keep = sum(map(len, lines_until(path, target.resume_step, _step)))
        self._file = AppendFile(path, target.outputs, keep=keep, header=_rows([_COLUMNS]))

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Append a row for each scalar; see `Writer.write`."""
        now = round(time.time(), 3)
        self._file.write(_rows([(step, now, name, repr(value)) for name, value in scalars.items()]))

    def close(self, failed: bool = False) -> None:
        """Close the file."""
        self._file.close()


def _open_tensorboard(target: Target) -> Writer:
    return EventFile(target.workdir / "tensorboard", target.resume_step, target.outputs)


def _open_wandb(target: Target) -> Writer:
    return WandbRun(target.workdir, target.settings, target.outputs)


WRITERS: dict[str, Callable[[Target], Writer]] = {
    "csv": CsvFile,
    "tensorboard": _open_tensorboard,
    "wandb": _open_wandb,
}


def check_writers(names: Collection[str]) -> None:
    """Check the logins of writers, before a run prepares its data.

    Raises:
      ImportError: the package of a writer is not installed.
      ValueError: Weights & Biases has no login.
    """
    if "wandb" in names:
        check_login()


def open_writer(name: str, target: Target) -> Writer:
    """Open a writer by name.

    Args:
      name: key of `WRITERS`.
      target: run whose metrics are written.

    Raises:
      ImportError: its package is not installed.
      ValueError: the name is unknown, or Weights & Biases refuses the login.
    """
    check_choice("writer", name, tuple(WRITERS))
    return WRITERS[name](target)


def _rows(rows: list[tuple[Any, ...]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


def _step(row: bytes) -> int:
    """Return the step of a row; -1 for the header."""
    first = row.split(b",", 1)[0]
    return -1 if first == b"step" else int(first)
