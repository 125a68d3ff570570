"""Length of a run in steps, samples or epochs."""

import dataclasses
from collections.abc import Sized

from infcl_jax.settings.run_config import RunConfig

_LENGTHS = ("total_steps", "samples_seen", "epochs")
_DEFAULT_STEPS = 1000  # without any of them
_MOST_STEPS = 2**31 - 1  # the step is an int32


def total_steps(config: RunConfig, source: Sized | None = None) -> int:
    """Count the training steps of a run.

    `samples_seen` gives `samples_seen // batch_size` steps. Each of the `epochs` has `samples // batch_size` steps, in
    which every sample is seen at most once.

    Examples:
      >>> config = make_config({"samples_seen": 1_000_000, "batch_size": 1000})
      >>> total_steps(config)
      1000

    Args:
      config: settings of the run.
      source: training data; None is enough without `epochs`.

    Raises:
      ValueError: more than one of `total_steps`, `samples_seen` and `epochs` is given, or they give no step.
    """
    given = {name: config[name] for name in _LENGTHS if config[name] is not None}
    values = " and ".join(f"{name}={value}" for name, value in given.items())
    if len(given) > 1:
        raise ValueError(f"expected one of {', '.join(_LENGTHS)}, got {values}; set all but one to None")
    if config.epochs is not None:
        if source is None:
            raise ValueError(f"expected a source with {values}, got None; pass training_source(config)")
        steps = config.epochs * (len(source) // config.batch_size)
    elif config.samples_seen is not None:
        steps = config.samples_seen // config.batch_size
    else:
        steps = config.total_steps or _DEFAULT_STEPS
    if not steps:
        raise ValueError(f"expected samples for a batch of {config.batch_size}, got {values}; use a smaller batch_size")
    if steps > _MOST_STEPS:
        raise ValueError(f"expected at most {_MOST_STEPS} steps, got {values} with a batch of {config.batch_size}")
    return steps


def with_total_steps(config: RunConfig, source: Sized | None = None) -> RunConfig:
    """Return a copy of the configuration whose only length is `total_steps`.

    Args:
      config: settings of the run.
      source: training data; None is enough without `epochs`.

    Raises:
      ValueError: see `total_steps`.
    """
    lengths = dict.fromkeys(_LENGTHS) | {"total_steps": total_steps(config, source)}
    return dataclasses.replace(config, **lengths)
