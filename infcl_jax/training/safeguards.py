"""Safeguards of a training loop: non-finite steps, watchdogs and unwritable outputs."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Protocol, Self

import jax

from infcl_jax.runtime.lost_workers import LostWorkers
from infcl_jax.runtime.outputs import Outputs, print_line
from infcl_jax.runtime.watchdog import DataStall, LossSpikes, SlowSteps
from infcl_jax.training.nonfinite import NonfiniteSteps


class _Data(Protocol):
    """Data iterator that knows its records, such as `infcl_jax.data.TrainIterator`."""

    def batch_indices(self, number: int) -> list[int]:
        """Return the sample indices of a global batch."""

    def awaited(self) -> str:
        """Describe what the next batch waits for."""


@dataclasses.dataclass(frozen=True)
class Safeguards:
    """Reactions to faults of one training run.

    Examples:
      >>> safeguards = Safeguards()
      >>> safeguards.outputs.failures.total()
      0

    Attributes:
      outputs: handling of files that cannot be written.
      nonfinite: reaction to steps that are not finite.
      data_stall: warning of a batch that does not arrive.
      slow_steps: warning of slow steps.
      loss_spikes: warning of loss spikes.
      lost_workers: steps at which data workers were killed.
    """

    outputs: Outputs = dataclasses.field(default_factory=Outputs)
    nonfinite: NonfiniteSteps = dataclasses.field(default_factory=NonfiniteSteps)
    data_stall: DataStall = dataclasses.field(default_factory=DataStall)
    slow_steps: SlowSteps = dataclasses.field(default_factory=SlowSteps)
    loss_spikes: LossSpikes = dataclasses.field(default_factory=LossSpikes)
    lost_workers: LostWorkers = dataclasses.field(default_factory=LostWorkers)

    @classmethod
    def create(
        cls,
        on_nonfinite: str,
        max_skipped: int,
        workdir: str | os.PathLike[str],
        start: int,
        data: _Data,
        outputs: Outputs,
    ) -> Self:
        """Create the safeguards of a run.

        Args:
          on_nonfinite: "stop" or "skip", as in `make_train_step`.
          max_skipped: skipped steps in a row after which the run stops.
          workdir: directory of the run.
          start: number of completed steps.
          data: training data.
          outputs: handling of files that cannot be written.
        """
        process = f"process {jax.process_index()}: " if jax.process_count() > 1 else ""
        return cls(
            outputs,
            NonfiniteSteps(
                on_nonfinite,
                limit=max_skipped,
                workdir=workdir,
                start=start,
                batch_indices=data.batch_indices,
                lead=jax.process_index() == 0,
                outputs=outputs,
            ),
            DataStall(data.awaited, process=process),
            SlowSteps(start, process=process),
            lost_workers=LostWorkers(workdir, outputs),
        )

    def next_batch(self, read: Callable[[], Any]) -> Any:
        """Return `read()`, with warnings while it takes long."""
        return self.data_stall.guard(read)

    def check(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Check the metrics of a step.

        Args:
          step: training step of the metrics.
          metrics: metrics of a step from `make_train_step`, on the host.

        Raises:
          FloatingPointError: the step is not finite, see `NonfiniteSteps.check`.
        """
        self.nonfinite.check(step, metrics)
        self.lost_workers.passed(step)
        line = self.loss_spikes.update(step, float(metrics["loss"]))
        if line is not None and jax.process_index() == 0:
            print_line(line)

    def metrics(self) -> dict[str, int]:
        """Return the counts for a line of metrics."""
        return self.nonfinite.metrics() | self.loss_spikes.take()

    def __enter__(self) -> Self:
        """Start the watchdogs."""
        self.data_stall.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Stop the watchdogs and close the files."""
        self.data_stall.__exit__(kind, error, tb)
        self.nonfinite.close()
