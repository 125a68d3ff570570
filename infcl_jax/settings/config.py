"""Defaults, checks and comparison of configurations."""

import contextlib
import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict, FieldReference
from ml_collections.config_dict import placeholder

from infcl_jax.checks import check_positive_int
from infcl_jax.settings.consistency import check_consistency
from infcl_jax.settings.setting import Setting
from infcl_jax.settings.table import SETTINGS


def default_config() -> ConfigDict:
    """Return the defaults of the table, locked.

    Each group of names, such as "optimizer.", is a nested `ConfigDict`.
    """
    config = ConfigDict()
    for setting in SETTINGS.values():
        group, _, field = setting.name.rpartition(".")
        if group and group not in config:
            config[group] = ConfigDict()
        owner = config[group] if group else config
        owner[field] = placeholder(setting.base_type) if setting.default is None else setting.default
    return config.lock()


def scaled_learning_rate(config: ConfigDict, learning_rate: float, base_batch_size: int) -> FieldReference:
    """Scale a learning rate linearly with `config.batch_size`.

    The result follows the batch size, also when the command line changes it.

    Args:
      config: settings of a run.
      learning_rate: learning rate at `base_batch_size`.
      base_batch_size: batch size for which `learning_rate` was chosen, in pairs.

    Returns:
      Lazy value of `learning_rate * batch_size / base_batch_size`, for `config.optimizer.learning_rate`.

    Raises:
      ValueError: `base_batch_size` is not positive.

    Example:
      config.optimizer.learning_rate = scaled_learning_rate(config, 5e-4, 32_768)

    Source: Goyal et al. 2017; the example has the values of DisCo-CLIP (Chen et al. 2023, section 5.1).
    """
    check_positive_int("base_batch_size", base_batch_size)
    return config.get_ref("batch_size").to_float() * (learning_rate / base_batch_size)


def setting_values(config: ConfigDict) -> Iterator[tuple[Setting, Any]]:
    """Iterate over the settings of the table with their values in `config`."""
    for name, setting in SETTINGS.items():
        group, _, field = name.rpartition(".")
        yield setting, (config[group] if group else config)[field]


def check_config(config: ConfigDict) -> None:
    """Check the values of the settings, alone and together.

    Raises:
      ValueError: a value has another type, is out of range or not among the choices, or contradicts another one.
    """
    for setting, value in setting_values(config):
        setting.check(value)
    check_consistency(config)


def flattened(config: ConfigDict) -> dict[str, Any]:
    """Return values by dotted name, such as `{"optimizer.name": "adamw"}`.

    A round trip through JSON turns tuples into lists, so that a new configuration compares with a saved one.
    """
    flat: dict[str, Any] = {}
    for name, value in json.loads(json.dumps(config.to_dict())).items():
        flat |= {f"{name}.{k}": v for k, v in value.items()} if isinstance(value, dict) else {name: value}
    return flat


def changed_settings(old: ConfigDict, new: ConfigDict) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ as (old, new), such as `{"batch_size": (256, 512)}`."""
    after = flattened(new)
    return {name: (value, after[name]) for name, value in flattened(old).items() if value != after[name]}


def check_fixed(
    changed: Mapping[str, tuple[Any, Any]], names: Collection[str], workdir: str | Path, advice: str
) -> None:
    """Check that fixed settings have not changed.

    Args:
      changed: changed settings, from `changed_settings`.
      names: settings that must not change.
      workdir: directory of the run, for the error message.
      advice: what to do, the last clause of the error message.

    Raises:
      ValueError: a setting in `names` has changed.
    """
    for name in names:
        if name in changed:
            old, new = changed[name]
            raise ValueError(
                f"expected {name}={old!r}, with which the run in {workdir} was trained, got {new!r}; {advice}"
            )


@contextlib.contextmanager
def name_changes(changed: Mapping[str, tuple[Any, Any]]) -> Iterator[None]:
    """Name the changed settings in a `ValueError` of the body.

    The body restores a checkpoint. Changes of settings with `Setting.shapes` explain why its arrays do not fit.

    Args:
      changed: changed settings, from `changed_settings`.

    Raises:
      ValueError: the error of the body, extended by the changed settings.
    """
    try:
        yield
    except ValueError as error:
        shapes = {name: values for name, values in changed.items() if SETTINGS[name].shapes}
        if not shapes:
            raise
        raise ValueError(f"{error}; changed since then: {', '.join(format_changes(shapes))}") from error


def format_changes(changed: Mapping[str, tuple[Any, Any]]) -> list[str]:
    """Format each change as a line such as "batch_size: 256 -> 512"."""
    return [f"{name}: {old!r} -> {new!r}" for name, (old, new) in changed.items()]
