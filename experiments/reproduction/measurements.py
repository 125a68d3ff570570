"""Measurements of cells: memory, time and largest batches. `training` has the training runs.

Each measurement takes the folder of the cell and the arguments of the cell, and returns values by name.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, use_abstract_mesh

from experiments.benchmarks import step_case, timing
from experiments.benchmarks.harness import is_out_of_memory
from experiments.benchmarks.timing import Program
from experiments.reproduction import training
from experiments.reproduction.training import mesh_of
from infcl_jax import clip_loss, run
from infcl_jax.models import build_model
from infcl_jax.models.clip import row_shapes
from infcl_jax.planner import SAFE_SHARE, Workload, device_memory_limit, device_named, largest_batch, plan_memory
from infcl_jax.runtime.console import say
from infcl_jax.runtime.mesh import DATA_AXIS
from infcl_jax.settings import RunConfig, make_config
from infcl_jax.training import GradCacheConfig, TrainState, make_train_step
from infcl_jax.training.step import TrainStep

_GIB = 2**30
_REPEATS = 3


def loss_memory(
    folder: Path, *, implementation: str, batch: int, dim: int, devices: int, dtype: str = "float32"
) -> dict[str, float]:
    """Compile the CLIP loss with its gradients and return its planned workspace.

    Returns:
      "gib": workspace of one device in GiB, without features and their gradients.
    """
    mesh = mesh_of(devices)
    loss, features, scale = _clip_loss(mesh, implementation, batch, dim, dtype)
    compiled = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2))).lower(features, features, scale).compile()
    return {"gib": compiled.memory_analysis().temp_size_in_bytes / _GIB}


def loss_time(
    folder: Path, *, implementation: str, batch: int, dim: int, devices: int, dtype: str = "float32"
) -> dict[str, float]:
    """Time the CLIP loss on random unit features.

    Returns:
      "forward_ms": milliseconds of the loss. "total_ms": of the loss with its gradients. "backward_ms": their
      difference. "gib": workspace of one device in GiB, as planned by XLA.
    """
    loss, abstract, scale = _clip_loss(mesh_of(devices), implementation, batch, dim, dtype)

    def draw(seed: int) -> jax.Array:
        rows = jax.random.normal(jax.random.key(seed), (batch, dim), jnp.float32)
        return (rows / jnp.linalg.norm(rows, axis=1, keepdims=True)).astype(dtype)

    image, text = (jax.jit(functools.partial(draw, seed), out_shardings=abstract.sharding)() for seed in range(2))
    operands = image, text, jax.device_put(np.float32(50.0), scale.sharding)
    forward, both = Program(loss, *operands), Program(jax.value_and_grad(loss, argnums=(0, 1, 2)), *operands)
    forward_ms, total_ms = 1e3 * forward.seconds(_REPEATS), 1e3 * both.seconds(_REPEATS)
    return {
        "forward_ms": forward_ms,
        "total_ms": total_ms,
        "backward_ms": total_ms - forward_ms,
        "gib": both.memory_bytes / _GIB,
    }


def _clip_loss(
    mesh: Mesh, implementation: str, batch: int, dim: int, dtype: str
) -> tuple[Callable[..., jax.Array], jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Return the loss, the shape of its features and that of its scale."""
    loss = functools.partial(clip_loss, mesh=mesh if mesh.size > 1 else None, implementation=implementation)
    rows, replicated = (NamedSharding(mesh, spec) for spec in (PartitionSpec(DATA_AXIS), PartitionSpec()))
    features = jax.ShapeDtypeStruct((batch, dim), dtype, sharding=rows)
    return loss, features, jax.ShapeDtypeStruct((), jnp.float32, sharding=replicated)


