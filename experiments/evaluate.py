"""Evaluate the latest checkpoint of a run, or other weights, on benchmarks.

    python -m experiments.evaluate --workdir=runs/quickstart [--config.evaluation.gallery=100]
    python -m experiments.evaluate --weights=PATH --suite=imagenet_variants --data_dir=benchmarks --output=results

Measures zero-shot accuracy and retrieval. Of a run, it also measures the whole-split loss, and plots the curves and a
retrieval grid. It starts from the settings of the run. The command line can change those that docs/settings.md marks
with "evaluation": data, devices and evaluation. docs/evaluation.md describes benchmarks and suites.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import ConfigDict

from configs import saved
from experiments import command
from infcl_jax import run
from infcl_jax.distributed import is_lead
from infcl_jax.evaluation import Suite, format_table, plot_curves
from infcl_jax.evaluation.suites import SUITES
from infcl_jax.settings import (
    SETTINGS,
    changed_settings,
    check_config,
    check_fixed,
    flattened,
    format_changes,
    name_changes,
)
from infcl_jax.training import METRICS_FILE, Checkpointer, prepare_workdir

RESULTS_FILE = "evaluation.json"
CURVES_FILE = "curves.png"
GRID_FILE = "retrieval.png"


def save_curves(workdir: Path, suite: Suite) -> None:
    """Plot loss and accuracy over the steps, from the run's metrics."""
    if is_lead():
        plot_curves(workdir / METRICS_FILE, workdir / CURVES_FILE, chance=suite.chance_losses)


def say_results(step: int, results: Mapping[str, float]) -> None:
    """Print the table of results, on the leading process only."""
    command.say(f"step {step}:\n{format_table(results)}" if results else f"step {step}: nothing to evaluate on")


def evaluate(workdir: str | Path, changes: Mapping[str, Any] | None = None) -> dict[str, float]:
    """Evaluate the latest checkpoint in `workdir` on all devices.

    Writes `evaluation.json`, `curves.png` and, with a retrieval dataset, `retrieval.png` there.

    Args:
      workdir: directory of the run.
      changes: changed settings by dotted name, see `changed_config`.

    Returns:
      Results by name, see `infcl_jax.evaluation.Suite`.

    Raises:
      FileNotFoundError: the run, its checkpoint or a dataset is missing.
      ValueError: the checkpoint or tokenizer does not fit the configuration, or a change is not allowed.
      ImportError: a package of the tokenizer is not installed.
    """
    config, changed = changed_config(workdir, changes or {})
    mesh = command.start_devices(config)
    workdir = prepare_workdir(workdir)
    suite = run.evaluation_suite(config, mesh, run.text_tokenizer(config, workdir), command.say)
    state = run.initial_state(config, mesh, run.sample_source(config))
    with Checkpointer(workdir) as checkpoints:
        step = checkpoints.latest_step()
        if step is None:
            raise FileNotFoundError(f"no checkpoint in {workdir} yet; train further before evaluating")
        with name_changes(changed):
            state = checkpoints.restore_latest(state)
    for line in format_changes(changed):
        command.say(line)
    results = suite(state.variables, grid_path=workdir / GRID_FILE)
    save_curves(workdir, suite)
    if is_lead():
        (workdir / RESULTS_FILE).write_text(json.dumps({"step": step, **results}, indent=2) + "\n")
    say_results(step, results)
    pictures = (CURVES_FILE, GRID_FILE) if config.evaluation.retrieval_dataset else (CURVES_FILE,)
    command.say(f"pictures: {', '.join(str(workdir / name) for name in pictures)}")
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
    config = saved.get_config(str(workdir))
    old = config.copy_and_resolve_references()
    try:
        config.update_from_flattened_dict(changes)
    except (KeyError, TypeError) as error:
        raise ValueError(f"expected changes of the settings in docs/settings.md, got {changes}: {error}") from error
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
    return {k: v for k, v in chosen.items() if k == "model" or SETTINGS[k].evaluated} | overrides


def _resolved_config() -> ConfigDict:
    """Return the settings of this evaluation, for `--print_config`."""
    config, _ = changed_config(command.given_workdir(), given_changes() | _flag_changes())
    return config


def _define_flags() -> None:
    """Define the flags of this command; other commands import the module without them."""
    flags.DEFINE_enum("suite", None, list(SUITES), "Suite of benchmarks in --data_dir.")
    flags.DEFINE_list("evaluations", [], "Benchmarks in --data_dir, suites or Python files, separated by commas.")
    flags.DEFINE_string("data_dir", None, "Folder of the benchmarks, such as wds_imagenet1k.")


def _flag_changes() -> dict[str, Any]:
    """Return the settings given as flags of their own."""
    values = flags.FLAGS
    names = (*filter(None, [values.suite]), *values.evaluations)
    return ({"evaluations": names} if names else {}) | (
        {"evaluation.data_dir": values.data_dir} if values.data_dir else {}
    )


if __name__ == "__main__":
    _define_flags()
    command.run(
        lambda workdir: evaluate(workdir, given_changes() | _flag_changes()),
        saved_config=True,
        config=_resolved_config,
    )
