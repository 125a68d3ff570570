r"""Compare the training losses of every implementation and of gradient caching.

    python -m experiments.benchmarks.loss_parity --config=configs/digits.py --workdir=runs/parity \
        --config.total_steps=100

Trains the same small run once for each; the losses must agree up to rounding. Writes `parity.json` with the loss of
every step, and `parity.png` with the curves and their relative differences from the first. Reproduces the loss
comparison of Cheng et al., "Breaking the Memory Barrier" (Inf-CL).
"""

import dataclasses
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
from infcl_jax.console import say
from infcl_jax.distributed import is_lead
from infcl_jax.ops.pairwise_lse import available_implementations
from infcl_jax.run.devices import start_devices
from infcl_jax.settings import total_steps
from infcl_jax.training import BATCH_RESIDENCIES, NO_CACHE, GradCacheConfig, make_train_step

CHUNKS = 4  # chunks of a batch with gradient caching
RESULTS_FILE, PICTURE_FILE = "parity.json", "parity.png"


def compare(config: ConfigDict, workdir: str | Path) -> dict[str, float]:
    """Train once for every variant and plot the losses.

    Args:
      config: settings, see `configs/base.py`. `implementation` and `grad_cache` are replaced. The model must not use
        dropout, since gradient caching draws it for each chunk.
      workdir: folder of the results.

    Returns:
      Largest relative difference from the losses of the first variant, by variant.

    Raises:
      ValueError: a setting is wrong.
      FileNotFoundError: the dataset is not prepared.
    """
    mesh = start_devices(config)
    curves: dict[str, list[float]] = {}
    for name, variant in variants(config, mesh).items():
        curves[name] = losses(variant, mesh)
        worst = deviation(curves[name], next(iter(curves.values()))).max()
        say(f"{name}: last loss {curves[name][-1]:.6f}, at most {worst:.1e} from {next(iter(curves))}")
    if is_lead():
        folder = Path(workdir)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / RESULTS_FILE).write_text(json.dumps(curves))
        plot(curves, folder / PICTURE_FILE)
    return {name: float(deviation(curve, next(iter(curves.values()))).max()) for name, curve in curves.items()}


def variants(config: ConfigDict, mesh: Mesh) -> dict[str, ConfigDict]:
    """Return a configuration for every implementation, dense first, and every residency.

    Args:
      config: settings shared by all variants.
      mesh: devices.

    Returns:
      Configurations by name of the variant.
    """

    def changed(**changes: object) -> ConfigDict:
        copy = config.copy_and_resolve_references()
        no_cache = {f"grad_cache.{name}": value for name, value in dataclasses.asdict(NO_CACHE).items()}
        copy.update_from_flattened_dict(no_cache | changes)
        return copy

    chunk = max(mesh.size, config.batch_size // CHUNKS // mesh.size * mesh.size)
    implementations = {name: changed(implementation=name) for name in available_implementations()}
    cached = {
        f"gradient caching, {residency}": changed(
            **{"implementation": None, "grad_cache.chunk_size": chunk, "grad_cache.residency": residency}
        )
        for residency in BATCH_RESIDENCIES
    }
    return implementations | cached


def losses(config: ConfigDict, mesh: Mesh) -> list[float]:
    """Train and return the loss of every step."""
    source, step_losses = run.training_source(config), []
    step = make_train_step(run.loss(config, mesh, source), config.seed, GradCacheConfig(**config.grad_cache), mesh)
    data, state = run.training_data(config, source), run.initial_state(config, mesh, source)
    for _ in range(total_steps(config, source)):
        state, metrics = step(state, run.next_batch(config, data, mesh))
        step_losses.append(metrics["loss"])
    data.close()
    return [float(loss) for loss in jax.device_get(step_losses)]


def deviation(curve: Sequence[float], reference: Sequence[float]) -> np.ndarray:
    """Compute the relative difference of every step's loss."""
    return np.abs(np.asarray(curve) - reference) / np.abs(reference)


def plot(curves: dict[str, list[float]], path: Path) -> None:
    """Plot the losses and their relative differences from the first curve."""
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
