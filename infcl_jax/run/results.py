"""What a run says at its start and at its end."""

from collections.abc import Mapping
from pathlib import Path

import jax

from infcl_jax.data import TrainIterator
from infcl_jax.data.pipeline import TRUNCATED
from infcl_jax.data.text_pairs import LEFT_OUT
from infcl_jax.evaluation import Suite, TextRetrievalSuite, format_table, plot_curves
from infcl_jax.run.base import Run
from infcl_jax.runtime.console import say
from infcl_jax.runtime.outputs import Outputs
from infcl_jax.runtime.processes import is_lead
from infcl_jax.settings import format_changes
from infcl_jax.training import METRICS_FILE, TrainState, parameter_count
from infcl_jax.training.compiled_step import StepMemory

CURVES_FILE = "curves.png"


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
