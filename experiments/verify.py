"""Verify the gradients of a configuration on the devices of this machine.

Compares one training step with the undivided loss, at small shapes, and names the cause of a difference.

    python -m experiments.verify --config=configs/quickstart.py [--config.implementation=ring] [--output=errors.png]

The step has the loss, the devices, the gradient caching, the frozen towers and the sharding of the configuration, and
random data. With --output the errors are plotted. docs/verification.md explains the table and the causes. The exit
status is 1 if something is wrong.
"""

import sys

from absl import flags

from experiments import command, command_line
from infcl_jax import run
from infcl_jax.run.build import start_devices
from infcl_jax.runtime.console import say

_OUTPUT = command_line.shared_flag("output")
_RTOL = flags.DEFINE_float(
    "rtol", 1e-3, "Largest accepted error of the loss and of each gradient, relative to its norm.", lower_bound=0
)


def verify_from_flags() -> None:
    """Verify the configuration of `--config` and print the report."""
    config = command.chosen_config()
    report = run.verify_run(config, start_devices(config), _RTOL.value)
    say(*str(report).split("\n"))
    if _OUTPUT.value is not None:
        report.plot(_OUTPUT.value)
    if not report.ok:
        sys.exit(1)


if __name__ == "__main__":
    command.run(verify_from_flags)
