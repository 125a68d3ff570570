"""Training and evaluation loop of a run, and what the run says."""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax

from infcl_jax.data import TrainIterator
from infcl_jax.data.pipeline import TRUNCATED
from infcl_jax.data.text_pairs import LEFT_OUT
from infcl_jax.evaluation import Suite, TextRetrievalSuite, format_table, plot_curves
from infcl_jax.run.base import Run
from infcl_jax.run.batches import Batches
from infcl_jax.run.callbacks import Callback
from infcl_jax.run.export import export_weights
from infcl_jax.runtime.console import say
from infcl_jax.runtime.exit_codes import USER_ERRORS, Interrupted
from infcl_jax.runtime.mesh import to_host
from infcl_jax.runtime.outputs import Outputs, print_line
from infcl_jax.runtime.processes import channel, gather, is_lead
from infcl_jax.runtime.workdir import CONFIG_FILE
from infcl_jax.settings import RunConfig, format_changes
from infcl_jax.training import (
    METRICS_FILE,
    Checkpointer,
    MetricWriter,
    Pauses,
    Preemption,
    Profile,
    RunConsole,
    Safeguards,
    TrainProgress,
    TrainState,
    learning_rate_schedule,
    parameter_count,
    read_metrics,
    save_config,
)
from infcl_jax.training.compiled_step import OutOfMemory, StepMemory
from infcl_jax.training.step import Metrics

COMPILING = "compiling the training step"
_FAILURE_SECONDS = 10  # barrier timeout: all processes must fail within it, so that they save together
_failures = itertools.count()  # numbers the barriers; advances equally on all processes
CURVES_FILE = "curves.png"


