"""Train a CLIP model, or continue a run from its latest checkpoint.

    python -m experiments.train --config=configs/quickstart.py --workdir=runs/quickstart [--config.batch_size=512]

On several hosts, run the same command on each, see `infcl_jax.distributed.initialize`.
"""

from infcl_jax.runtime import exit_codes

if __name__ == "__main__":
    exit_codes.leave_at_stop()  # before the imports below, which take seconds; the run replaces these handlers

from experiments import command
from infcl_jax.run.train import train_process


def main() -> None:
    """Train the run of `--config` in `--workdir`."""
    workdir = command.given_workdir()
    train_process(command.chosen_config(), workdir)


if __name__ == "__main__":
    command.run(main, config=command.resolved_config)
