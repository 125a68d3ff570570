r"""Trains the same small run with every strategy, with and without gradient caching: the losses must be the same.

    python -m experiments.benchmarks.loss_parity --config=configs/digits.py --workdir=runs/parity \
        --config.total_steps=100

Writes `parity.json`, the loss of every step by strategy, and `parity.png`: the curves, and how far each is from the
first one. The figure in Cheng et al., "Breaking the Memory Barrier" (Inf-CL), that compares training losses.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh
from matplotlib.figure import Figure
from ml_collections import ConfigDict

from experiments import command
from infcl_jax import run
from infcl_jax.distributed import is_lead
from infcl_jax.ops.pairwise_lse import available_implementations
from infcl_jax.training import GradCacheConfig, make_train_step

CHUNKS = 4  # of a batch with gradient caching
RESIDENCIES = ("device", "host", "replay")
RESULTS_FILE, PICTURE_FILE = "parity.json", "parity.png"


def compare(config: ConfigDict, workdir: str | Path) -> dict[str, float]:
    """Trains once for every strategy and draws the losses.

    Args:
      config: see `configs/base.py`; `implementation` and `grad_cache` are replaced. The model must not use dropout,
        which gradient caching draws chunk by chunk.
      workdir: where the results go.

    Returns:
      The largest relative difference of any step's loss from that of the first strategy, by strategy.

    Raises:
      ValueError: a setting is wrong.
      FileNotFoundError: the dataset is not prepared.
    """
    mesh = command.start_devices(config)
    curves: dict[str, list[float]] = {}
    for name, variant in variants(config, mesh).items():
        curves[name] = losses(variant, mesh)
        worst = deviation(curves[name], next(iter(curves.values()))).max()
        command.say(f"{name}: last loss {curves[name][-1]:.6f}, at most {worst:.1e} from {next(iter(curves))}")
    if is_lead():
        folder = Path(workdir)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / RESULTS_FILE).write_text(json.dumps(curves))
        draw(curves, folder / PICTURE_FILE)
    return {name: float(deviation(curve, next(iter(curves.values()))).max()) for name, curve in curves.items()}


def variants(config: ConfigDict, mesh: Mesh) -> dict[str, ConfigDict]:
    """The configuration for every strategy, dense first, and for every residency of gradient caching."""

    def changed(**changes: object) -> ConfigDict:
        copy = config.copy_and_resolve_references()
        none = {"grad_cache.chunk_size": None, "grad_cache.keep": 0, "grad_cache.residency": "device"}
        copy.update_from_flattened_dict(none | changes)
        return copy

    chunk = max(mesh.size, config.batch_size // CHUNKS // mesh.size * mesh.size)
    strategies = {name: changed(implementation=name) for name in available_implementations()}
    cached = {
        f"gradient caching, {where}": changed(
            **{"implementation": None, "grad_cache.chunk_size": chunk, "grad_cache.residency": where}
        )
        for where in RESIDENCIES
    }
    return strategies | cached


def losses(config: ConfigDict, mesh: Mesh) -> list[float]:
    """The loss of every step."""
    step = make_train_step(run.loss(config, mesh), config.seed, GradCacheConfig(**config.grad_cache), mesh)
    data, state, found = run.training_data(config), run.initial_state(config, mesh), []
    for _ in range(config.total_steps):
        state, metrics = step(state, run.next_batch(config, data, mesh))
        found.append(metrics["loss"])
    data.close()
    return [float(loss) for loss in jax.device_get(found)]


def deviation(curve: Sequence[float], reference: Sequence[float]) -> np.ndarray:
    """Relative difference of every step's loss."""
    return np.abs(np.asarray(curve) - reference) / np.abs(reference)


def draw(curves: dict[str, list[float]], path: Path) -> None:
    """The losses, and their relative differences from the first curve on a logarithmic axis."""
    figure = Figure(figsize=(12, 4))
    left, right = figure.subplots(1, 2)
    reference = next(iter(curves.values()))
    for name, curve in curves.items():
        left.plot(range(1, len(curve) + 1), curve, label=name, linewidth=1)
        right.plot(range(1, len(curve) + 1), np.maximum(deviation(curve, reference), 1e-9), label=name, linewidth=1)
    left.set(xlabel="step", ylabel="loss")
    right.set(xlabel="step", ylabel=f"relative difference from {next(iter(curves))}", yscale="log")
    right.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    command.run(lambda workdir: compare(command.chosen_config(), workdir))
