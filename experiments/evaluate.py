"""Evaluate the latest checkpoint of a run, or other weights, on benchmarks.

    python -m experiments.evaluate --workdir=runs/quickstart [--config.evaluation.gallery=100]
    python -m experiments.evaluate --weights=PATH --suite=imagenet_variants --data_dir=benchmarks --output=results

Measures zero-shot accuracy and retrieval. Of a run, it also measures the whole-split loss, and plots the curves and a
retrieval grid. It starts from the settings of the run. The command line can change those that docs/settings.md marks
with "evaluation": data, devices and evaluation. docs/evaluation.md describes benchmarks and suites.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import ConfigDict

from configs import saved
from experiments import command
from infcl_jax import run
from infcl_jax.evaluation import (
    EvaluationConfig,
    Suite,
    TaskResult,
    append_csv,
    describe_environment,
    flat_metrics,
    format_table,
    write_json,
    write_page,
)
from infcl_jax.evaluation.suites import SUITES
from infcl_jax.evaluation.writers import EXAMPLES_FILE, write_examples
from infcl_jax.inference.encoder import load_encoder
from infcl_jax.run.devices import start_devices
from infcl_jax.run.results import CURVES_FILE, save_curves, say_results
from infcl_jax.runtime import compilation_cache, distributed
from infcl_jax.runtime.console import say
from infcl_jax.runtime.file_io import replace_text
from infcl_jax.runtime.processes import is_lead
from infcl_jax.settings import (
    SETTINGS,
    changed_settings,
    check_config,
    check_fixed,
    flattened,
    format_changes,
    name_changes,
    with_changes,
    without_contradiction,
)
from infcl_jax.training import Checkpointer, Outputs, prepare_workdir

RESULTS_FILE = "evaluation.json"
GRID_FILE = "retrieval.png"

_BATCH_SIZE = SETTINGS["evaluation.batch_size"].default  # images or texts


def write_results(folder: Path, results: Sequence[TaskResult], model: str, weights: str) -> None:
    """Write `results.json`, `results.html` and `examples.json`, and append to `results.csv`.

    Only the leading process writes.

    Args:
      folder: output folder.
      results: results of all tasks; without any, nothing is written.
      model: name of the model.
      weights: origin of the weights.
    """
    if not (is_lead() and results):
        return
    environment = describe_environment(model, weights)
    write_json(folder / "results.json", results, environment)
    write_page(folder / "results.html", results, environment)
    write_examples(folder / EXAMPLES_FILE, results)
    append_csv(folder / "results.csv", results, environment)


def evaluate(workdir: str | Path, changes: Mapping[str, Any] | None = None) -> dict[str, float]:
    """Evaluate the latest checkpoint in `workdir` on all devices.

    Writes `evaluation.json`, `curves.png`, the files of `write_results` and, with a retrieval dataset, `retrieval.png`
    there.

    Args:
      workdir: directory of the run.
      changes: changed settings by dotted name, see `changed_config`.

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
    suite = run.evaluation_suite(config, mesh, run.text_tokenizer(config, workdir), say)
    state = run.initial_state(config, mesh, run.sample_source(config))
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
        outputs.attempt(workdir / RESULTS_FILE, lambda: replace_text(workdir / RESULTS_FILE, content))
    weights = f"{workdir}, step {step}"
    outputs.attempt(workdir / "results.json", lambda: write_results(workdir, task_results, config.model, weights))
    say_results(step, results)
    if unwritten := outputs.summary():  # its files are the product of this command
        raise OSError(unwritten)
    pictures = (CURVES_FILE, GRID_FILE) if config.evaluation.retrieval_dataset else (CURVES_FILE,)
    say(f"pictures: {', '.join(str(workdir / name) for name in pictures)}")
    return results


def changed_config(workdir: str | Path, changes: Mapping[str, Any]) -> tuple[ConfigDict, dict[str, tuple[Any, Any]]]:
    """Return the settings of a run with the changes of an evaluation.

    Args:
      workdir: directory of the run.
      changes: changed settings by dotted name, such as `{"evaluation.gallery": 100}`. `docs/settings.md` marks the
        settings that can change with "evaluation".

    Returns:
      The settings, and those that differ from the run's, see `changed_settings`.

    Raises:
      FileNotFoundError: no run in `workdir`.
      ValueError: a change is not allowed, or a setting is wrong.
    """
    old = saved.get_config(str(workdir))
    config = with_changes(old, changes)
    if "precision" not in changes:
        without_contradiction(config)
    check_config(config)
    changed = changed_settings(old, config)
    groups = dict.fromkeys(name.partition(".")[0] for name, setting in SETTINGS.items() if setting.evaluated)
    fixed = [name for name in changed if not SETTINGS[name].evaluated]
    check_fixed(changed, fixed, workdir, f"an evaluation changes only {', '.join(groups)}")
    return config, changed


