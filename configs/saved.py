"""Configuration of an existing run, read from its work directory.

    python -m experiments.plan --config=configs/saved.py:runs/quickstart

`experiments.evaluate` uses it by default.
"""

from ml_collections import ConfigDict

from infcl_jax import run
from infcl_jax.settings import config_dict


def get_config(workdir: str) -> ConfigDict:
    """Return the settings of a run.

    Args:
      workdir: directory of the run.

    Raises:
      FileNotFoundError, ValueError: see `infcl_jax.run.saved_config`.
    """
    return config_dict(run.saved_config(workdir))
