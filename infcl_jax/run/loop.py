"""Training and evaluation loop of a run."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from infcl_jax import run
from infcl_jax.data import TrainIterator
from infcl_jax.data.stages import limiting_stage
from infcl_jax.evaluation import Suite, TextRetrievalSuite
from infcl_jax.run.callbacks import Callback
from infcl_jax.run.export import export_weights
from infcl_jax.run.kept_step import keep_step
from infcl_jax.run.lost_workers import LostWorkers
from infcl_jax.run.results import say_results
from infcl_jax.run.task import task_of
from infcl_jax.runtime.console import process_prefix
from infcl_jax.runtime.exit_codes import Interrupted
from infcl_jax.runtime.mesh import to_host
from infcl_jax.runtime.outputs import print_line
from infcl_jax.runtime.processes import is_lead, union
from infcl_jax.runtime.workdir import CONFIG_FILE
from infcl_jax.settings import RunConfig
from infcl_jax.training import (
    METRICS_FILE,
    Checkpointer,
    DataWait,
    MetricWriter,
    Outputs,
    Pauses,
    Preemption,
    Profile,
    RunConsole,
    Safeguards,
    TrainProgress,
    TrainState,
    learning_rate_schedule,
    read_metrics,
    save_config,
)
from infcl_jax.training.metrics import DATA_WAIT_SHOWN
from infcl_jax.training.step import Metrics, TrainStep

# Least time of the steps in seconds before advice is printed, since the pipeline of a short run is still filling.
_ADVICE_SECONDS = 1.0
_STALL_SECONDS = 30.0  # wait for a batch before the first warning, which is repeated after twice the time


@dataclasses.dataclass(frozen=True)
class TrainLoop:
    """Training and evaluation loop of a run.

    Attributes:
      config: settings of the run, see `docs/settings.md`.
      workdir: folder of checkpoints, metrics and plots.
      mesh: devices.
      data: training batches.
      data_wait: time that the devices wait for data.
      suite: evaluations.
      step_fn: train step.
      checkpoints: reader and writer of checkpoints.
      writer: writer of metrics.
      preemption: stop requests.
      safeguards: reactions to steps that are not finite and to loss spikes.
      outputs: handling of files that cannot be written.
      lost_workers: steps at which data workers were killed.
      callbacks: hooks of the user.
      stages_printed: stages of the data pipeline whose advice is printed.
      console: console of the run.
      utilization: function from examples per second to the model FLOPs utilization; None if unknown.
      profile: trace of some steps.
    """

    config: RunConfig
    workdir: Path
    mesh: Mesh
    data: TrainIterator
    data_wait: DataWait
    suite: Suite | TextRetrievalSuite
    step_fn: TrainStep
    checkpoints: Checkpointer
    writer: MetricWriter
    preemption: Preemption
    safeguards: Safeguards = dataclasses.field(default_factory=Safeguards)
    outputs: Outputs = dataclasses.field(default_factory=Outputs)
    lost_workers: LostWorkers = dataclasses.field(default_factory=LostWorkers)
    callbacks: Callback = dataclasses.field(default_factory=Callback)
    stages_printed: set[str] = dataclasses.field(default_factory=set)
    console: RunConsole = dataclasses.field(default_factory=RunConsole)
    utilization: Callable[[float], float | None] = lambda rate: None
    profile: Profile = dataclasses.field(default_factory=Profile)

    def fit(self, state: TrainState, start: int) -> dict[str, float]:
        """Run all steps after `start`, with checkpoints and evaluations.

        Args:
          state: train state at `start`.
          start: number of completed steps, below `total_steps`.

        Returns:
          Results of the last evaluation.

        Raises:
          FloatingPointError: the loss, a gradient or the state is not finite.
          OSError: `max_failed_saves` checkpoints in a row could not be saved.
          ValueError, OutOfMemory: an evaluation failed; the state is saved.
          Interrupted: a stop was requested; the state is saved.
        """
        config, first = self.config, start + 1
        progress = self.progress()
        if start and _due(start, config.eval_every) and not is_evaluated(self.workdir, start):
            with progress.pause("evaluation"):
                self.evaluate(start, state)
        pending: tuple[int, Metrics] | None = None
        results: dict[str, float] = {}
        for step in range(first, config.total_steps + 1):
            batch = self.next_batch()
            self.profile.start(step)
            with progress.compiling():
                state, metrics = self.step_fn(state, batch)
            self.profile.stop(step, metrics)
            self.data_wait.step(metrics)
            del batch  # its memory, which a worker may share, is free before the next batch
            if pending:  # read one step late, so that the device never waits for the host
                scalars, report = self.report(*pending, progress, first), (step, metrics, progress, first)
                with keep_step(step, functools.partial(self.saved, step, state, report)):
                    self.callbacks.on_step(pending[0], scalars)
            pending = (step, metrics)
            last, stop = step == config.total_steps, self.preemption.noticed(step)
            evaluate_now = last or _due(step, config.eval_every)
            save = last or _due(step, config.checkpoint_every) or (evaluate_now and self.saves_evaluated)
            if not (save or evaluate_now or stop):
                continue
            self.data.bad_records.add(union(self.data.bad_records.indices()))
            scalars = self.report(*pending, progress, first)  # raises before a state that is not finite is saved
            pending = None
            self.checkpoints.check_finite(step, state)
            if save or stop:  # before callbacks and the evaluation, whose failure must not lose the step
                with progress.pause("checkpoint"):
                    self.save(step, state)
            with keep_step(step, functools.partial(self.saved, step, state)):
                self.callbacks.on_step(step, scalars)
            if evaluate_now and not stop:
                try:
                    with progress.pause("evaluation"):
                        results = self.evaluate(step, state)
                except Interrupted:  # the resumed run repeats it
                    stop = True
                    self.save(step, state)
            self.data_wait.resume()
            if stop:
                self.checkpoints.wait()
                self.report_checkpoint(step, state)
                raise self.preemption.saved(step)
            if last:
                self.export(state)
                self.report_checkpoint(step, state)
        return results

    def progress(self) -> TrainProgress:
        """Return the measurement of the run's progress."""
        config = self.config
        pauses = Pauses(
            total_steps=config.total_steps,
            eval_every=config.eval_every,
            checkpoint_every=config.checkpoint_every,
            saves_evaluated=self.saves_evaluated,
            evaluates=evaluates(config),
        )
        return TrainProgress(
            self.console,
            pauses,
            batch_size=config.batch_size,
            devices=self.mesh.size,
            every=config.log_every,
            utilization=self.utilization,
            unit=task_of(config).unit,
        )

    @property
    def saves_evaluated(self) -> bool:
        """True if each evaluated step is saved."""
        return evaluates(self.config) and self.config.keep_best is not None

    def next_batch(self) -> dict[str, Any]:
        """Return the batch of the next step, see `infcl_jax.run.next_batch`; a long wait prints a warning."""

        def stall(seconds: float) -> str:
            return f"warning: {process_prefix()}waiting for data for {seconds:.0f} s: {self.data.awaited()}"

        with self.console.reminder(_STALL_SECONDS, stall):
            return self.data_wait.batch(lambda: run.next_batch(self.config, self.data, self.mesh))

    def finish(self, state: TrainState, record: bool) -> dict[str, float]:
        """Evaluate a finished run.

        Args:
          state: train state after the last step.
          record: whether the results are those of the run, whose last evaluation did not end.
        """
        results = self.evaluate(int(state.step), state, record=record)
        self.export(state)
        return results

    def export(self, state: TrainState) -> None:
        """Write the weights of a finished run, if `config.export` is set."""
        if self.config.export:
            variables = to_host(state.evaluated_variables)  # a collective
            if is_lead():
                export_weights(self.workdir, variables)

    def report(self, step: int, metrics: Metrics, progress: TrainProgress, first: int) -> dict[str, float]:
        """Check, print, record and return the metrics of one step.

        The first finite step of the process saves the settings.

        Args:
          step: step number.
          metrics: metrics on the devices.
          progress: measurement of the run's progress.
          first: first step of the process.

        Raises:
          FloatingPointError: a metric is not finite.
        """
        metrics = jax.device_get(metrics)
        self.safeguards.check(step, metrics)
        self.lost_workers.passed(step)
        if step == first:  # settings that fail at once must not replace those of a good run
            self.save_config()
            self.data_wait.take(1)  # its time includes compilation
        logged = _due(step, self.config.log_every) or step == self.config.total_steps
        waits = self.take_data_wait(step - first + 1) if logged else {}
        measured = progress.update(step, metrics | waits)
        scalars = {name: float(value) for name, value in metrics.items() if name != "finite"}
        if logged:
            schedule = learning_rate_schedule(self.config.optimizer, self.config.total_steps)
            scalars["learning_rate"] = float(schedule(step - 1))
            if self.checkpoints.failed_saves:
                scalars["checkpoint/failed_saves"] = self.checkpoints.failed_saves
            # Of the lead process; of all processes up to the last checkpoint or evaluation.
            scalars |= {f"data/bad_records/{name}": count for name, count in self.data.bad_records.counts().items()}
            scalars |= measured | waits | self.safeguards.metrics()
            self.outputs.retry()
            self.writer.write(step, scalars)
        return scalars

    def take_data_wait(self, steps: int) -> dict[str, float]:
        """Return the fraction of time since the last call spent waiting.

        Prints advice if it is large, once for each limiting stage of the data pipeline.

        Args:
          steps: number of finished steps of this process.

        Returns:
          {"data/wait_fraction": fraction}; empty without a measurement: in the first step, and with residency "replay",
          where the step itself reads its batch.
        """
        waited, total = self.data_wait.take(steps)
        if total == 0.0 or self.config.grad_cache.residency == "replay":
            return {}
        stage = limiting_stage(self.data.stats(), self.data.parallelism.readers)
        if waited >= DATA_WAIT_SHOWN * total and total >= _ADVICE_SECONDS and stage not in self.stages_printed:
            self.stages_printed.add(stage)
            advice = self.data.parallelism.advice(stage)
            # Every process prints: others only see that the slowest one's steps take longer.
            percent = f"{100 * waited / total:.0f} %"
            print_line(f"{process_prefix()}waiting for data: {percent} of the time, {stage}-bound; {advice}")
        return {"data/wait_fraction": waited / total}

    def save_config(self) -> None:
        """Write `config.json`, on the leading process only."""
        if is_lead():
            settings = self.config.to_dict()
            self.outputs.attempt(self.workdir / CONFIG_FILE, lambda: save_config(self.workdir, settings))

    def evaluate(self, step: int, state: TrainState, record: bool = True) -> dict[str, float]:
        """Evaluate, print the results and record them, unless the metrics have them.

        Raises:
          ValueError, OutOfMemory: the evaluation failed; the state is saved.
        """
        save = functools.partial(self.saved, step, state)
        with keep_step(step, save, self.config.evaluation.batch_size):
            results = self.suite(state.evaluated_variables)
        if results:
            if record:
                self.checkpoints.record(step, results)  # before the metrics, which say that the step is evaluated
                self.writer.write(step, results)
            say_results(step, results)
            with keep_step(step, save):
                self.callbacks.on_evaluation(step, results)
        return results

    def save(self, step: int, state: TrainState) -> None:
        """Start to save a step, after the callbacks of the checkpoint before it."""
        self.report_checkpoint(step, state)
        self.checkpoints.save(step, state, self.data)

    def report_checkpoint(self, step: int, state: TrainState) -> None:
        """Call `on_checkpoint` for the latest complete checkpoint, once.

        Args:
          step: finished step, which is saved if a callback fails.
          state: its train state.
        """
        if complete := self.checkpoints.take_complete():
            with keep_step(step, functools.partial(self.saved, step, state)):
                self.callbacks.on_checkpoint(*complete)

    def saved(self, step: int, state: TrainState, report: tuple[Any, ...] = ()) -> bool:
        """Report and save a step; return whether it is on disk.

        Args:
          step: finished step.
          state: its train state.
          report: arguments of `report`; empty for a reported step.
        """
        try:
            if report:
                self.report(*report)
            self.data.bad_records.add(union(self.data.bad_records.indices()))
            self.checkpoints.save(step, state, self.data)
            return self.checkpoints.latest_step() == step
        except Exception as error:  # orbax raises any exception, which must not hide the first failure
            print_line(f"step {step} is not saved: {type(error).__name__}: {error}")
            return False


def evaluates(config: RunConfig) -> bool:
    """Return whether a run has anything to evaluate on."""
    data = config.evaluation
    return any((*config.evaluations, data.retrieval_dataset, data.zero_shot_dataset, config.text_retrieval.corpus))


def is_evaluated(workdir: Path, step: int) -> bool:
    """Return whether the metrics have an evaluation of a step; a stop may have ended it.

    All processes must call it.
    """
    path = workdir / METRICS_FILE
    lines = read_metrics(path) if is_lead() and path.exists() else []
    return bool(union(step for line in lines if line["step"] == step and "loss" not in line))


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
