"""Further writers of metrics: CSV, TensorBoard and Weights & Biases."""

import csv
import dataclasses
import io
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

from infcl_jax.runtime.file_io import replace_text
from infcl_jax.runtime.outputs import AppendFile, Outputs, lines_until

CSV_FILE = "metrics.csv"

_COLUMNS = ("step", "time", "name", "value")
_ID_FILE = Path("wandb", "run_id")  # in the work directory, so that a resumed run continues the same W&B run
_PROJECT = "infcl_jax"
_WITHOUT_LOGIN = ("offline", "dryrun", "disabled")  # values of WANDB_MODE


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


class WandbRun:
    """Run on Weights & Biases, with the settings of the run as its configuration.

    A resumed run continues it. W&B never drops the steps that a resumed run repeats: it keeps the first value of a
    step. The repeated values are the same bit for bit, unless `config.resume` goes back to an earlier step. Such a run
    becomes a new run in the same group.

    W&B reads its environment variables: `WANDB_PROJECT`, `WANDB_ENTITY`, `WANDB_MODE=offline` and others. If it cannot
    be reached at the start, the run is recorded offline, for `wandb sync`.
    """

    def __init__(self, target: Target) -> None:
        """Start or continue the W&B run; its folder `wandb` in the work directory has W&B's files.

        Raises:
          ImportError: wandb is not installed.
          ValueError: W&B asks for a login.
        """
        wandb = _import_wandb()
        settings, self._outputs, self._failed = target.settings, target.outputs, False
        folder = target.workdir.absolute()
        id_file = folder / _ID_FILE
        known = id_file.is_file() and settings.get("resume", "latest") == "latest"
        run_id = id_file.read_text(errors="replace").strip() if known else secrets.token_hex(4)
        arguments = {
            "project": os.environ.get("WANDB_PROJECT", _PROJECT),
            "group": folder.name,
            "name": folder.name,
            "id": run_id,
            "dir": str(folder),
            "config": dict(settings),
            "resume": "allow",
        }
        try:
            self._run = wandb.init(**arguments)
        except wandb.errors.UsageError as error:  # such as no API key
            raise _no_login(error) from error
        except wandb.errors.Error as error:  # such as an unreachable server
            self._outputs.say(f"warning: W&B: {_line(error)}; the run is recorded offline, upload it with wandb sync")
            wandb.teardown()  # forgets the failed attempt, which would still use the run's ID
            self._run = wandb.init(**arguments, mode="offline")

        def write_id() -> None:
            id_file.parent.mkdir(exist_ok=True)
            replace_text(id_file, run_id)

        self._outputs.attempt(id_file, write_id)

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Log the scalars of a step."""

        def log() -> None:
            if step >= self._run.step:  # W&B would warn of each repeated step
                self._run.log(dict(scalars), step=step)

        self._attempt(log)

    def close(self, failed: bool = False) -> None:
        """Upload what waits and end the W&B run, which shows whether an error ends it."""
        self._attempt(lambda: self._run.finish(exit_code=int(failed)))

    def _attempt(self, call: Callable[[], object]) -> None:
        """Call W&B; the first error gives one line."""
        try:
            call()
        except Exception as error:  # a network, disk or W&B error must not end the training run
            if not self._failed:
                self._failed = True
                self._outputs.say(f"warning: W&B: {_line(error)}; the run continues")


WRITERS: dict[str, Callable[[Target], Writer]] = {
    "csv": CsvFile,
    "tensorboard": EventFile,
    "wandb": WandbRun,
}


def check_writers(names: Collection[str]) -> None:
    """Check that W&B has a login if it is a writer, before a run prepares its data, unless it records offline.

    A terminal is asked for the API key. An unreachable server is no error, see `WandbRun`. Raises `ImportError` without
    wandb, and `ValueError` without a login.
    """
    if "wandb" not in names:
        return
    wandb = _import_wandb()
    if os.environ.get("WANDB_MODE", "online") in _WITHOUT_LOGIN:
        return
    try:
        wandb.login()
    except (wandb.errors.UsageError, ValueError) as error:  # no API key, or a malformed one
        raise _no_login(error) from error
    except wandb.errors.Error:
        pass


def _rows(rows: list[tuple[Any, ...]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


def _step(row: bytes) -> int:
    """Return the step of a row; -1 for the header."""
    first = row.split(b",", 1)[0]
    return -1 if first == b"step" else int(first)


def _import_wandb() -> Any:
    try:
        import wandb
    except ImportError as error:
        raise ImportError(
            "expected wandb for the writer 'wandb', found none; pip install wandb, or remove it from writers"
        ) from error
    return wandb


def _no_login(error: Exception) -> ValueError:
    return ValueError(
        f"expected a login for the writer 'wandb', got: {_line(error)}; wandb login, or set WANDB_MODE=offline"
    )


def _line(error: Exception) -> str:
    """Return the message of an error in one line."""
    return " ".join(str(error).split())
