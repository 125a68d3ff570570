"""Plan of a run: memory, recommended gradient caching, largest batch and time of a step."""

import contextlib
import dataclasses

import jax
from jax.sharding import use_abstract_mesh

from infcl_jax.ops.pairwise.implementations import best_implementation
from infcl_jax.planner import (
    SAFE_SHARE,
    Device,
    TeacherMemory,
    Workload,
    describe_plan,
    device_memory_limit,
    device_named,
    fitting_plan,
    format_scaling,
    format_time,
    largest_batch,
    on_devices,
    plan_memory,
    step_time,
    store_activations,
    tree_bytes,
)
from infcl_jax.planner.times import GPUS_PER_HOST
from infcl_jax.run import sample_source, training_source
from infcl_jax.run.base import Run, make_run
from infcl_jax.run.build import load_teacher, start_devices
from infcl_jax.run.text_packing import TextPacking, choose_packing
from infcl_jax.runtime.mesh import data_mesh
from infcl_jax.settings import AnyConfig, make_config, with_total_steps
from infcl_jax.training.grad_cache import KEEP_MOST

_LARGEST_TARGET = 1024
_ABSENT = (OSError, ImportError, ValueError)  # errors of data or a tokenizer that is not on this machine


def plan(
    config: AnyConfig,
    *,
    device: str | None = None,
    devices: int | None = None,
    memory_gib: float | None = None,
    target: int | None = None,
) -> str:
    """Plan the memory and the time of a run without running it.

    Without `device` and `memory_gib`, plans for the devices of this machine. `infcl_jax.planner` has the plans as
    objects.

    Examples:
      >>> config = infcl_jax.run.saved_config("runs/digits")
      >>> text = infcl_jax.plan(config, device="H200")
      >>> "largest batch: --config.batch_size=" in text
      True

    Args:
      config: settings of the run.
      device: name of a GPU, see `infcl_jax.planner.device_named`; None: no time is estimated.
      devices: number of devices; None: all of this machine, or 1 with `device`.
      memory_gib: memory that JAX may use per device, in GiB; None: what the device has.
      target: return a table of the run on 1, 2, 4, ... GPUs up to this number instead; it needs `device`.

    Returns:
      The memory of each component, the recommended gradient caching and the largest batch that fits; with `device` also
      the time of a step, with the data also how texts are packed. Lines without a final newline.

    Raises:
      ValueError: an argument or a setting is wrong, `distill.teacher` or `guide.model` holds no model, or no number of
        GPUs up to `target` fits.
    """
    for name, value in (("devices", devices), ("memory_gib", memory_gib)):
        if value is not None and not value > 0:
            raise ValueError(f"expected --{name} > 0, got {value}")
    if target is not None and (device is None or not 1 <= target <= _LARGEST_TARGET):
        raise ValueError(f"expected --target from 1 to {_LARGEST_TARGET} with --device, got {target}")
    config = make_config(config)
    source = sample_source(config)
    config = with_total_steps(config, source)
    if source is None and config.text_packing == "auto":
        with contextlib.suppress(*_ABSENT):
            source = training_source(config)
    gpu = None if device is None else device_named(device)
    # Under an abstract mesh the plan has the kernels of the named device, not of this machine.
    with contextlib.nullcontext() if gpu is None else use_abstract_mesh(gpu.mesh):
        limit = None if memory_gib is None else int(memory_gib * 2**30)
        if gpu is None:
            count, limit = devices or start_devices(config).size, limit or device_memory_limit()
        else:
            count, limit = devices or 1, limit or gpu.memory_limit
        run = make_run(config, source=source, teacher=load_teacher(config, data_mesh()))
        workload = run_workload(run, count, limit, None if gpu is None else gpu.implementation)
        packing = _packing(run, count)
        packings = {name: entry.packing for name, entry in packing.packed.items()}
        workload = dataclasses.replace(workload, packings=packings)
        if target is not None and gpu is not None and limit is not None:
            return _scaling_table(workload, gpu, limit, target, config.total_steps)
        lines = [_memory_plan(workload, limit)]
        if gpu is not None and limit is not None:
            lines.append(_time(workload, gpu, limit, config.total_steps))
        lines += [f"texts: {packing}"] if str(packing) else []
        return "\n".join(lines)


