"""Train a CLIP model, or continue a run from its latest checkpoint.

    python -m experiments.train --config=configs/quickstart.py --workdir=runs/quickstart [--config.batch_size=512]

On several hosts, run the same command on each, see `infcl_jax.distributed.initialize`.
"""

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from configs import saved
from experiments import command, evaluate
from infcl_jax import run
from infcl_jax.data import TrainIterator
from infcl_jax.data.pipeline import TRUNCATED
from infcl_jax.data.stages import limiting_stage
from infcl_jax.distributed import is_lead, union
from infcl_jax.evaluation import Suite, format_line
from infcl_jax.frozen_features import cached_features
from infcl_jax.initialization import InitConfig, initialize
from infcl_jax.planner import MemoryPlan, describe_plan, device_memory_limit, explain_out_of_memory, plan_memory
from infcl_jax.process_watch import failures
from infcl_jax.settings import (
    SETTINGS,
    changed_settings,
    check_config,
    check_fixed,
    format_changes,
    name_changes,
    with_total_steps,
)
from infcl_jax.training import (
    Checkpointer,
    DataWait,
    MetricWriter,
    OptimizerConfig,
    Preemption,
    ProgressPrinter,
    TrainState,
    check_finite,
    learning_rate_schedule,
    make_train_step,
    parameter_count,
    prepare_workdir,
    save_config,
)
from infcl_jax.training.checkpoint import CONFIG_FILE
from infcl_jax.training.metrics import DATA_WAIT_SHOWN
from infcl_jax.training.step import Metrics, TrainStep

# Least time of the steps in seconds before advice is printed, since the pipeline of a short run is still filling.
_ADVICE_SECONDS = 1.0


def train(config: ConfigDict, workdir: str | Path) -> dict[str, float]:
    """Train all steps of the run, from the latest checkpoint if there is one.

    Args:
      config: settings of the run, see `docs/settings.md`.
      workdir: folder of checkpoints, `metrics.jsonl`, `config.json`, the tokenizer and plots.

    Returns:
      Results of the final evaluation, see `infcl_jax.evaluation.Suite`.

    Raises:
      ValueError: a setting is wrong, a resumed run changes a fixed setting or a shape of its state, or `workdir` is not
        writable.
      FileNotFoundError: a dataset is not prepared.
      ImportError: a package of the tokenizer is not installed.
      FloatingPointError: the loss or a gradient is not finite.
      OutOfMemory: a device ran out of memory; the message says which settings to change.
      SystemExit: SIGTERM or Ctrl-C stopped the run after a checkpoint.
    """
    check_config(config)
    mesh = command.start_devices(config, workdir)
    workdir = prepare_workdir(workdir)
    memory_limit = device_memory_limit()
    with Checkpointer(workdir, keep=config.keep_checkpoints) as checkpoints, failures():
        resumed = checkpoints.latest_step() is not None
        source = run.training_source(config)
        config = with_total_steps(config, source)
        changed = changes_since(workdir, config) if resumed else {}
        fixed = [name for name, setting in SETTINGS.items() if setting.fixed]
        check_fixed(changed, fixed, workdir, "keep it, or choose another --workdir")
        tokenizer = run.text_tokenizer(config, workdir if resumed else None)
        loss_fn = run.loss(config, mesh, source)
        workload = run.workload(config, mesh.size, memory_limit, source=source)
        step_fn = make_train_step(loss_fn, config.seed, workload.cache, mesh, config.parameter_sharding)
        suite = run.evaluation_suite(config, mesh, tokenizer)
        state = run.initial_state(config, mesh, source)
        if not resumed:
            state = initialize(InitConfig(**config.init), run.read_model_config(config), state)
        with name_changes(changed):  # adds the changed settings to an error of shapes
            state = checkpoints.restore_latest(state)
        start = int(state.step)
        if start > config.total_steps:
            raise ValueError(
                f"expected total_steps >= {start}, which the run in {workdir} has reached, got {config.total_steps}; "
                "train longer, or choose another --workdir"
            )
        features = cached_features(config, workdir, mesh, state, source, tokenizer, command.say)
        data = run.training_data(config, source, tokenizer, mesh, features)
        with name_changes(changed):
            checkpoints.restore_position(data)
        if not resumed and is_lead():  # a copy, because the files that `config.tokenizer` names may move or change
            tokenizer.save(workdir / run.TOKENIZER_FOLDER)
        plan = plan_memory(workload, memory_limit)
        announce(config, mesh, state, workdir, plan, data)
        for line in format_changes(changed):
            command.say(line)
        writer = MetricWriter(workdir, tensorboard=config.tensorboard, lead=is_lead(), resume_step=start)
        with writer, contextlib.closing(data), DataWait() as data_wait, Preemption() as preemption:
            loop = TrainLoop(config, workdir, mesh, data, data_wait, suite, step_fn, checkpoints, writer, preemption)
            try:
                results = loop.fit(state, start) if start < config.total_steps else loop.finish(state)
            except jax.errors.JaxRuntimeError as error:
                if (explained := explain_out_of_memory(error, plan)) is error:
                    raise
                raise explained from error
    if truncated := tokenizer.truncated + int(data.stats().get(TRUNCATED, 0)):
        command.say(f"truncated {truncated} captions to {tokenizer.context_length} tokens")
    evaluate.save_curves(workdir, suite)
    evaluate.say_results(config.total_steps, results)
    if bad_records := data.bad_records.summary():
        command.say(bad_records)
    return results


