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
from experiments.exported import export_weights
from infcl_jax import run
from infcl_jax.data import TrainIterator
from infcl_jax.data.pipeline import TRUNCATED
from infcl_jax.data.stages import limiting_stage
from infcl_jax.distributed import is_lead, to_host, union
from infcl_jax.evaluation import Suite, format_line
from infcl_jax.exit_codes import Interrupted
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
    Outputs,
    Preemption,
    ProgressPrinter,
    Safeguards,
    TrainState,
    WorkdirLock,
    learning_rate_schedule,
    make_train_step,
    parameter_count,
    prepare_workdir,
    rare_garbage_collection,
    read_metrics,
    save_config,
)
from infcl_jax.training.metrics import DATA_WAIT_SHOWN, METRICS_FILE
from infcl_jax.training.step import Metrics, TrainStep
from infcl_jax.training.workdir import CONFIG_FILE

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
      FloatingPointError: the loss, a gradient or the state is not finite.
      OSError: the last checkpoint, or `max_failed_saves` in a row, could not be saved.
      OutOfMemory: a device ran out of memory; the message says which settings to change.
      Interrupted: a signal stopped the run, or another run uses `workdir`.
    """
    check_config(config)
    with Preemption(config.stop_timeout, workdir) as preemption:
        return _train(config, workdir, preemption)


def _train(config: ConfigDict, workdir: str | Path, preemption: Preemption) -> dict[str, float]:
    """Train all steps of the run while stop signals are handled; see `train`."""
    mesh = command.start_devices(config, workdir)
    preemption.joined()
    workdir = prepare_workdir(workdir)
    memory_limit = device_memory_limit()
    outputs = Outputs()
    checkpointer = Checkpointer(
        workdir,
        keep=config.keep_checkpoints,
        keep_every=config.keep_every,
        keep_best=config.keep_best,
        resume=config.resume,
        max_failed_saves=config.max_failed_saves,
    )
    with WorkdirLock(workdir, command.say), checkpointer as checkpoints, failures():
        origin = checkpoints.origin()
        resumed = origin is not None
        source = run.training_source(config)
        config = with_total_steps(config, source)
        changed = changes_since(origin, config) if resumed else {}
        fixed = [name for name, setting in SETTINGS.items() if setting.fixed]
        check_fixed(changed, fixed, origin, "keep it, or choose another --workdir")
        tokenizer = run.text_tokenizer(config, origin)
        loss_fn = run.loss(config, mesh, source)
        workload = run.workload(config, mesh.size, memory_limit, source=source)
        step_fn = make_train_step(
            loss_fn, config.seed, workload.cache, mesh, config.parameter_sharding, config.on_nonfinite
        )
        suite = run.evaluation_suite(config, mesh, tokenizer, check=preemption.check)
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
        if str(origin) != str(workdir.absolute()) and is_lead():
            # A copy, because the files that `config.tokenizer` names may move or change.
            folder = workdir / run.TOKENIZER_FOLDER
            outputs.attempt(folder, lambda: tokenizer.save(folder))
        plan = plan_memory(workload, memory_limit)
        announce(config, mesh, state, workdir, plan, data)
        for line in format_changes(changed):
            command.say(line)
        writer = MetricWriter(
            workdir, tensorboard=config.tensorboard, lead=is_lead(), resume_step=start, outputs=outputs
        )
        safeguards = Safeguards.create(config.on_nonfinite, config.max_skipped, workdir, start, data, outputs)
        data_wait = DataWait(observe=safeguards.slow_steps.update)
        with writer, contextlib.closing(data), safeguards, data_wait, rare_garbage_collection():
            parts = mesh, data, data_wait, suite, step_fn, checkpoints, writer, preemption, safeguards
            loop = TrainLoop(config, workdir, *parts)
            try:
                results = loop.fit(state, start) if start < config.total_steps else loop.finish(state)
            except jax.errors.JaxRuntimeError as error:
                if (explained := explain_out_of_memory(error, plan)) is error:
                    raise
                raise explained from error
    if truncated := tokenizer.truncated + int(data.stats().get(TRUNCATED, 0)):
        command.say(f"truncated {truncated} captions to {tokenizer.context_length} tokens")
    curves = workdir / evaluate.CURVES_FILE
    outputs.attempt(curves, lambda: evaluate.save_curves(workdir, suite))
    evaluate.say_results(config.total_steps, results)
    if bad_records := data.bad_records.summary():
        command.say(bad_records)
    outputs.retry()
    if unwritten := outputs.summary():
        command.say(f"warning: {unwritten}")
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
      preemption: stop requests.
      safeguards: reactions to non-finite steps, stalls and unwritable files.
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
    safeguards: Safeguards = dataclasses.field(default_factory=Safeguards)
    stages_printed: set[str] = dataclasses.field(default_factory=set)

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
          Interrupted: a stop was requested; the state is saved.
        """
        config, first = self.config, start + 1
        if start and _due(start, config.eval_every) and not self.evaluated(start):
            self.evaluate(start, state)
        progress = ProgressPrinter(
            config.total_steps, batch_size=config.batch_size, every=config.log_every, lead=is_lead()
        )
        pending: tuple[int, Metrics] | None = None
        for step in range(first, config.total_steps + 1):
            batch = self.data_wait.batch(lambda: self.safeguards.next_batch(self.next_batch))
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
            self.checkpoints.check_finite(step, state)
            results: dict[str, float] = {}
            with progress.paused():
                if evaluate_now and not stop:  # before the checkpoint, so that a resumed run has these metrics
                    try:
                        results = self.evaluate(step, state)
                    except Interrupted:  # the resumed run repeats it
                        stop = True
                if save or stop or (results and config.keep_best):
                    self.checkpoints.save(step, state, self.data, results)
            self.data_wait.resume()
            if stop:
                self.checkpoints.wait()
                raise self.preemption.saved(step)
            if last:
                self.export(state)
        return results

    def next_batch(self) -> dict[str, Any]:
        """Return the batch of the next step, see `infcl_jax.run.next_batch`."""
        return run.next_batch(self.config, self.data, self.mesh)

    def finish(self, state: TrainState) -> dict[str, float]:
        """Evaluate a finished run and save its settings."""
        step = int(state.step)
        results = self.suite(state.evaluated_variables) if self.evaluated(step) else self.evaluate(step, state)
        self.save_config()
        self.export(state)
        return results

    def export(self, state: TrainState) -> None:
        """Write the weights of a finished run, if `config.export` is set."""
        if self.config.export:
            variables = to_host(state.evaluated_variables)  # a collective
            if is_lead():
                export_weights(self.workdir, variables)

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
        self.safeguards.check(step, metrics)
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
            if self.checkpoints.failed_saves:
                scalars["checkpoint/failed_saves"] = self.checkpoints.failed_saves
            # Of the lead process; of all processes up to the last checkpoint or evaluation.
            scalars |= {f"data/bad_records/{name}": count for name, count in self.data.bad_records.counts().items()}
            self.safeguards.outputs.retry()
            self.writer.write(step, scalars | waits | self.safeguards.metrics())

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
            settings = self.config.to_dict()
            self.safeguards.outputs.attempt(self.workdir / CONFIG_FILE, lambda: save_config(self.workdir, settings))

    def evaluated(self, step: int) -> bool:
        """Return whether the metrics have an evaluation of the step; a stop may have ended it.

        All processes must call it.
        """
        lines = read_metrics(self.workdir / METRICS_FILE) if is_lead() else []
        return bool(union(step for line in lines if line["step"] == step and "loss" not in line))

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
