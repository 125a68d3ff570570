"""Plan the memory and the time of a run without running it.

Prints the memory of each component, the recommended gradient caching and the largest batch that fits. With --device it
also prints the estimated time of a step.

    python -m experiments.plan --config=configs/quickstart.py --device=H200 --devices=8 [--config.batch_size=32768]

--target=1024 prints a table of the same run on 1, 2, 4, ... 1,024 GPUs:

    python -m experiments.plan --config=configs/openclip.py --device=A100-40 --target=1024

Without --device and --memory_gib, plans for the devices of this machine.
"""

import contextlib

import jax
from absl import flags
from jax.sharding import use_abstract_mesh
from ml_collections import ConfigDict

from experiments import command
from infcl_jax import run
from infcl_jax.planner import (
    DEVICES,
    Device,
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
)
from infcl_jax.planner.times import GPUS_PER_HOST
from infcl_jax.run.devices import start_devices
from infcl_jax.run.teacher import load_teacher
from infcl_jax.runtime.console import say
from infcl_jax.runtime.jax_start import MEMORY_SHARE
from infcl_jax.runtime.mesh import data_mesh
from infcl_jax.settings import total_steps

_DEVICE = flags.DEFINE_string(
    "device", None, f"Plan for this device: {', '.join(DEVICES)}. JAX takes {MEMORY_SHARE:.0%} of it."
)
_COUNT = flags.DEFINE_integer("devices", None, "Number of devices. Default: those of this machine, or 1 with --device.")
_MEMORY = flags.DEFINE_float(
    "memory_gib", None, "Memory that JAX may use per device, in GiB. Default: that of the device."
)
_TARGET = flags.DEFINE_integer(
    "target", None, "Print a table of the run on 1, 2, 4, ... GPUs up to this number, with --device, instead of a plan."
)
_LARGEST_TARGET = 1024


def plan_from_flags() -> None:
    """Print the plan of `--config`.

    Raises:
      ValueError: `--config` is missing, or a setting or flag is wrong.
    """
    for name, flag in (("devices", _COUNT), ("memory_gib", _MEMORY)):
        if flag.value is not None and not flag.value > 0:
            raise ValueError(f"expected --{name} > 0, got {flag.value}")
    if _TARGET.value is not None and (_DEVICE.value is None or not 1 <= _TARGET.value <= _LARGEST_TARGET):
        raise ValueError(f"expected --target from 1 to {_LARGEST_TARGET} with --device, got {_TARGET.value}")
    config = command.resolved_config()
    # Under an abstract mesh the plan has the kernels of the named device, not of this machine.
    with contextlib.nullcontext() if _DEVICE.value is None else use_abstract_mesh(device_named(_DEVICE.value).mesh):
        workload, limit = workload_from_flags(config)
        device = None if _DEVICE.value is None else device_named(_DEVICE.value)
        steps = total_steps(config, run.sample_source(config))
        if device is not None and _TARGET.value is not None:
            table = target_table(workload, device, limit or device.memory_limit, _TARGET.value, steps)
            say(*table.split("\n"))
            return
        report(workload, limit)
        if device is not None:
            say(*time_of_plan(workload, device, limit or device.memory_limit, steps).split("\n"))


def time_of_plan(workload: Workload, device: Device, memory_limit: int, steps: int) -> str:
    """Return the time of a run, with the recommended settings if it does not fit.

    Args:
      workload: settings of the run.
      device: GPU.
      memory_limit: bytes that JAX may use on a GPU.
      steps: steps of the run.
    """
    if plan_memory(workload, memory_limit).fits:
        return format_time(step_time(workload, device), steps)
    try:
        recommended = fitting_plan(workload, memory_limit).workload
    except ValueError:
        return "estimated step: none, since nothing fits"
    return f"with the recommended settings, {format_time(step_time(recommended, device), steps)}"


def target_table(workload: Workload, device: Device, memory_limit: int, target: int, steps: int) -> str:
    """Return the table of a run on 1, 2, 4, ... `target` GPUs.

    Numbers on which nothing fits, or which do not divide the batch, are left out.

    Args:
      workload: settings of the run.
      device: GPU.
      memory_limit: bytes that JAX may use on a GPU.
      target: largest number of GPUs.
      steps: steps of the run.

    Raises:
      ValueError: the run fits on none of the numbers.
    """
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


def workload_from_flags(config: ConfigDict) -> tuple[Workload, int | None]:
    """Return the run's workload and the memory limit of one device.

    Args:
      config: settings of the run.

    Returns:
      The workload, and the bytes that JAX may use per device, or None if unknown.

    Raises:
      ValueError: a setting or flag is wrong, or `distill.teacher` holds no model.
    """
    limit, implementation = None if _MEMORY.value is None else int(_MEMORY.value * 2**30), None
    if _DEVICE.value is not None:
        device, count = device_named(_DEVICE.value), _COUNT.value or 1
        limit, implementation = limit or device.memory_limit, device.implementation
    else:
        count = _COUNT.value or start_devices(config).size
        limit = limit or device_memory_limit()
    teacher = load_teacher(config, data_mesh())
    memory = None if teacher is None else teacher.memory()
    return run.workload(config, count, limit, implementation, run.sample_source(config), memory), limit


def report(workload: Workload, memory_limit: int | None) -> None:
    """Print the memory table, the recommended gradient caching and the largest batch.

    Without a memory limit it prints only the table.

    Args:
      workload: memory-relevant settings of the run.
      memory_limit: bytes that JAX may use per device, or None if unknown.
    """
    say(*describe_plan(plan_memory(workload, memory_limit)).split("\n"))
    if memory_limit is None:
        device = jax.devices()[0].device_kind
        say(f"for recommended settings give --device or --memory_gib: {device} does not report its memory")
        return
    try:
        say(f"largest batch: --config.batch_size={largest_batch(workload, memory_limit)}")
    except ValueError as error:
        say(f"largest batch: none; {error}")


if __name__ == "__main__":
    command.run_without_workdir(plan_from_flags, config=command.resolved_config)
