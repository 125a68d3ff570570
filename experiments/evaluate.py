"""Evaluates the latest checkpoint of a run: zero-shot accuracy, retrieval, whole-split loss; draws the pictures.

python -m experiments.evaluate --workdir=runs/quickstart
"""

import json
from pathlib import Path

from ml_collections import ConfigDict

from experiments import build, command
from infcl_jax.distributed import is_lead
from infcl_jax.evaluation import plot_curves
from infcl_jax.training import (
    METRICS_FILE,
    Checkpointer,
    load_config,
    prepare_workdir,
)

RESULTS_FILE = "evaluation.json"
CURVES_FILE = "curves.png"
GRID_FILE = "retrieval.png"


def draw_curves(workdir: Path) -> None:
    """Loss and accuracy over the steps, from the run's metrics."""
    if is_lead():
        plot_curves(workdir / METRICS_FILE, workdir / CURVES_FILE)


def format_results(results: dict[str, float]) -> str:
    """One line: losses in nats, everything else in percent."""
    parts = (
        f"{name} {value:.4f}" if name.endswith("loss") else f"{name} {100 * value:.1f} %"
        for name, value in results.items()
    )
    return "  ".join(parts) or "nothing to evaluate on"


def evaluate(workdir: str | Path) -> dict[str, float]:
    """Evaluates the latest checkpoint in `workdir` on all devices and writes results and pictures there.

    Returns:
      See `infcl_jax.evaluation.Suite`.

    Raises:
      FileNotFoundError: no run, no checkpoint, or a dataset is missing.
      ValueError: the checkpoint does not fit its configuration.
    """
    config = ConfigDict(load_config(workdir))
    mesh = command.start_devices(config)
    workdir = prepare_workdir(workdir)
    suite = build.evaluation_suite(config, mesh)
    state = build.initial_state(config, mesh)
    with Checkpointer(workdir) as checkpoints:
        step = checkpoints.latest_step()
        if step is None:
            raise FileNotFoundError(f"no checkpoint in {workdir} yet; train further before evaluating")
        state = checkpoints.restore_latest(state)
    results = suite(state.variables, grid_path=workdir / GRID_FILE)
    draw_curves(workdir)
    if is_lead():
        (workdir / RESULTS_FILE).write_text(json.dumps({"step": step, **results}, indent=2) + "\n")
    command.say(f"step {step}: {format_results(results)}")
    command.say(f"pictures: {workdir / CURVES_FILE}, {workdir / GRID_FILE}")
    return results


if __name__ == "__main__":
    command.run(evaluate)
