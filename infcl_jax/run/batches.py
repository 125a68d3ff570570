"""Training batches of a run, and what the waits for them tell."""

import dataclasses
from typing import Any

from infcl_jax.data import TrainIterator
from infcl_jax.data.stages import limiting_stage
from infcl_jax.data.workers import WorkerLost
from infcl_jax.run.build import Run
from infcl_jax.run.lost_workers import LostWorkers
from infcl_jax.runtime.console import process_prefix
from infcl_jax.runtime.data_wait import DataWait
from infcl_jax.runtime.exit_codes import Interrupted
from infcl_jax.runtime.outputs import print_line
from infcl_jax.runtime.processes import union
from infcl_jax.runtime.run_console import RunConsole
from infcl_jax.training.metrics import DATA_WAIT_SHOWN

_STALL_SECONDS = 30.0  # wait for a batch before the first warning, which is repeated after twice the time
# Least time of the steps in seconds before advice is printed, since the pipeline of a short run is still filling.
_ADVICE_SECONDS = 1.0


@dataclasses.dataclass(frozen=True, eq=False)
class Batches:
    """Training batches of a run, in the memory of its steps.

    A long wait for a batch prints a warning that names what the batch waits for. The time of all waits is measured, and
    prints advice if it is large.

    Attributes:
      run: parts of the run.
      data: training data on the host.
      wait: time that the devices wait for data.
      console: console of the run.
      lost_workers: steps at which data workers were killed.
      advised: stages of the data pipeline whose advice is printed.
    """

    run: Run
    data: TrainIterator
    wait: DataWait
    console: RunConsole = dataclasses.field(default_factory=RunConsole)
    lost_workers: LostWorkers = dataclasses.field(default_factory=LostWorkers)
    advised: set[str] = dataclasses.field(default_factory=set)

    def next(self) -> dict[str, Any]:
        """Return the batch of the next step, see `infcl_jax.run.next_batch`."""
        with self.console.reminder(_STALL_SECONDS, self._stall):
            return self.wait.batch(lambda: self.run.next_batch(self.data))

    def _stall(self, seconds: float) -> str:
        return f"warning: {process_prefix()}waiting for data for {seconds:.0f} s: {self.data.awaited()}"

    def waits(self, steps: int) -> dict[str, float]:
        """Return the fraction of time since the last call spent waiting.

        Prints advice if it is large, once for each limiting stage of the data pipeline.

        Args:
          steps: number of finished steps of this process.

        Returns:
          {"data/wait_fraction": fraction}; empty without a measurement: in the first step, and with residency "replay",
          where the step itself reads its batch.
        """
        waited, total = self.wait.take(steps)
        if total == 0.0 or self.run.config.grad_cache.residency == "replay":
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

    def bad_records(self) -> dict[str, int]:
        """Count the bad records by metric: of this process, and of all up to the last call of `share_bad_records`."""
        return {f"data/bad_records/{name}": count for name, count in self.data.bad_records.counts().items()}

    def end(self, error: WorkerLost) -> WorkerLost | Interrupted:
        """Return the exception that ends the run after a lost worker, see `LostWorkers.end`."""
        first = self.data.get_state()["next_batch"] + 1
        last = min(first + self.data.batches_ahead(error), self.run.config.total_steps)
        return self.lost_workers.end(error, first, last)