def step_time(
    folder: Path,
    *,
    model: str,
    batch: int,
    devices: int,
    model_overrides: str = "",
    implementation: str | None = None,
    loss: str = "clip",
    cache: Mapping[str, Any] | None = None,
    phases: bool = False,
) -> dict[str, float]:
    """Time a training step on random images and texts, as `experiments.benchmarks.step` does.

    Returns:
      "step_ms", "pairs_per_second", "memory_gib" (of one device, as planned by XLA) and, with `phases`, "encode_ms",
      "loss_ms", "backward_ms" and "update_ms".
    """
    settings = step_case.Settings(
        model=model,
        batch=(batch,),
        model_overrides=model_overrides,
        cache=GradCacheConfig(**(cache or {})),
        implementation=implementation,
        loss=loss,
        phases=phases,
        repeats=_REPEATS,
    )
    case = step_case.Case.create(settings, mesh_of(devices), batch)
    figures: dict[str, float] = {}
    for new in case.figures(_gemm()):
        figures |= new
    names = ("step_ms", "encode_ms", "loss_ms", "backward_ms", "update_ms")
    derived = {"pairs_per_second": 1e3 * batch / figures["step_ms"], "memory_gib": figures["memory_mib"] / 1024}
    return {name: figures[name] for name in names if name in figures} | derived


@functools.cache
def _gemm() -> timing.Gemm:
    return timing.measure_gemm(1)


def retrieval_step_time(
    folder: Path, *, model: str, batch: int, devices: int, cache: Mapping[str, Any] | None = None, steps: int = 1
) -> dict[str, float]:
    """Time training steps of a text retriever.

    Queries have 16 tokens, passages 128, with one hard negative each.

    Args:
      folder: folder of the cell; not used.
      model: model of text retrieval, such as "bert-base-uncased".
      batch: queries of a step.
      devices: devices over which the batch is sharded.
      cache: settings of gradient caching.
      steps: number of consecutive steps, whose times are added.

    Returns:
      "ms": milliseconds of all steps, with their updates.
    """
    config, mesh = retrieval_config(model, batch, cache), mesh_of(devices)
    state, step = _state_and_step(config, mesh)
    rng, rows = np.random.default_rng(0), NamedSharding(mesh, PartitionSpec(DATA_AXIS))
    pairs = {
        "query": rng.integers(1, 250, (batch, 16), dtype=np.int32),
        "passage": rng.integers(1, 250, (2 * batch, 128), dtype=np.int32),
        "passage_mask": np.ones(2 * batch, bool),
    }
    texts = {name: jax.device_put(value, rows) for name, value in pairs.items()}
    train = step_case._Training(step, state, texts)
    return {"ms": 1e3 * steps * timing.seconds(train, _REPEATS)}


def _state_and_step(config: RunConfig, mesh: Mesh) -> tuple[TrainState, TrainStep]:
    step = make_train_step(run.loss(config, mesh), config.seed, config.grad_cache, mesh)
    return run.initial_state(config, mesh), step


def retrieval_config(model: str, batch: int, cache: Mapping[str, Any] | None) -> RunConfig:
    """Return the settings of a text retriever's step."""
    options = {f"grad_cache.{name}": value for name, value in (cache or {}).items()}
    sizes: dict[str, Any] = {"batch_size": batch, "text_retrieval.query_length": 16}
    context = {"model_overrides": "text.context_length=128", "precision": "fp32", "total_steps": 1000}
    return make_config({"dataset": "none.json", "model": model, "loss": "retrieval", **sizes, **context, **options})


def planned_memory(
    folder: Path, *, changes: Mapping[str, Any], devices: int, device: str, implementation: str
) -> dict[str, float]:
    """Plan the memory of a training step on a named GPU.

    Returns:
      "peak_gib" and "loss_gib" of one device, and "fits" (1 or 0).
    """
    with on_device(device) as limit:
        plan = plan_memory(planned_workload(changes, devices, implementation), limit)
        return {"peak_gib": plan.peak / _GIB, "loss_gib": plan.loss / _GIB, "fits": int(plan.fits)}