@dataclasses.dataclass(frozen=True, eq=False)
class TrainLoop:
    """Training and evaluation loop of a run.

    Attributes:
      start: number of completed steps.
      compiled: whether the training step is compiled.
    """

    run: Run
    workdir: Path
    start: int
    batches: Batches
    checkpoints: Checkpointer
    writer: MetricWriter
    preemption: Preemption
    safeguards: Safeguards = dataclasses.field(default_factory=Safeguards)
    outputs: Outputs = dataclasses.field(default_factory=Outputs)
    callbacks: Callback = dataclasses.field(default_factory=Callback)
    console: RunConsole = dataclasses.field(default_factory=RunConsole)
    profile: Profile = dataclasses.field(default_factory=Profile)
    compiled: bool = False

    @functools.cached_property
    def pauses(self) -> Pauses:
        """Steps after which the run evaluates and saves."""
        config = self.run.config
        return Pauses(
            total_steps=config.total_steps,
            eval_every=config.eval_every,
            checkpoint_every=config.checkpoint_every,
            saves_evaluated=config.keep_best is not None,
            evaluates=evaluates(config),
        )

    @functools.cached_property
    def progress(self) -> TrainProgress:
        """Measurement of the run's progress."""
        config = self.run.config
        return TrainProgress(
            self.console,
            self.pauses,
            batch_size=config.batch_size,
            devices=self.run.mesh.size,
            every=config.log_every,
            utilization=self.run.utilization,
            unit=self.run.unit,
        )

    def fit(self, state: TrainState) -> dict[str, float]:
        """Run all steps after `start`, with checkpoints and evaluations; return the results of the last evaluation."""
        if self.start and self.pauses.evaluates_after(self.start) and not is_evaluated(self.workdir, self.start):
            with self.progress.pause("evaluation"):
                self.evaluate(self.start, state)
        pending: tuple[int, Metrics] | None = None
        results: dict[str, float] = {}
        for step in range(self.start + 1, self.pauses.total_steps + 1):
            state, metrics = self.take_step(step, state)
            if pending:  # read one step late, so that the device never waits for the host
                scalars = self.report(*pending)
                with self.keeping(step, state, unreported=metrics):
                    self.callbacks.on_step(pending[0], scalars)
            pending, stop = (step, metrics), self.preemption.noticed(step)
            if stop or self.pauses.saves_after(step) or self.pauses.evaluates_after(step):
                pending = None
                results = self.pause(step, state, metrics, stop)
        return results

    def take_step(self, step: int, state: TrainState) -> tuple[TrainState, Metrics]:
        """Read a batch and dispatch a step on it; return the next state and the metrics."""
        batch = self.batches.next()
        self.profile.start(step)
        compiles = step == self.start + 1 and not self.compiled
        with self.console.busy(COMPILING, announced=True) if compiles else contextlib.nullcontext():
            state, metrics = self.run.step(state, batch)
        self.profile.stop(step, metrics)
        self.batches.wait.step(metrics)
        return state, metrics  # the batch's memory, which a worker may share, is free before the next batch

    def pause(self, step: int, state: TrainState, metrics: Metrics, stop: bool) -> dict[str, float]:
        """Report a step, then save it, evaluate it, or end the run; return the results of the evaluation."""
        self.batches.share_bad_records()
        scalars = self.report(step, metrics)  # raises before a state that is not finite is saved
        self.checkpoints.check_finite(step, state)
        if stop or self.pauses.saves_after(step):  # first: a failing callback or evaluation must not lose the step
            with self.progress.pause("checkpoint"):
                self.save(step, state)
        with self.keeping(step, state):
            self.callbacks.on_step(step, scalars)
        results: dict[str, float] = {}
        if self.pauses.evaluates_after(step) and not stop:
            try:
                with self.progress.pause("evaluation"):
                    results = self.evaluate(step, state)
            except Interrupted:  # the resumed run repeats it
                stop = True
                self.save(step, state)
        self.batches.wait.resume()
        if stop:
            self.checkpoints.wait()
            self.report_checkpoint(step, state)
            raise self.preemption.interruption(step)
        if step == self.pauses.total_steps:
            self.export(state)
            self.report_checkpoint(step, state)
        return results

    def finish(self, state: TrainState, record: bool) -> dict[str, float]:
        """Evaluate a finished run, and record the results if its last evaluation did not end."""
        results = self.evaluate(self.start, state, record=record)
        self.export(state)
        return results

    def export(self, state: TrainState) -> None:
        """Write the weights of a finished run, if `config.export` is set."""
        if self.run.config.export:
            variables = to_host(state.evaluated_variables)  # a collective
            if is_lead():
                export_weights(self.workdir, self.run.model_config, variables)  # type: ignore[arg-type]

    def report(self, step: int, metrics: Metrics) -> dict[str, float]:
        """Check, print, record and return the metrics of a step. The first step also writes `config.json`."""
        config, steps = self.run.config, step - self.start
        metrics = jax.device_get(metrics)
        self.safeguards.check(step, metrics)
        self.batches.lost_workers.passed(step)
        if steps == 1:
            if is_lead():  # settings that fail at once must not replace a good run's
                save = functools.partial(save_config, self.workdir, config.to_dict())
                self.outputs.attempt(self.workdir / CONFIG_FILE, save)
            self.batches.wait.take(1)  # its time includes compilation
        logged = step % config.log_every == 0 or step == config.total_steps
        waits = self.batches.waits(steps) if logged else {}
        measured = self.progress.update(step, metrics | waits)
        scalars = {name: float(value) for name, value in metrics.items() if name != "finite"}
        if logged:
            scalars["learning_rate"] = float(learning_rate_schedule(config.optimizer, config.total_steps)(step - 1))
            if self.checkpoints.failed_saves:
                scalars["checkpoint/failed_saves"] = self.checkpoints.failed_saves
            scalars |= self.batches.counts() | measured | waits | self.safeguards.metrics()
            self.outputs.retry()
            self.writer.write(step, scalars)
        return scalars

    def evaluate(self, step: int, state: TrainState, record: bool = True) -> dict[str, float]:
        """Evaluate, print the results and record them, unless the metrics have them."""
        with self.keeping(step, state, batch_size=self.run.config.evaluation.batch_size):
            results = self.run.suite(state.evaluated_variables)
        if results:
            if record:
                self.checkpoints.record(step, results)  # before the metrics, which say that the step is evaluated
                self.writer.write(step, results)
            say_results(step, results)
            with self.keeping(step, state):
                self.callbacks.on_evaluation(step, results)
        return results

    def save(self, step: int, state: TrainState) -> None:
        """Start to save a step, after the callbacks of the checkpoint before it."""
        self.report_checkpoint(step, state)
        self.checkpoints.save(step, state, self.batches.data)

    def report_checkpoint(self, step: int, state: TrainState) -> None:
        """Call `on_checkpoint` for the latest complete checkpoint, once; save the finished step if that fails."""
        if complete := self.checkpoints.take_complete():
            with self.keeping(step, state):
                self.callbacks.on_checkpoint(*complete)

    @contextlib.contextmanager
    def keeping(
        self, step: int, state: TrainState, *, unreported: Metrics | None = None, batch_size: int | None = None
    ) -> Iterator[None]:
        """Save a finished step if the body fails, and say so in the error.

        A save needs all processes. If another one does not fail within ten seconds, it waits in a collective of the
        body, and nothing is saved. With the batch size of an evaluation, the body's user errors become a `ValueError`
        of one line; other errors get a note.
        """
        try:
            yield
        except Exception as error:
            messages, failure = channel(), next(_failures)
            all_fail = messages is None or messages.meets(f"failed/{step}/{failure}", _FAILURE_SECONDS)
            saved = all_fail and self.try_save(step, state, unreported)
            after = f"step {step}, which is {'' if saved else 'not '}saved"
            advice = f"the same command continues from {'there' if saved else 'the last checkpoint'}"
            if batch_size is not None and "RESOURCE_EXHAUSTED" in str(error):
                reason = f"the device ran out of memory; lower evaluation.batch_size from {batch_size}"
                raise OutOfMemory(f"evaluation failed after {after}: {reason}; {advice}") from error
            if batch_size is not None and isinstance(error, USER_ERRORS):
                raise ValueError(f"evaluation failed after {after}: {error}; {advice}") from error
            error.add_note(f"failed after {after}; {advice}")
            raise

    def try_save(self, step: int, state: TrainState, unreported: Metrics | None = None) -> bool:
        """Report and save a step; return whether it is on disk."""
        try:
            if unreported is not None:
                self.report(step, unreported)
            self.batches.share_bad_records()
            self.checkpoints.save(step, state, self.batches.data)
            return self.checkpoints.latest_step() == step
        except Exception as error:  # orbax raises any exception, which must not hide the first failure
            print_line(f"step {step} is not saved: {type(error).__name__}: {error}")
            return False


