"""Train a CLIP model, or continue a run from its latest checkpoint.

    python -m experiments.train --config=configs/quickstart.py --workdir=runs/quickstart [--config.batch_size=512]

On several hosts, run the same command on each, see `infcl_jax.distributed.initialize`.
"""

import os
import signal
import sys
from types import FrameType

RESUME = 75  # of infcl_jax.runtime.exit_codes, whose package imports JAX


def leave(number: int, frame: FrameType | None) -> None:
    """Exit after a stop signal that no run handles yet."""
    line = f"asked to stop: no new step to save; the same command continues the run ({signal.Signals(number).name})\n"
    os.write(sys.stderr.fileno(), line.encode())
    os._exit(RESUME)


if __name__ == "__main__":
    # Before the imports below, which take seconds. The run replaces these handlers.
    for stop in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        if signal.getsignal(stop) != signal.SIG_IGN:  # as nohup and background jobs of shells ignore some
            signal.signal(stop, leave)

from experiments import command  # noqa: E402
from infcl_jax.run.train import train_process  # noqa: E402

if __name__ == "__main__":
    command.run(lambda workdir: train_process(command.chosen_config(), workdir), config=command.resolved_config)
