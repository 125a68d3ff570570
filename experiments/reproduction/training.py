"""Training runs of cells: short ones in memory, full ones in folders."""

import importlib
import itertools
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from experiments.reproduction.corpus import write_corpus
from infcl_jax import run, train
from infcl_jax.data.prepare import prepare
from infcl_jax.data.sources.sample_range import SampleRange
from infcl_jax.evaluation.suites import IMAGENET_VARIANTS, RETRIEVAL
from infcl_jax.runtime.mesh import data_mesh
from infcl_jax.settings import RunConfig, check_config, with_changes, with_total_steps
from infcl_jax.training import METRICS_FILE, make_train_step, read_metrics

CORPUS = "corpus"  # value of `dataset` for the generated text corpus

_LAST = 20  # steps whose mean loss is reported
# Metrics in percent, by their names in the values of a cell.
_METRICS = {
    "zero_shot/top1": "top1",
    "retrieval/image_to_text_r1": "image_to_text_r1",
    "retrieval/text_to_image_r1": "text_to_image_r1",
    "imagenet1k/top1": "imagenet_top1",
    "imagenetv2/top1": "imagenet_v2_top1",
    "imagenet-r/top1": "imagenet_r_top1",
    "imagenet_sketch/top1": "imagenet_sketch_top1",
    "objectnet/top1": "objectnet_top1",
    "mscoco_captions/image_to_text_r1": "coco_image_to_text_r1",
    "mscoco_captions/text_to_image_r1": "coco_text_to_image_r1",
    "text_retrieval/top20": "hit20",
    "text_retrieval/top100": "hit100",
}
# Means of metrics. FastCLIP, section 5: ImageNet and its six distribution shifts.
_MEANS = {
    "imagenet_and_variants": tuple(f"{name}/top1" for name in ("imagenet1k", *IMAGENET_VARIANTS)),
    "flickr_and_coco_r1": tuple(f"{name}/mean_r1" for name in RETRIEVAL),
}


def mesh_of(devices: int) -> Mesh:
    """Return the mesh of the first devices."""
    if devices > len(jax.devices()):
        raise ValueError(f"expected {devices} devices, got {len(jax.devices())}")
    return data_mesh(jax.devices()[:devices])


def run_config(config: str, changes: Mapping[str, Any], folder: Path | None = None) -> RunConfig:
    """Return the settings of a run.

    Args:
      config: file of `configs` with its argument, such as "fastclip:medium,loss=fastclip_v2".
      changes: changed settings by name. The dataset "corpus" is the generated text corpus.
      folder: folder of the generated corpus; None: it is not written.
    """
    name, _, argument = config.partition(":")
    changes = dict(changes)
    if changes.get("dataset") == CORPUS and folder is not None:
        changes |= write_corpus(folder / CORPUS)
    module = importlib.import_module(f"configs.{name}")
    changed = with_changes(module.get_config(*([argument] if argument else [])), changes)
    check_config(changed)
    return changed


def short_run(
    folder: Path,
    *,
    config: str = "base",
    changes: Mapping[str, Any] | None = None,
    devices: int = 1,
    samples: int | None = None,
) -> dict[str, Any]:
    """Train a short run without checkpoints and evaluate it.

    Args:
      folder: folder of the cell, for a generated corpus.
      config: see `run_config`.
      changes: see `run_config`.
      devices: devices over which the batch is sharded.
      samples: first samples of the data that are used; None: all.

    Returns:
      Accuracies in percent, "loss" (mean of the last steps), "losses" of all steps, and "step_ms", the median time of
      a step with its data.
    """
    settings = run_config(config, changes or {}, folder)
    mesh, source = mesh_of(devices), run.training_source(settings)
    if samples is not None:
        source = SampleRange(source, 0, samples, settings.split)
    settings = with_total_steps(settings, source)
    step = make_train_step(run.loss(settings, mesh, source), settings.seed, settings.grad_cache, mesh)
    data, state = run.training_data(settings, source, mesh=mesh), run.initial_state(settings, mesh, source)
    device_losses, times = [], []
    for _ in range(settings.total_steps):
        state, metrics = step(state, run.next_batch(settings, data, mesh))
        device_losses.append(jax.block_until_ready(metrics["loss"]))
        times.append(time.perf_counter())
    data.close()
    losses = [float(loss) for loss in jax.device_get(device_losses)]
    return _values(run.evaluation_suite(settings, mesh)(state.evaluated_variables), losses, times)


def full_run(folder: Path, *, config: str = "base", changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Train a run on all devices in its work directory.

    A killed run continues from its latest checkpoint. Prepares the built-in shapes if they are missing.

    Returns:
      See `short_run`.
    """
    settings = run_config(config, changes or {}, folder)
    if settings.dataset.startswith("shapes/"):
        prepare(settings.dataset, settings.data_dir)
    results = train(settings, folder)
    lines = [line for line in read_metrics(folder / METRICS_FILE) if "loss" in line]
    return _values(results, [line["loss"] for line in lines], [])


def _values(results: Mapping[str, float], losses: list[float], times: list[float]) -> dict[str, Any]:
    values: dict[str, Any] = {new: 100 * results[name] for name, new in _METRICS.items() if name in results}
    for new, names in _MEANS.items():
        if all(name in results for name in names):
            values[new] = 100 * statistics.mean(results[name] for name in names)
    values |= {"loss": statistics.mean(losses[-_LAST:]), "losses": losses}
    if len(times) > 1:
        # The first difference includes no compilation: that is before the first time.
        values["step_ms"] = 1e3 * statistics.median(b - a for a, b in itertools.pairwise(times))
    return values
