"""Training batches of a run, waits for them, and data workers lost on the way."""

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any

from infcl_jax.data import TrainIterator
from infcl_jax.data.parallelism import limiting_stage
from infcl_jax.data.workers import WorkerLost
from infcl_jax.run.base import Run
from infcl_jax.runtime.console import process_prefix, say
from infcl_jax.runtime.exit_codes import Interrupted
from infcl_jax.runtime.file_io import read_json, replace_text
from infcl_jax.runtime.outputs import Outputs, print_line
from infcl_jax.runtime.processes import union
from infcl_jax.runtime.run_console import RunConsole
from infcl_jax.runtime.step_time import DataWait
from infcl_jax.training.metrics import DATA_WAIT_SHOWN

LOST_WORKERS_FILE = "lost_workers.json"
_STALL_SECONDS = 30.0  # wait for a batch before the first warning, which is repeated after twice the time
# Least time of the steps in seconds before advice is printed, since the pipeline of a short run is still filling.
_ADVICE_SECONDS = 1.0


class LostWorkers:
    """Steps that lost a data worker, in a file of the work directory.

    A loss has a range of steps, because a worker reads ahead: its first step waits for data in vain, and its last one
    is the latest whose data the worker may have read. Two losses with a common step are the same fault. The ranges of
    all processes are in one file, since a step needs the same data on every number of processes.
    """

    def __init__(self, workdir: Path, outputs: Outputs) -> None:
        """Read the file."""
        self._path, self._outputs = workdir / LOST_WORKERS_FILE, outputs
        self._ranges: list[tuple[int, int]] = []
        with contextlib.suppress(OSError, ValueError, TypeError):  # absent or damaged
            self._ranges = [(int(first), int(last)) for first, last in read_json(self._path, list)]

    def passed(self, step: int) -> None:
        """Forget the losses up to a step that has finished."""
        if any(last <= step for _, last in self._ranges):
            self._ranges = [(first, last) for first, last in self._ranges if last > step]
            self._outputs.attempt(self._path, self._write)

    def end(self, error: WorkerLost, first: int, last: int) -> WorkerLost | Interrupted:
        """Record a worker lost between two steps, and return `Interrupted`, or an error that another start repeats."""
        if not error.killed:
            return error
        if any(first <= other_last and other_first <= last for other_first, other_last in self._ranges):
            again = f"{error}; lost at step {first} again, so another start would lose it too"
            return type(error)(again, killed=False)
        self._ranges.append((first, last))
        self._outputs.attempt(self._path, self._write)
        return Interrupted(f"{error}; lost at step {first}, the same command resumes the run")

    def _write(self) -> None:
        if self._ranges:
            replace_text(self._path, json.dumps(self._ranges))
        else:
            self._path.unlink(missing_ok=True)


@dataclasses.dataclass(frozen=True, eq=False)
class Batches:
    """Training batches of a run, in the memory of its steps.

    A long wait for a batch prints a warning that names what the batch waits for. The time of all waits is measured, and
    prints advice if it is large.

    Attributes:
      wait: time that the devices wait for data.
      advised: stages of the data pipeline whose advice is printed.
    """

    run: Run
    data: TrainIterator
    wait: DataWait
    lost_workers: LostWorkers
    console: RunConsole = dataclasses.field(default_factory=RunConsole)
    advised: set[str] = dataclasses.field(default_factory=set)

    def next(self) -> dict[str, Any]:
        """Return the batch of the next step, see `infcl_jax.run.next_batch`."""
        with self.console.reminder(_STALL_SECONDS, self._stall):
            padded = self.data.packer.padded
            batch = self.wait.batch(lambda: self.run.next_batch(self.data), lambda: self.data.packer.seconds)
        if not padded and self.data.packer.padded:
            say("texts of a batch need more rows: it is padded, as are later ones, for which another step is compiled")
        return batch

    def _stall(self, seconds: float) -> str:
        if self.data.packer.waits:
            return f"warning: {process_prefix()}waiting for the other processes for {seconds:.0f} s"
        return f"warning: {process_prefix()}waiting for data for {seconds:.0f} s: {self.data.awaited()}"

    def waits(self, steps: int) -> dict[str, float]:
        """Return the fraction of time since the last call spent waiting, by metric.

        Prints advice if it is large, once for each limiting stage of the data pipeline. There is no measurement in the
        first of the finished steps, and with offload "replay", where the step itself reads its batch.
        """
        waited, total = self.wait.take(steps)
        if total == 0.0 or self.run.config.grad_cache.offload == "replay":
            return {}
        stage = limiting_stage(self.data.stats(), self.data.parallelism.readers)
        if waited >= DATA_WAIT_SHOWN * total and total >= _ADVICE_SECONDS and stage not in self.advised:
            self.advised.add(stage)
            # Every process prints: others only see that the slowest one's steps take longer.
            percent, advice = f"{100 * waited / total:.0f} %", self.data.parallelism.advice(stage)
            print_line(f"{process_prefix()}waiting for data: {percent} of the time, {stage}-bound; {advice}")
        return {"data/wait_fraction": waited / total}

    def share_bad_records(self) -> None:
        """Add the bad records of all processes, which must all call it."""
        self.data.bad_records.add(union(self.data.bad_records.indices()))

    def counts(self) -> dict[str, int]:
        """Count bad records and, of packed texts, padded batches, by metric.

        It knows bad records of other processes up to the last call of `share_bad_records`.
        """
        counts = {f"data/bad_records/{name}": count for name, count in self.data.bad_records.counts().items()}
        return counts | ({"data/padded_batches": self.data.packer.padded} if self.data.packer.entries else {})

    def end(self, error: WorkerLost) -> WorkerLost | Interrupted:
        """Return the exception that ends the run after a lost worker, see `LostWorkers.end`."""
        first = self.data.get_state()["next_batch"] + 1
        last = min(first + self.data.batches_ahead(error), self.run.config.total_steps)
        return self.lost_workers.end(error, first, last)
