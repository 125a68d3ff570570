"""Train a CLIP model, or continue a run from its latest checkpoint.

    python -m experiments.train --config=configs/quickstart.py --workdir=runs/quickstart [--config.batch_size=512]

On several hosts, run the same command on each, see `infcl_jax.distributed.initialize`.
"""

from infcl_jax.runtime import signals

if __name__ == "__main__":
    signals.leave_at_stop()  # before the imports below, which take seconds; the run replaces these handlers

from experiments import command
from infcl_jax.run.train import train_process

if __name__ == "__main__":
    command.run(lambda workdir: train_process(command.chosen_config(), workdir), config=command.resolved_config)
