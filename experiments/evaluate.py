"""Evaluate the latest checkpoint of a run.

Measures zero-shot accuracy, retrieval and the whole-split loss, and plots the curves and a retrieval grid.

    python -m experiments.evaluate --workdir=runs/quickstart [--config.evaluation.gallery=100]

Settings are those of the run. The command line can change the settings in `EVALUATED` for this evaluation.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from configs import saved
from experiments import command
from infcl_jax import run
from infcl_jax.distributed import is_lead
from infcl_jax.evaluation import plot_curves
from infcl_jax.settings import changed_settings, check_kept, flattened, format_changes, naming
from infcl_jax.training import METRICS_FILE, Checkpointer, prepare_workdir

# Settings and groups that an evaluation uses besides the checkpoint's own.
EVALUATED = (
    "evaluation",
    "data_dir",
    "implementation",
    "model_overrides",
    "parameter_sharding",
    "cpu_devices",
    "compilation_cache",
)
RESULTS_FILE = "evaluation.json"
CURVES_FILE = "curves.png"
GRID_FILE = "retrieval.png"


def draw_curves(workdir: Path) -> None:
    """Plot loss and accuracy over the steps, from the run's metrics."""
    if is_lead():
        plot_curves(workdir / METRICS_FILE, workdir / CURVES_FILE)


def format_results(results: dict[str, float]) -> str:
    """Format results as one line: losses in nats, all others in percent."""
    entries = (
        f"{name} {value:.4f}" if name.endswith("loss") else f"{name} {100 * value:.1f} %"
        for name, value in results.items()
    )
    return "  ".join(entries) or "nothing to evaluate on"


def evaluate(workdir: str | Path, changes: Mapping[str, Any] | None = None) -> dict[str, float]:
    """Evaluate the latest checkpoint in `workdir` on all devices.

    Writes `evaluation.json`, `curves.png` and, with a retrieval dataset, `retrieval.png` there.

    Args:
      workdir: directory of the run.
      changes: changed settings by dotted name, such as `{"evaluation.gallery": 100}`. Each must be in `EVALUATED`.

    Returns:
      Results by name, see `infcl_jax.evaluation.Suite`.

    Raises:
      FileNotFoundError: the run, its checkpoint or a dataset is missing.
      ValueError: the checkpoint does not fit its configuration, or a change is not allowed.
    """
    old, config = saved.get_config(str(workdir)), saved.get_config(str(workdir))
    try:
        config.update_from_flattened_dict(changes or {})
    except (KeyError, TypeError) as error:
        raise ValueError(f"expected changes of the settings in configs/base.py, got {changes}: {error}") from error
    changed = changed_settings(old, config)
    kept = [name for name in changed if name.partition(".")[0] not in EVALUATED]
    check_kept(changed, kept, workdir, f"an evaluation changes only {', '.join(EVALUATED)}")
    mesh = command.start_devices(config)
    workdir = prepare_workdir(workdir)
    suite = run.evaluation_suite(config, mesh)
    state = run.initial_state(config, mesh, run.sample_source(config))
    with Checkpointer(workdir) as checkpoints:
        step = checkpoints.latest_step()
        if step is None:
            raise FileNotFoundError(f"no checkpoint in {workdir} yet; train further before evaluating")
        with naming(changed):
            state = checkpoints.restore_latest(state)
    for line in format_changes(changed):
        command.say(line)
    results = suite(state.variables, grid_path=workdir / GRID_FILE)
    draw_curves(workdir)
    if is_lead():
        (workdir / RESULTS_FILE).write_text(json.dumps({"step": step, **results}, indent=2) + "\n")
    command.say(f"step {step}: {format_results(results)}")
    pictures = (CURVES_FILE, GRID_FILE) if config.evaluation.retrieval_dataset else (CURVES_FILE,)
    command.say(f"pictures: {', '.join(str(workdir / name) for name in pictures)}")
    return results


def given_changes() -> dict[str, Any]:
    """Return the changes of the command line, by dotted name.

    Includes every `--config.NAME=VALUE`, and the model and the settings of `EVALUATED` in `--config=FILE`.
    """
    given = command.chosen_changes()
    if command.chosen_file() is None:
        return given
    names = (*EVALUATED, "model")
    return {k: v for k, v in flattened(command.chosen_config()).items() if k.partition(".")[0] in names} | given


if __name__ == "__main__":
    command.run(lambda workdir: evaluate(workdir, given_changes()), saved_config=True)
