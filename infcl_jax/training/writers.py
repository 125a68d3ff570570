"""Further writers of metrics: CSV, TensorBoard and Weights & Biases."""

import csv
import dataclasses
import io
import os
import socket
import struct
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

from infcl_jax.runtime.outputs import AppendFile, Outputs, lines_until
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
    """Append scalars to `workdir/metrics.csv`, one row for each: step, time (Unix time in seconds), name and value.

    Rows of one value need no columns known in advance, so the file is only appended to. In pandas,
    `pandas.read_csv("metrics.csv").pivot_table(index="step", columns="name", values="value")` has a column for each.
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


class EventFile:
    """Append scalars to a new event file, as `tensorboardX.SummaryWriter` would.

    That class writes in a thread, which ends at the first error of the disk; from the eleventh event on, the training
    loop would then wait forever. Here every write is synchronous, and errors are handled as in `AppendFile`.
    """

    def __init__(self, target: Target) -> None:
        """Create the file; without tensorboardX, raise `ImportError`."""
        try:
            from tensorboardX import record_writer, summary
            from tensorboardX.proto import event_pb2
        except ImportError as error:
            raise ImportError(
                "expected tensorboardX for the writer 'tensorboard', found none; pip install tensorboardX, or remove "
                "it from writers"
            ) from error
        self._event, self._scalar, self._checksum = event_pb2.Event, summary.scalar, record_writer.masked_crc32c
        header = [self._event(wall_time=time.time(), file_version="brain.Event:2")]
        if target.resume_step is not None:  # TensorBoard hides events from this step on
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            header.append(self._event(wall_time=time.time(), step=target.resume_step + 1, session_log=start))
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        path = target.workdir / "tensorboard" / name
        self._file = AppendFile(path, target.outputs, header=b"".join(map(self._record, header)))

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Append the scalars of a step; see `Writer.write`."""
        now = time.time()
        events = [self._event(wall_time=now, step=step, summary=self._scalar(name, v)) for name, v in scalars.items()]
        self._file.write(b"".join(map(self._record, events)))

    def close(self, failed: bool = False) -> None:
        """Close the file."""
        self._file.close()

    def _record(self, event: Any) -> bytes:
        """Encode an event as a TFRecord: length, its checksum, data, checksum."""
        data = event.SerializeToString()
        length = struct.pack("<Q", len(data))
        checksums = (struct.pack("<I", self._checksum(content)) for content in (length, data))
        return length + next(checksums) + data + next(checksums)


WRITERS: dict[str, Callable[[Target], Writer]] = {
    "csv": CsvFile,
    "tensorboard": EventFile,
    "wandb": lambda target: WandbRun(target.workdir, target.settings, target.outputs),
}


def check_writers(names: Collection[str]) -> None:
    """Check the logins of writers, before a run prepares its data; see `check_login`."""
    if "wandb" in names:
        check_login()


def _rows(rows: list[tuple[Any, ...]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


def _step(row: bytes) -> int:
    """Return the step of a row; -1 for the header."""
    first = row.split(b",", 1)[0]
    return -1 if first == b"step" else int(first)
