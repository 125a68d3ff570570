"""Default settings of a run.

The other configurations start from these. `docs/settings.md` and `python -m experiments.train --help` list every
setting with its meaning.

For example:

    python -m experiments.train --config=configs/quickstart.py --workdir=runs/quickstart --config.batch_size=512
"""

from ml_collections import ConfigDict

from infcl_jax.settings import default_config


def get_config() -> ConfigDict:
    """Return the default settings of `infcl_jax.settings`.

    The configuration is locked: an unknown setting is an error.
    """
    return default_config()
