"""Configuration of an existing run, read from its work directory.

    python -m experiments.plan --config=configs/saved.py:runs/quickstart

`experiments.evaluate` starts from it by default.
"""

from ml_collections import ConfigDict

from configs import base
from infcl_jax.training import load_config


def get_config(workdir: str) -> ConfigDict:
    """Return the defaults of `configs/base.py`, updated with `config.json`.

    Args:
      workdir: directory of the run.

    Raises:
      FileNotFoundError: no run in `workdir`.
      ValueError: `config.json` is not JSON, or a setting has another type than in `configs/base.py`.
    """
    config = base.get_config()
    try:
        with config.unlocked():  # runs of other versions have other settings
            config.update(load_config(workdir))
    except (AttributeError, TypeError) as error:
        raise ValueError(f"expected a run of this version in {workdir}, got another configuration: {error}") from error
    return config
