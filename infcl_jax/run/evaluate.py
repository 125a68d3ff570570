"""Evaluation of a run, or of other weights, with files of results."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from infcl_jax import run
from infcl_jax.evaluation import EvaluationConfig, Suite, TaskResult, flat_metrics, format_table, write_results
from infcl_jax.evaluation.writers import EVALUATION_FILE, GRID_FILE
from infcl_jax.run.base import make_run
from infcl_jax.run.build import start_devices, start_processes
from infcl_jax.run.load import load_encoder
from infcl_jax.run.loop import CURVES_FILE, save_curves, say_results
from infcl_jax.runtime.console import say
from infcl_jax.runtime.file_io import replace_text
from infcl_jax.runtime.processes import is_lead
from infcl_jax.settings import (
    SETTINGS,
    RunConfig,
    changed_settings,
    check_config,
    check_fixed,
    format_changes,
    name_changes,
    precision_of_overrides,
    with_changes,
)
from infcl_jax.training import Checkpointer, Outputs, prepare_workdir


def evaluate(workdir: str | Path, changes: Mapping[str, Any] | None = None) -> dict[str, float]:
    """Evaluate the latest checkpoint of a run on all devices.

    Prints the results. Writes `evaluation.json`, `curves.png`, the files of `write_results` and, with a retrieval
    dataset, `retrieval.png` to the work directory.

    Examples:
      >>> results = infcl_jax.evaluate("runs/digits", {"evaluation.retrieval_dataset": None})
      evaluation.retrieval_dataset: 'digits' -> None
      step 1:
      ...
      >>> sorted(results)
      ['zero_shot/mean_per_class_recall', 'zero_shot/top1', 'zero_shot/top5']

    Args:
      workdir: directory of the run.
      changes: changed settings by dotted name. `docs/settings.md` marks those that can change with "evaluation".

    Returns:
      Results by name, see `infcl_jax.evaluation.Suite`.

    Raises:
      FileNotFoundError: the run, its checkpoint or a dataset is missing.
      ValueError: the checkpoint or tokenizer does not fit the configuration, or a change is not allowed.
      ImportError: a package of the tokenizer is not installed.
      OSError: a file could not be written; the results are printed all the same.
    """
    config, changed = changed_config(workdir, changes or {})
    mesh = start_devices(config, workdir)
    workdir = prepare_workdir(workdir)
    built = make_run(config, mesh, run.sample_source(config), origin=workdir, say=say)
    suite, state = built.suite, built.init.create()
    with Checkpointer(workdir) as checkpoints:
        step = checkpoints.latest_step()
        if step is None:
            raise FileNotFoundError(f"no checkpoint in {workdir} yet; train further before evaluating")
        with name_changes(changed):
            state = checkpoints.restore_latest(state)
    for line in format_changes(changed):
        say(line)
    task_results = suite.results(state.evaluated_variables, workdir / GRID_FILE, examples=True)
    results = flat_metrics(task_results)
    outputs = Outputs()
    outputs.attempt(workdir / CURVES_FILE, lambda: save_curves(workdir, suite))
    if is_lead():
        content = json.dumps({"step": step, **results}, indent=2) + "\n"
        outputs.attempt(workdir / EVALUATION_FILE, lambda: replace_text(workdir / EVALUATION_FILE, content))
    weights = f"{workdir}, step {step}"
    outputs.attempt(workdir / "results.json", lambda: write_results(workdir, task_results, config.model, weights))
    say_results(step, results)
    if unwritten := outputs.summary():  # its files are the product of this command
        raise OSError(unwritten)
    pictures = (CURVES_FILE, GRID_FILE) if config.evaluation.retrieval_dataset else (CURVES_FILE,)
    say(f"pictures: {', '.join(str(workdir / name) for name in pictures)}")
    return results


def changed_config(workdir: str | Path, changes: Mapping[str, Any]) -> tuple[RunConfig, dict[str, tuple[Any, Any]]]:
    """Return the settings of a run with the changes of an evaluation, and those that differ from the run's."""
    old = run.saved_config(workdir)
    config = with_changes(old, changes)
    if "precision" not in changes:
        config = with_changes(config, precision_of_overrides(config.model_overrides))
    check_config(config)
    changed = changed_settings(old, config)
    groups = dict.fromkeys(name.partition(".")[0] for name, setting in SETTINGS.items() if setting.evaluated)
    fixed = [name for name in changed if not SETTINGS[name].evaluated]
    check_fixed(changed, fixed, workdir, f"an evaluation changes only {', '.join(groups)}")
    return config, changed


def evaluate_weights(
    path: str,
    evaluations: Sequence[str],
    data_dir: str = "data",
    *,
    output: str | Path | None = None,
    model: str | None = None,
    tokenizer: str | None = None,
    batch_size: int | None = None,
    max_bad_records: float | None = None,
) -> list[TaskResult]:
    """Evaluate a model without a run on all devices.

    Prints the results.

    Examples:
      >>> (result,) = infcl_jax.evaluate_weights("runs/digits", ["photos"])
      k = 1 ...
      >>> result.kind
      'retrieval'

    Args:
      path: weights, see `infcl_jax.load`.
      evaluations: suites, benchmarks, paths or Python files, see docs/evaluation.md.
      data_dir: folder of the benchmarks.
      output: folder for the files of `infcl_jax.evaluation.write_results`; None: no files.
      model: see `infcl_jax.load`.
      tokenizer: see `infcl_jax.load`.
      batch_size: images or texts encoded at once, over all devices; None: the default of `evaluation.batch_size`.
      max_bad_records: maximum number of bad records of each split, which are left out with a warning; below 1: a
        fraction; None: 1 %, at least 100.

    Returns:
      Results of the tasks with examples, then of the suites.

    Raises:
      FileNotFoundError: the weights or benchmarks are missing.
      ValueError: the weights or a benchmark are wrong, `evaluations` is empty, or `output` is not writable.
      ImportError: a package is not installed.
      BadRecordError: a split has more bad records than `max_bad_records`.
    """
    if not evaluations:
        raise ValueError("expected --suite or --evaluations with --weights, got none; see docs/evaluation.md")
    start_processes()  # before `prepare_workdir`, which starts JAX
    folder = prepare_workdir(output) if output else None  # fails before the evaluation
    batch_size = batch_size or SETTINGS["evaluation.batch_size"].default
    encoder = load_encoder(path, model=model, tokenizer=tokenizer, batch_size=batch_size)
    suite = Suite(
        EvaluationConfig(batch_size=encoder.batch_size),
        encoder.model,
        encoder.tokenizer,
        image_size=encoder.image_size,
        data_dir=data_dir,
        mesh=encoder.mesh,
        evaluations=evaluations,
        resize=encoder.resize,
        say=say,
        max_bad_records=max_bad_records,
    )
    results = suite.results(encoder.variables, examples=True)
    say(*format_table(flat_metrics(results)).split("\n"))
    if folder is not None:
        write_results(folder, results, Path(path).name, path)
    return results