def evaluates(config: RunConfig) -> bool:
    """Return whether a run has anything to evaluate on."""
    data = config.evaluation
    return any((*config.evaluations, data.retrieval_dataset, data.zero_shot_dataset, config.text_retrieval.corpus))


def is_evaluated(workdir: Path, step: int) -> bool:
    """Return whether the metrics have an evaluation of a step; all processes must call it."""
    path = workdir / METRICS_FILE
    lines = read_metrics(path) if is_lead() and path.exists() else []
    # Lines of training have a loss.
    return any(gather(any(line["step"] == step and "loss" not in line for line in lines)))


def announce(run: Run, state: TrainState, workdir: Path, memory: StepMemory | None, data: TrainIterator) -> None:
    """Print a summary of the run, the memory of its compiled step, how it reads data, and its changed settings."""
    config, devices = run.config, run.mesh.devices.flat
    parameters = f"{parameter_count(state.params) / 1e6:.1f} M parameters"
    if state.frozen:
        parameters += f" ({parameter_count(state.trained) / 1e6:.1f} M trained)"
    say(
        f"{config.model or config.init.model}, {parameters}, on {run.mesh.size} {devices[0].platform} device(s), "
        f"{jax.process_count()} process(es); {config.dataset}, batch {config.batch_size}, {config.total_steps} steps"
    )
    if memory is not None:
        say(str(memory))
    if str(run.text_packing):
        say(f"texts: {run.text_packing}")
    say(f"data: {data.parallelism}{', decoded on the GPUs' if data.decodes_on_gpus else ''}")
    if int(state.step):
        say(f"resumed from step {int(state.step)} in {workdir}")
    for line in format_changes(run.changed):
        say(line)


def conclude(
    run: Run, workdir: Path | None, data: TrainIterator, results: Mapping[str, float], outputs: Outputs
) -> None:
    """Plot the curves and say how the run has ended.

    Args:
      run: parts of the run.
      workdir: directory of the run; None if its files have not changed.
      data: training data, which may be closed.
      results: results of the final evaluation.
      outputs: files that could not be written, which are tried once more.
    """
    if truncated := run.tokenizer.truncated + int(data.stats().get(TRUNCATED, 0)):
        say(f"truncated {truncated} captions to {run.tokenizer.context_length} tokens")
    if left_out := int(data.stats().get(LEFT_OUT, 0)):
        say(f"left out {left_out} hard negatives that are positives of their own query")
    if workdir is not None:
        outputs.attempt(workdir / CURVES_FILE, lambda: save_curves(workdir, run.suite))
    if not results:
        say_results(run.config.total_steps, results)
    if bad_records := data.bad_records.summary():
        say(bad_records)
    outputs.retry()
    if unwritten := outputs.summary():
        say(f"warning: {unwritten}")


def save_curves(workdir: Path, suite: Suite | TextRetrievalSuite) -> None:
    """Plot loss and accuracy over the steps, from the run's metrics."""
    if is_lead():
        plot_curves(workdir / METRICS_FILE, workdir / CURVES_FILE, chance=suite.chance)


def say_results(step: int, results: Mapping[str, float]) -> None:
    """Print the table of results, on the leading process only."""
    nothing = (
        "nothing to evaluate on; evaluation.retrieval_dataset and evaluation.zero_shot_dataset name data, for text "
        "retrieval text_retrieval.corpus"
    )
    say(*[f"step {step}:", *format_table(results).split("\n")] if results else [f"step {step}: {nothing}"])
