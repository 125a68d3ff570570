"""Configuration of an existing run, read from its work directory.

    python -m experiments.plan --config=configs/saved.py:runs/quickstart

`experiments.evaluate` uses it by default.
"""

from ml_collections import ConfigDict

from configs import base
from infcl_jax.settings import SETTINGS, flattened
from infcl_jax.training import load_config


def get_config(workdir: str) -> ConfigDict:
    """Return the defaults of `configs/base.py`, updated with `config.json`.

    Args:
      workdir: directory of the run.

    Raises:
      FileNotFoundError: no run in `workdir`.
      ValueError: `config.json` is not JSON, or a setting is unknown or has the wrong type.
    """
    config, values = base.get_config(), flattened(ConfigDict(load_config(workdir)))
    for name in values:
        if name not in SETTINGS:
            raise ValueError(f"expected a run of this version in {workdir}, got one with the setting {name}")
    try:
        config.update_from_flattened_dict(values)
    except TypeError as error:
        raise ValueError(f"expected a run of this version in {workdir}, got another configuration: {error}") from error
    return config