def given_changes() -> dict[str, Any]:
    """Return the changes of the command line, by dotted name.

    Includes every override `--config.NAME=VALUE`. Of `--config=FILE` it includes the settings that an evaluation can
    change, and the model, so that another model than the run's is an error.
    """
    overrides = command.chosen_changes()
    if command.chosen_file() is None:
        return overrides
    chosen = flattened(command.chosen_config())
    # Settings that a run chooses at its start, such as precision, stay as it chose them.
    started = {"model", *(k for k, setting in SETTINGS.items() if setting.resolved_once)}
    given = {k: v for k, v in chosen.items() if k not in started or v != SETTINGS[k].default}
    return {k: v for k, v in given.items() if k == "model" or SETTINGS[k].evaluated} | overrides


def _resolved_config() -> ConfigDict:
    """Return the settings of this evaluation, for `--print_config`."""
    config, _ = changed_config(command.given_workdir(), given_changes() | _flag_changes())
    return config


def evaluate_weights(
    path: str,
    evaluations: Sequence[str],
    data_dir: str,
    *,
    model: str | None = None,
    tokenizer: str | None = None,
    batch_size: int = _BATCH_SIZE,
    max_bad_records: float | None = None,
) -> list[TaskResult]:
    """Evaluate a model without a run on all devices.

    Args:
      path: weights, see `infcl_jax.load`.
      evaluations: suites, benchmarks, paths or Python files, see `infcl_jax.evaluation.tasks.load_tasks`.
      data_dir: folder of the benchmarks.
      model: see `infcl_jax.load`.
      tokenizer: see `infcl_jax.load`.
      batch_size: images or texts encoded at once, over all devices.
      max_bad_records: maximum number of bad records of each split, which are left out with a warning; below 1: a
        fraction; None: 1 %, at least 100.

    Returns:
      Results of the tasks with examples, then of the suites.

    Raises:
      FileNotFoundError: the weights or benchmarks are missing.
      ValueError: the weights or a benchmark are wrong, or `evaluations` is empty.
      ImportError: a package is not installed.
      BadRecordError: a split has more bad records than `max_bad_records`.
    """
    if not evaluations:
        raise ValueError("expected --suite or --evaluations with --weights, got none; see docs/evaluation.md")
    compilation_cache.enable(None, say)
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
    return suite.results(encoder.variables, examples=True)


def _define_flags() -> None:
    """Define the flags of this command; other commands import the module without them."""
    flags.DEFINE_string("weights", None, "Weights of infcl_jax.load, instead of --workdir.")
    flags.DEFINE_string("model", None, "Name or OpenCLIP configuration of --weights, for a file without one.")
    flags.DEFINE_enum("suite", None, list(SUITES), "Suite of benchmarks in --data_dir.")
    flags.DEFINE_list(
        "evaluations",
        [],
        "Benchmarks in --data_dir (cifar10, cifar10:linear_probe), suites, paths of data, Python files, with commas.",
    )
    flags.DEFINE_string("data_dir", None, "Folder of the benchmarks, such as wds_imagenet1k.")
    flags.DEFINE_string("output", None, "Folder of results.json, .csv and .html with --weights.")
    flags.DEFINE_string("tokenizer", None, "Tokenizer of --weights; default: that of the model.")
    flags.DEFINE_integer(
        "batch_size", None, f"Images or texts encoded at a time with --weights; default: {_BATCH_SIZE}.", lower_bound=1
    )
    meaning = "Largest number of bad records of a split with --weights, as config.max_bad_records."
    flags.DEFINE_float("max_bad_records", None, meaning, lower_bound=0)


def _chosen_evaluations() -> tuple[str, ...]:
    values = flags.FLAGS
    return (*filter(None, [values.suite]), *values.evaluations)


def _flag_changes() -> dict[str, Any]:
    """Return the settings given as flags of their own."""
    changes = {"evaluations": _chosen_evaluations(), "evaluation.data_dir": flags.FLAGS.data_dir}
    return {name: value for name, value in changes.items() if value}


def _main() -> None:
    values = flags.FLAGS
    if not values.weights:
        own = ("output", "model", "tokenizer", "batch_size", "max_bad_records")
        if given := [f"--{name}" for name in own if values[name].value is not None]:
            raise ValueError(f"expected {', '.join(given)} with --weights only; a run has its own settings")
        evaluate(command.given_workdir(), given_changes() | _flag_changes())
        return
    if values.workdir:
        raise ValueError("expected --weights or --workdir, got both; the weights of a run are --weights=WORKDIR")
    distributed.initialize()  # before `prepare_workdir`, which starts JAX
    output = prepare_workdir(values.output) if values.output else None  # fails before the evaluation
    results = evaluate_weights(
        values.weights,
        _chosen_evaluations(),
        values.data_dir or "data",
        model=values.model,
        tokenizer=values.tokenizer,
        batch_size=values.batch_size or _BATCH_SIZE,
        max_bad_records=values.max_bad_records,
    )
    say(*format_table(flat_metrics(results)).split("\n"))
    if output is not None:
        write_results(output, results, Path(values.weights).name, values.weights)


if __name__ == "__main__":
    _define_flags()
    command.run_without_workdir(_main, saved_config=True, config=_resolved_config)
