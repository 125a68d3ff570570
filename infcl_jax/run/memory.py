"""Memory of a run's step, for the planner."""

import dataclasses

import jax
import optax

from infcl_jax.data import Source
from infcl_jax.losses import Loss
from infcl_jax.models import CLIP, TextPair
from infcl_jax.ops.pairwise_lse.implementations import best_implementation
from infcl_jax.planner import SAFE_SHARE, TeacherMemory, Workload, store_activations, tree_bytes
from infcl_jax.run.build import num_samples
from infcl_jax.run.task import Task
from infcl_jax.run.teacher import Teacher
from infcl_jax.training.grad_cache import KEEP_MOST


def run_workload(
    task: Task,
    model: CLIP | TextPair,
    loss: Loss,
    optimizer: optax.GradientTransformation,
    source: Source | None,
    devices: int,
    memory_limit: int | None = None,
    implementation: str | None = None,
    teacher: TeacherMemory | None = None,
) -> Workload:
    """Return the settings of a run that determine its memory, see `infcl_jax.run.workload`.

    Args:
      task: task of the run.
      model: its model.
      loss: its loss.
      optimizer: its optimizer.
      source: training data.
      devices: number of devices over which the batch is sharded.
      memory_limit: bytes that JAX may use on a device; None if unknown.
      implementation: implementation of the loss if the settings name none; None: the best on this device.
      teacher: memory of the teacher; None leaves it out.

    Raises:
      ValueError: `grad_cache.keep` is -1 without chunks or a memory limit.
    """
    config = task.config
    samples = jax.eval_shape(lambda: loss.init_samples(num_samples(config, source), task.init_logit_scale))
    best = implementation or best_implementation()
    stores_most = config.grad_cache.keep == KEEP_MOST
    workload = Workload(
        model=model,
        optimizer=optimizer,
        batch_size=config.batch_size,
        devices=devices,
        cache=dataclasses.replace(config.grad_cache, keep=0) if stores_most else config.grad_cache,
        implementation=config.implementation or (best if best in loss.implementations else "xla"),
        loss=config.loss,
        ema=config.ema is not None,
        sample_bytes=tree_bytes(samples) // devices,
        parameter_sharding=config.parameter_sharding,
        frozen=config.frozen,
        unlocked_groups=config.unlocked_groups,
        precomputed=task.precomputed,
        passages=task.passages,
        teacher=teacher,
        by_id=loss.targets.by_id,
    )
    if not stores_most:
        return workload
    if memory_limit is None:
        raise ValueError("expected grad_cache.keep >= 0 on devices that do not report their memory, got -1")
    return store_activations(workload, int(SAFE_SHARE * memory_limit))


def teacher_memory(teacher: Teacher | None) -> TeacherMemory | None:
    """Return the memory of the teacher on each device; None without one."""
    return None if teacher is None else TeacherMemory(teacher.model, cached=teacher.cache is not None)