def planned_batch(
    folder: Path, *, changes: Mapping[str, Any], devices: int, device: str, implementation: str
) -> dict[str, float]:
    """Search for the largest batch that a named GPU fits.

    Returns:
      "batch_k": batch size over 1,024, and "loss_gib" of one device at that size.
    """
    with on_device(device) as limit:
        workload = planned_workload(changes, devices, implementation)
        batch = largest_batch(workload, int(SAFE_SHARE * limit))
        plan = plan_memory(dataclasses.replace(workload, batch_size=batch), limit)
    return {"batch_k": batch / 1024, "loss_gib": plan.loss / _GIB}


def measured_batch(
    folder: Path,
    *,
    model: str,
    chunk_size: int,
    devices: int,
    model_overrides: str = "",
    implementation: str | None = None,
) -> dict[str, float]:
    """Search for the largest batch with gradient caching by running steps on black images.

    The next batch is in memory during a step, as in training. Prints what each batch size has come to.

    Returns:
      "batch_k": largest batch size over 1,024 whose step ran. "refused_k": the smallest that ran out of memory.
      "planned_k": the planner's largest.
    """
    limit = device_memory_limit()
    if limit is None:
        raise ValueError("expected GPUs, whose memory is limited, got devices without a limit")
    changes = {"model": model, "model_overrides": model_overrides, "grad_cache.chunk_size": chunk_size}
    planned = largest_batch(planned_workload(changes | {"batch_size": chunk_size}, devices, implementation), limit)
    mesh = mesh_of(devices)

    def runs(size: int) -> bool:
        config = make_config(changes | {"batch_size": size, "implementation": implementation, "total_steps": 1000})
        rows = NamedSharding(mesh, PartitionSpec(DATA_AXIS))
        shapes = row_shapes(build_model(run.read_model_config(config)), size)
        try:
            state, step = _state_and_step(config, mesh)
            zeros = jax.jit(lambda: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes), out_shardings=rows)
            batch, _next = zeros(), zeros()
            jax.block_until_ready(step(state, batch))
        except jax.errors.JaxRuntimeError as error:
            if not is_out_of_memory(error):
                raise
            say(f"  a batch of {size} does not fit")
            return False
        say(f"  a batch of {size} runs")
        return True

    largest, refused = search_batch(planned, chunk_size, runs)
    return {"batch_k": largest / 1024, "refused_k": refused / 1024, "planned_k": planned / 1024}


def search_batch(planned: int, unit: int, runs: Callable[[int], bool]) -> tuple[int, int]:
    """Search for the largest batch that runs, from a plan.

    Args:
      planned: batch size near the largest.
      unit: the batch sizes are its multiples.
      runs: whether a batch size runs. If it does, every smaller one does.

    Returns:
      The largest batch size found to run, and the smallest found not to. They differ by a sixteenth of the plan, or by
      two units if these are more.
    """
    width = max(1, planned // 32 // unit) * unit
    low = max(unit, planned - width)
    if runs(low):
        high = low + 2 * width
        while runs(high):
            low, high = high, high + 2 * width
        return low, high
    while low > unit:
        low, high = max(unit, low - 2 * width), low
        if runs(low):
            return low, high
    raise ValueError(f"expected a batch of {unit} to run, got out of memory")


@contextlib.contextmanager
def on_device(device: str) -> Any:
    """Plan for a named GPU and yield the bytes that JAX may use there."""
    named = device_named(device)
    with use_abstract_mesh(named.mesh):
        yield named.memory_limit


def planned_workload(changes: Mapping[str, Any], devices: int, implementation: str | None = None) -> Workload:
    """Return the workload of changed settings, without reading data."""
    return run.workload(make_config(dict(changes)), devices, None, implementation)


MEASUREMENTS: dict[str, Callable[..., dict[str, Any]]] = {
    "loss_memory": loss_memory,
    "loss_time": loss_time,
    "step_time": step_time,
    "retrieval_step_time": retrieval_step_time,
    "planned_memory": planned_memory,
    "planned_batch": planned_batch,
    "measured_batch": measured_batch,
    "short_run": training.short_run,
    "full_run": training.full_run,
}
