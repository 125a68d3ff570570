"""Measurement of a training step whose batches are read from files, for `experiments.benchmarks.step`."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import Mesh

from experiments.benchmarks import timing
from infcl_jax import run
from infcl_jax.data import TrainIterator
from infcl_jax.data.decode.device import STAGED_BATCHES
from infcl_jax.data.parallelism import limiting_stage
from infcl_jax.settings import RunConfig
from infcl_jax.training import DataWait, TrainState, rare_garbage_collection
from infcl_jax.training.step import TrainStep

# Keys of a record that `file_figures` yields.
FIGURES = ("files_images_per_second", "files_fraction", "files_wait", "files_stage", "files_readers")

# Least duration of a timed run, in seconds. Prefetched batches of the start are a small part of it.
_SECONDS = 5.0


@dataclasses.dataclass
class _FileTraining:
    """Training on batches of files, as in `experiments.train`; each call is one step."""

    config: RunConfig
    mesh: Mesh
    data: TrainIterator
    wait: DataWait
    step: TrainStep
    state: TrainState
    metrics: Any = None
    steps: int = 0

    def __call__(self) -> Any:
        batch, previous = self.wait.batch(lambda: run.next_batch(self.config, self.data, self.mesh)), self.metrics
        self.state, self.metrics = self.step(self.state, batch)
        self.wait.step(self.metrics)
        self.steps += 1
        jax.block_until_ready(previous)  # the training loop reads them one step late
        return self.state, self.metrics


def open_data(config: RunConfig, mesh: Mesh) -> TrainIterator:
    """Open the batches of a run on these devices."""
    return run.training_data(config, run.training_source(config), mesh=mesh)


def file_figures(
    config: RunConfig, mesh: Mesh, step: TrainStep, state: TrainState, step_seconds: float, repeats: int
) -> Iterator[dict[str, Any]]:
    """Measure the step on batches of files."""
    with contextlib.closing(open_data(config, mesh)) as data, DataWait() as wait, rare_garbage_collection():
        train = _FileTraining(config, mesh, data, wait, step, state)
        # Batches that were read while the step compiled, and those for which the GPU's decoder allocates memory.
        for _ in range(data.parallelism.prefetch_batches + 2 + STAGED_BATCHES):
            jax.block_until_ready(train())
        wait.take(train.steps)
        seconds = timing.seconds(train, repeats, _SECONDS)
        waited, busy = wait.take(train.steps)
        yield {
            "files_images_per_second": config.batch_size / seconds,
            "files_fraction": step_seconds / seconds,
            "files_wait": None if config.grad_cache.offload == "replay" else waited / busy,
            "files_stage": limiting_stage(data.stats(), data.parallelism.readers),
            "files_readers": str(data.parallelism),
        }