def _packing(run: Run, devices: int) -> TextPacking:
    """Choose how the texts of a run are encoded; nothing is known without its data and tokenizer."""
    if run.config.text_packing == "auto" and run.source is not None:
        with contextlib.suppress(*_ABSENT):
            return choose_packing(run, devices)
    return TextPacking({}, {})


def _memory_plan(workload: Workload, memory_limit: int | None) -> str:
    """Return the memory table, the recommended gradient caching and, with a memory limit, the largest batch."""
    table = describe_plan(plan_memory(workload, memory_limit))
    if memory_limit is None:
        kind = jax.devices()[0].device_kind
        return f"{table}\nfor recommended settings give --device or --memory_gib: {kind} does not report its memory"
    try:
        return f"{table}\nlargest batch: --config.batch_size={largest_batch(workload, memory_limit)}"
    except ValueError as error:
        return f"{table}\nlargest batch: none; {error}"


def _time(workload: Workload, device: Device, memory_limit: int, steps: int) -> str:
    """Return the time of a run, with the recommended settings if it does not fit."""
    if plan_memory(workload, memory_limit).fits:
        return format_time(step_time(workload, device), steps)
    try:
        recommended = fitting_plan(workload, memory_limit).workload
    except ValueError:
        return "estimated step: none, since nothing fits"
    return f"with the recommended settings, {format_time(step_time(recommended, device), steps)}"


def _scaling_table(workload: Workload, device: Device, memory_limit: int, target: int, steps: int) -> str:
    """Return the table of a run on 1, 2, 4, ... `target` GPUs, where it fits."""
    counts, plans, error = [1 << power for power in range(target.bit_length())], {}, None
    for count in counts:
        try:
            plans[count] = fitting_plan(on_devices(workload, count), memory_limit)
        except ValueError as reason:  # memory is too small, or the number does not divide the batch
            error = reason
    if not plans:
        raise ValueError(f"expected a run that fits on {target} GPUs, got none: {error}")
    times = {count: step_time(plan.workload, device, GPUS_PER_HOST) for count, plan in plans.items()}
    return format_scaling(times, plans, steps)


def run_workload(
    run: Run,
    devices: int,
    memory_limit: int | None = None,
    implementation: str | None = None,
    teacher: TeacherMemory | None = None,
) -> Workload:
    """Return the settings of a run that determine the memory of a step, see `infcl_jax.run.workload`."""
    config, loss, cache = run.config, run.loss, run.config.grad_cache
    if teacher is None and run.teacher is not None:
        teacher = TeacherMemory(run.teacher.model, cached=run.teacher.cache is not None)
    best, stores_most = implementation or best_implementation(), cache.keep == KEEP_MOST
    workload = Workload(
        model=run.model,
        optimizer=run.optimizer,
        batch_size=config.batch_size,
        devices=devices,
        cache=dataclasses.replace(cache, keep=0) if stores_most else cache,
        implementation=config.implementation or (best if best in loss.implementations else "xla"),
        loss=config.loss,
        ema=config.ema is not None,
        sample_bytes=tree_bytes(jax.eval_shape(run.init_samples)) // devices,
        parameter_sharding=config.parameter_sharding,
        frozen=config.frozen,
        unlocked_groups=config.unlocked_groups,
        precomputed=run.precomputed,
        passages=run.passages,
        teacher=teacher,
        by_id=loss.targets.by_id,
    )
    if not stores_most:
        return workload
    if memory_limit is None:
        raise ValueError("expected grad_cache.keep >= 0 on devices that do not report their memory, got -1")
    return store_activations(workload, int(SAFE_SHARE * memory_limit))