def changes_since(workdir: Path, config: ConfigDict) -> dict[str, tuple[Any, Any]]:
    """Return the changed settings of a resumed run; none without a `config.json`."""
    return changed_settings(saved.get_config(str(workdir)), config) if (workdir / CONFIG_FILE).is_file() else {}


def announce(
    config: ConfigDict, mesh: Mesh, state: TrainState, workdir: Path, plan: MemoryPlan, data: TrainIterator
) -> None:
    """Print a summary of the run, its memory plan and how it reads data."""
    platform = mesh.devices.flat[0].platform
    parameters = f"{parameter_count(state.params) / 1e6:.1f} M parameters"
    if state.frozen:
        parameters += f" ({parameter_count(state.trained) / 1e6:.1f} M trained)"
    command.say(
        f"{config.model}, {parameters}, on {mesh.size} {platform} device(s), "
        f"{jax.process_count()} process(es); {config.dataset}, batch {config.batch_size}, {config.total_steps} steps"
    )
    command.say(describe_plan(plan))
    command.say(f"data: {data.parallelism}{', decoded on the GPUs' if data.decodes_on_gpus else ''}")
    if int(state.step):
        command.say(f"resumed from step {int(state.step)} in {workdir}")


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
      preemption: stop requests (SIGTERM, Ctrl-C).
      stages_printed: stages of the data pipeline whose advice is printed.
    """

    config: ConfigDict
    workdir: Path
    mesh: Mesh
    data: TrainIterator
    data_wait: DataWait
    suite: Suite
    step_fn: TrainStep
    checkpoints: Checkpointer
    writer: MetricWriter
    preemption: Preemption
    stages_printed: set[str] = dataclasses.field(default_factory=set)

    def fit(self, state: TrainState, start: int) -> dict[str, float]:
        """Run all steps after `start`, with checkpoints and evaluations.

        Args:
          state: train state at `start`.
          start: number of completed steps, below `total_steps`.

        Returns:
          Results of the last evaluation.

        Raises:
          FloatingPointError: the loss or a gradient is not finite.
          SystemExit: a stop was requested; the state is saved.
        """
        config, first = self.config, start + 1
        progress = ProgressPrinter(
            config.total_steps, batch_size=config.batch_size, every=config.log_every, lead=is_lead()
        )
        pending: tuple[int, Metrics] | None = None
        for step in range(first, config.total_steps + 1):
            batch = self.data_wait.batch(lambda: run.next_batch(config, self.data, self.mesh))
            state, metrics = self.step_fn(state, batch)
            self.data_wait.step(metrics)
            del batch  # its memory, which a worker may share, is free before the next batch
            if pending:  # read one step late, so that the device never waits for the host
                self.report(*pending, progress, first)
            pending = (step, metrics)
            last, stop = step == config.total_steps, self.preemption.noticed(step)
            save, evaluate_now = last or _due(step, config.checkpoint_every), last or _due(step, config.eval_every)
            if not (save or evaluate_now or stop):
                continue
            self.data.bad_records.add(union(self.data.bad_records.indices()))
            self.report(*pending, progress, first)  # raises before a state that is not finite is saved or evaluated
            pending = None
            with progress.paused():
                if stop:
                    self.checkpoints.save(step, state, self.data)
                    self.checkpoints.wait()
                if evaluate_now:  # before the checkpoint, so that a resumed run has these metrics
                    results = self.evaluate(step, state)
                if save:
                    self.checkpoints.save(step, state, self.data)
            if stop and not last:
                raise SystemExit(f"asked to stop: saved step {step}; the same command continues from there")
        return results

    def finish(self, state: TrainState) -> dict[str, float]:
        """Evaluate a finished run and save its settings."""
        results = self.suite(state.evaluated_variables)
        self.save_config()
        return results

    def report(self, step: int, metrics: Metrics, progress: ProgressPrinter, first: int) -> None:
        """Check, print and record the metrics of one step.

        The first finite step of the process saves the settings.

        Args:
          step: step number.
          metrics: metrics on the devices.
          progress: printer of console lines.
          first: first step of the process.

        Raises:
          FloatingPointError: a metric is not finite.
        """
        metrics = jax.device_get(metrics)
        check_finite(step, metrics)
        if step == first:  # settings that fail at once must not replace those of a good run
            self.save_config()
            self.data_wait.take(1)  # its time includes compilation
        logged = _due(step, self.config.log_every) or step == self.config.total_steps
        waits = self.take_data_wait(step - first + 1) if logged else {}
        progress.update(step, metrics | waits)
        if logged:
            scalars = {name: float(metrics[name]) for name in ("loss", "logit_scale", "grad_norm")}
            schedule = learning_rate_schedule(OptimizerConfig(**self.config.optimizer), self.config.total_steps)
            scalars["learning_rate"] = float(schedule(step - 1))
            if progress.examples_per_second is not None:
                scalars["examples_per_second"] = progress.examples_per_second
            # Of the lead process; of all processes up to the last checkpoint or evaluation.
            scalars |= {f"data/bad_records/{name}": count for name, count in self.data.bad_records.counts().items()}
            self.writer.write(step, scalars | waits)

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
            process = f"process {jax.process_index()}: " if jax.process_count() > 1 else ""
            advice = self.data.parallelism.advice(stage)
            # Every process prints: others only see that the slowest one's steps take longer.
            percent = f"{100 * waited / total:.0f} %"
            print(f"{process}waiting for data: {percent} of the time, {stage}-bound; {advice}", flush=True)
        return {"data/wait_fraction": waited / total}

    def save_config(self) -> None:
        """Write `config.json`, on the leading process only."""
        if is_lead():
            save_config(self.workdir, self.config.to_dict())

    def evaluate(self, step: int, state: TrainState) -> dict[str, float]:
        """Evaluate and record the results."""
        results = self.suite(state.evaluated_variables)
        if results:
            self.writer.write(step, results)
            if step < self.config.total_steps:  # `train` prints the last results as a table
                command.say(f"step {step}: {format_line(results)}")
        return results


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


if __name__ == "__main__":
    command.run(lambda workdir: train(command.chosen_config(), workdir), config=command.resolved_config)
