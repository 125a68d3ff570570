"""Plan the memory of a run without running it.

Prints the memory of each component, and the largest batch and chunk that fit.

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
from infcl_jax.distributed import MEMORY_SHARE
from infcl_jax.planner import (
    DEVICES,
    Workload,
    best_chunk_size,
    device_named,
    format_plan,
    largest_batch,
    memory_at_hand,
    most_kept,
    plan_memory,
)

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
    config = command.chosen_config()
    with contextlib.nullcontext() if _DEVICE.value is None else use_abstract_mesh(device_named(_DEVICE.value).mesh):
        report(*planned(config))


def planned(config: ConfigDict) -> tuple[Workload, int | None]:
    """Return the workload and the memory of one device.

    Args:
      config: settings of the run.

    Returns:
      The workload, and the bytes that JAX may use per device, or None if unknown.

    Raises:
      ValueError: a setting or flag is wrong.
    """
    memory, implementation = None if _MEMORY.value is None else int(_MEMORY.value * 2**30), None
    if _DEVICE.value is not None:
        device, count = device_named(_DEVICE.value), _COUNT.value or 1
        memory, implementation = memory or device.usable, device.implementation
    else:
        count = _COUNT.value or command.start_devices(config).size
        memory = memory or memory_at_hand()
    source = run.sample_source(config)
    config = run.with_most_kept(config, count, memory, implementation, source)
    return run.workload(config, count, implementation, source), memory


def report(workload: Workload, memory: int | None) -> None:
    """Print the memory table and the largest settings that fit.

    Without known memory it prints only the table.

    Args:
      workload: memory-relevant settings of the run.
      memory: bytes that JAX may use per device, or None if unknown.
    """
    plan = plan_memory(workload, memory)
    command.say(format_plan(plan))
    if memory is None:
        device = jax.devices()[0].device_kind
        command.say(f"largest batch and chunk: give --device or --memory_gib, since {device} does not tell its memory")
        return
    command.say("fits" if plan.fits else "does not fit")
    searches = {"largest batch_size": largest_batch, "best grad_cache.chunk_size": best_chunk_size}
    if workload.chunk_size is not None:
        searches["most grad_cache.keep"] = most_kept
    for name, search in searches.items():
        try:
            command.say(f"{name}: {search(workload, memory)}")
        except ValueError as error:
            command.say(f"{name}: none, {error}")


if __name__ == "__main__":
    command.run_without_workdir(plan_from_flags)
