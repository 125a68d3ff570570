"""Plan the memory of a run without running it.

Prints the memory of each component, the recommended gradient caching and the largest batch that fits.

    python -m experiments.plan --config=configs/quickstart.py --device=H200 --devices=8 [--config.batch_size=32768]

Without --device and --memory_gib, plans for the devices of this machine.
"""

import contextlib

import jax
from absl import flags
from jax.sharding import use_abstract_mesh
from ml_collections import ConfigDict

from experiments import command
from infcl_jax import run
from infcl_jax.console import say
from infcl_jax.distributed import MEMORY_SHARE, data_mesh
from infcl_jax.planner import (
    DEVICES,
    Workload,
    describe_plan,
    device_memory_limit,
    device_named,
    largest_batch,
    plan_memory,
)
from infcl_jax.run.devices import start_devices
from infcl_jax.teacher import load_teacher

_DEVICE = flags.DEFINE_string(
    "device", None, f"Plan for this device: {', '.join(DEVICES)}. JAX takes {MEMORY_SHARE:.0%} of it."
)
_COUNT = flags.DEFINE_integer("devices", None, "Number of devices. Default: those of this machine, or 1 with --device.")
_MEMORY = flags.DEFINE_float(
    "memory_gib", None, "Memory that JAX may use per device, in GiB. Default: that of the device."
)


def plan_from_flags() -> None:
    """Print the plan of `--config`.

    Raises:
      ValueError: `--config` is missing, or a setting or flag is wrong.
    """
    for name, flag in (("devices", _COUNT), ("memory_gib", _MEMORY)):
        if flag.value is not None and not flag.value > 0:
            raise ValueError(f"expected --{name} > 0, got {flag.value}")
    config = command.resolved_config()
    # Under an abstract mesh the plan has the kernels of the named device, not of this machine.
    with contextlib.nullcontext() if _DEVICE.value is None else use_abstract_mesh(device_named(_DEVICE.value).mesh):
        report(*workload_from_flags(config))


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
    say(describe_plan(plan_memory(workload, memory_limit)))
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
