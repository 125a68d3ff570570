"""Evaluates the latest checkpoint of a run: zero-shot accuracy, retrieval, whole-split loss; draws the pictures.

python -m experiments.evaluate --workdir=runs/quickstart
"""

import json
from pathlib import Path

from jax.sharding import Mesh
from ml_collections import ConfigDict

from experiments import command
from infcl_jax.data import ByteTokenizer
from infcl_jax.distributed import is_lead
from infcl_jax.evaluation import EvaluationConfig, Suite, plot_curves
from infcl_jax.models import CLIPConfig, build_model, model_config
from infcl_jax.training import (
    METRICS_FILE,
    Checkpointer,
    OptimizerConfig,
    create_state,
    load_config,
    make_optimizer,
    prepare_workdir,
)

RESULTS_FILE = "evaluation.json"
CURVES_FILE = "curves.png"
GRID_FILE = "retrieval.png"


def read_model_config(config: ConfigDict) -> CLIPConfig:
    """The model of a run, with its overrides.

    Raises:
      ValueError: unknown model or override, or a vocabulary too small for the tokenizer.
    """
    model = model_config(config.model, **command.parse_overrides(config.model_overrides))
    needed = ByteTokenizer().vocab_size
    if model.text.vocab_size < needed:
        raise ValueError(f"expected text.vocab_size >= {needed} (bytes and marks), got {model.text.vocab_size}")
    return model


def make_suite(config: ConfigDict, mesh: Mesh) -> Suite:
    """The evaluations of a run; errors as `infcl_jax.evaluation.Suite`."""
    model = read_model_config(config)
    return Suite(
        EvaluationConfig(**config.evaluation),
        build_model(model),
        ByteTokenizer(model.text.context_length),
        image_size=model.vision.image_size,
        data_dir=config.data_dir,
        mesh=mesh,
        implementation=config.implementation,
    )


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
    suite = make_suite(config, mesh)
    model = read_model_config(config)
    optimizer = make_optimizer(OptimizerConfig(**config.optimizer), config.total_steps)
    state = create_state(
        build_model(model), optimizer, model.vision.image_size, model.text.context_length, config.seed, mesh
    )
    with Checkpointer(workdir) as checkpoints:
        step = checkpoints.latest_step()
        if step is None:
            raise FileNotFoundError(f"no checkpoint in {workdir} yet; train further before evaluating")
        state = checkpoints.restore_latest(state)
    results = suite(state.params, grid_path=workdir / GRID_FILE)
    draw_curves(workdir)
    if is_lead():
        (workdir / RESULTS_FILE).write_text(json.dumps({"step": step, **results}, indent=2) + "\n")
    command.say(f"step {step}: {format_results(results)}")
    command.say(f"pictures: {workdir / CURVES_FILE}, {workdir / GRID_FILE}")
    return results


if __name__ == "__main__":
    command.run(evaluate)
