"""Plan the memory and the time of a run without running it.

Prints the memory of each component, the recommended gradient caching and the largest batch that fits. With --device it
also prints the estimated time of a step.

    python -m experiments.plan --config=configs/quickstart.py --device=H200 --devices=8 [--config.batch_size=32768]

--target=1024 prints a table of the same run on 1, 2, 4, ... 1,024 GPUs:

    python -m experiments.plan --config=configs/openclip.py --device=A100-40 --target=1024

Without --device and --memory_gib, plans for the devices of this machine.
"""

from absl import flags

from experiments import command
from infcl_jax.planner import DEVICES
from infcl_jax.run.plan import plan
from infcl_jax.runtime.console import say
from infcl_jax.runtime.distributed import MEMORY_SHARE

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


def main() -> None:
    """Print the plan of `--config`."""
    text = plan(
        command.chosen_config(),
        device=_DEVICE.value,
        devices=_COUNT.value,
        memory_gib=_MEMORY.value,
        target=_TARGET.value,
    )
    say(*text.split("\n"))


if __name__ == "__main__":
    command.run(main, config=command.resolved_config)
