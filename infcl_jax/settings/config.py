"""Conversion of a user's settings to a `RunConfig`, and comparison of configurations."""

import contextlib
import dataclasses
import difflib
import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, get_origin

from ml_collections import ConfigDict, FieldReference
from ml_collections.config_dict import placeholder

from infcl_jax.ops.common.checks import check_positive_int
from infcl_jax.schema import as_integer
from infcl_jax.settings.consistency import check_consistency
from infcl_jax.settings.model_overrides import precision_of_overrides
from infcl_jax.settings.run_config import SETTINGS, RunConfig

type AnyConfig = RunConfig | ConfigDict | Mapping[str, Any]  # what `make_config` takes


# Settings of earlier versions, which settings files and runs still may have: new name, and values with a new name.
_RENAMED = {"grad_cache.residency": ("grad_cache.offload", {"device": "none"})}
# Usual names of other libraries and of papers, by setting.
_OTHER_NAMES = {
    "batch_size": "bs batch train_batch_size global_batch_size per_device_train_batch_size",
    "cache_frozen": "cache_features",
    "checkpoint_every": "save_every save_steps save_frequency save_freq checkpoint_freq",
    "dataset": "data train_data train_dataset data_path dataset_path path",
    "ema_decay": "ema model_ema",
    "epochs": "epoch num_epochs max_epochs num_train_epochs",
    "eval_every": "eval_steps eval_freq eval_frequency val_every val_frequency",
    "frozen": "freeze lock lock_image lock_text",
    "grad_cache.chunk_size": "accum_freq accum_steps accumulation_steps grad_accum gradient_accumulation_steps "
    "micro_batch_size",
    "grad_cache.offload": "residency data_offload",
    "init.model": "pretrained init weights checkpoint ckpt",
    "log_every": "log_steps logging_steps log_freq log_every_n_steps",
    "loss": "loss_fn objective",
    "model": "arch architecture backbone model_name",
    "model_overrides": "image_size img_size context_length embed_dim remat grad_checkpointing gradient_checkpointing",
    "num_workers": "workers dataloader_num_workers",
    "optimizer.beta1": "b1 momentum adam_beta1",
    "optimizer.beta2": "b2 adam_beta2",
    "optimizer.clip_norm": "clip grad_clip clip_grad grad_clip_norm gradient_clip max_grad_norm gradient_clip_val",
    "optimizer.eps": "epsilon adam_eps adam_epsilon",
    "optimizer.final_learning_rate": "min_lr lr_min end_lr final_lr",
    "optimizer.learning_rate": "lr base_lr peak_lr max_lr",
    "optimizer.name": "optimizer opt optim",
    "optimizer.schedule": "scheduler lr_scheduler lr_schedule",
    "optimizer.temperature_learning_rate": "temperature_lr logit_scale_lr",
    "optimizer.warmup_steps": "warmup num_warmup_steps lr_warmup",
    "optimizer.weight_decay": "wd decay",
    "precision": "dtype amp bf16 fp16 mixed_precision",
    "resume": "resume_from resume_from_checkpoint",
    "samples_seen": "samples num_samples train_num_samples",
    "seed": "random_seed rng",
    "total_steps": "steps max_steps num_steps train_steps iterations num_iterations",
    "writers": "wandb tensorboard report_to logger loggers",
}
_MEANT = {other: name for name, others in _OTHER_NAMES.items() for other in others.split()}


class SettingsDict(ConfigDict):
    """Settings, or a group of them, that suggests names and takes integers such as 12.8e9."""

    def __setitem__(self, key: str, value: Any) -> None:
        """Set a value; KeyError if the configuration is locked and has no such setting, TypeError for another type."""
        if key in self:
            kind = self.get_type(key)
            if kind is int:
                value = as_integer(value)
            elif kind is tuple and value == (None,):  # None on the command line
                value = None
        elif self.is_locked and (close := closest_setting(key)):
            raise KeyError(f"no such setting: {key}; did you mean {close}?")
        super().__setitem__(key, value)


def default_config() -> ConfigDict:
    """Return the defaults, locked, for a configuration file such as `configs/digits.py` to change.

    Each group of names, such as "optimizer.", is a nested `ConfigDict`.

    Examples:
      >>> default_config().optimizer.name
      'adamw'
    """
    return config_dict(RunConfig())


def config_dict(config: RunConfig) -> ConfigDict:
    """Return settings that can be changed, for configuration files and `--config.NAME=VALUE`."""
    values = SettingsDict()
    for name, setting in SETTINGS.items():
        group, _, field = name.rpartition(".")
        if group and group not in values:
            values[group] = SettingsDict()
        owner, value = values[group] if group else values, config[name]
        kind = tuple if get_origin(setting.base_type) else setting.base_type  # a generic type is no field type
        if setting.optional:
            owner[field] = placeholder(kind)
        if value is not None:
            owner[field] = value
    return values.lock()


def with_changes(config: RunConfig | ConfigDict, changes: AnyConfig) -> RunConfig:
    """Return a copy of a configuration with changed settings.

    Settings that limit each other are checked within their group only, see `check_config`.

    Examples:
      >>> config = with_changes(make_config({}), {"optimizer.name": "lamb"})
      >>> config.optimizer.name
      'lamb'

    Args:
      config: settings of a run.
      changes: values by name. A setting of a group has a dotted name, `{"optimizer.name": "lamb"}`, or is in a nested
        mapping, `{"optimizer": {"name": "lamb"}}`.

    Raises:
      ValueError: a name is unknown, or a value has another type or is out of range.
    """
    if isinstance(config, ConfigDict):
        return with_changes(RunConfig(), _dotted(config) | _dotted(changes))
    changed: dict[str, dict[str, Any]] = {}
    for name, value in _dotted(changes).items():
        if name not in SETTINGS:
            close = closest_setting(str(name))
            advice = f"did you mean {close!r}?" if close else "docs/settings.md lists them"
            raise ValueError(f"expected names of settings, got {name!r}; {advice}")
        group, _, field = name.rpartition(".")
        changed.setdefault(group, {})[field] = value
    own = changed.pop("", {})
    return dataclasses.replace(config, **own, **{g: dataclasses.replace(config[g], **v) for g, v in changed.items()})


def make_config(changes: AnyConfig) -> RunConfig:
    """Return the settings of a run: the defaults with changed settings, checked alone and together.

    Args:
      changes: values by name, see `with_changes`. A `ConfigDict` has the values of its references, and the defaults of
        settings that it lacks. A `RunConfig` is returned as it is.

    Raises:
      ValueError: `changes` is no mapping, a name is unknown, or see `check_config`.

    Examples:
      >>> config = make_config({"dataset": "photos", "optimizer": {"learning_rate": 1e-4}})
      >>> config.optimizer.learning_rate
      0.0001
    """
    if isinstance(changes, RunConfig):
        return changes
    if not isinstance(changes, ConfigDict | Mapping):
        raise ValueError(f"expected settings as a mapping or ConfigDict, got {changes!r}; call get_config() of a file")
    config = with_changes(RunConfig(), changes)
    check_consistency(config)
    return config


def _dotted(config: AnyConfig) -> dict[str, Any]:
    """Return values by dotted name, also of references and of renamed settings."""
    flat: dict[str, Any] = {}
    for name, value in (config if isinstance(config, Mapping) else config.to_dict()).items():
        flat |= {f"{name}.{k}": v for k, v in value.items()} if isinstance(value, Mapping) else {name: value}
    for old in _RENAMED.keys() & flat.keys():
        (name, values), value = _RENAMED[old], flat.pop(old)
        flat[name] = values.get(value, value)
    return flat


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

    Examples:
      >>> config = default_config()
      >>> config.batch_size = 4096
      >>> config.optimizer.learning_rate = scaled_learning_rate(config, 5e-4, 32_768)
      >>> config.optimizer.learning_rate
      6.25e-05

    Source: Goyal et al. 2017; the example has the values of DisCo-CLIP (Chen et al. 2023, section 5.1).
    """
    check_positive_int("base_batch_size", base_batch_size)
    return config.get_ref("batch_size").to_float() * (learning_rate / base_batch_size)


def check_config(config: RunConfig | ConfigDict) -> None:
    """Check the values of the settings, alone and together.

    Examples:
      >>> config = default_config()
      >>> config.batch_size = 100
      >>> check_config(config)

    Raises:
      ValueError: a value has another type, is out of range or not among the choices, or contradicts another one.
    """
    check_consistency(config if isinstance(config, RunConfig) else with_changes(config, {}))


def flattened(config: AnyConfig) -> dict[str, Any]:
    """Return values by dotted name, such as `{"optimizer.name": "adamw"}`.

    A round trip through JSON turns tuples into lists, so that a new configuration compares with a saved one.

    Args:
      config: settings of a run, or the content of its `config.json`.

    Examples:
      >>> flattened(make_config({}))["optimizer.name"]
      'adamw'
    """
    return _dotted(config if isinstance(config, Mapping) else json.loads(json.dumps(config.to_dict())))


def changed_settings(old: RunConfig | ConfigDict, new: RunConfig | ConfigDict) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ as (old, new), such as `{"batch_size": (256, 512)}`.

    Examples:
      >>> changed_settings(make_config({}), make_config({"seed": 7}))
      {'seed': (0, 7)}
    """
    after = flattened(new)
    return {name: (value, after[name]) for name, value in sorted(flattened(old).items()) if value != after[name]}


def keep_recorded(old: RunConfig, new: RunConfig) -> RunConfig:
    """Return the new settings of a resumed run, with old values in place of defaults that are chosen at its start."""
    chosen = (name for name, setting in SETTINGS.items() if setting.resolved_once and new[name] == setting.default)
    changes = {name: old[name] for name in chosen}
    return with_changes(new, changes | (precision_of_overrides(new.model_overrides) if "precision" in changes else {}))


def check_fixed(
    changed: Mapping[str, tuple[Any, Any]], names: Collection[str], workdir: str | Path, advice: str
) -> None:
    """Check that the named settings have not changed since the run in `workdir`; `advice` says what to do."""
    for name in names:
        if name in changed:
            old, new = changed[name]
            raise ValueError(
                f"expected {name}={old!r}, with which the run in {workdir} was trained, got {new!r}; {advice}"
            )


@contextlib.contextmanager
def name_changes(changed: Mapping[str, tuple[Any, Any]]) -> Iterator[None]:
    """Name the changed settings that explain why arrays of a checkpoint do not fit in a `ValueError` of the body."""
    try:
        yield
    except ValueError as error:
        shapes = {name: values for name, values in changed.items() if SETTINGS[name].shapes}
        if not shapes:
            raise
        raise ValueError(f"{error}; changed since then: {', '.join(format_changes(shapes))}") from error


def format_changes(changed: Mapping[str, tuple[Any, Any]]) -> list[str]:
    """Format each change as a line such as "batch_size: 256 -> 512".

    Examples:
      >>> format_changes({"batch_size": (256, 512)})
      ['batch_size: 256 -> 512']
    """
    return [f"{name}: {old!r} -> {new!r}" for name, (old, new) in changed.items()]


def closest_setting(name: str) -> str | None:
    """Return the setting that an unknown name, dotted or of a field, probably means; None without one.

    Examples:
      >>> closest_setting("optimizer.lr"), closest_setting("warmup_step")
      ('optimizer.learning_rate', 'optimizer.warmup_steps')
    """
    field = name.rpartition(".")[2].lower().replace("-", "_")
    fields: dict[str, str] = {}
    for setting in SETTINGS:
        fields.setdefault(setting.rpartition(".")[2], setting)
    if close := difflib.get_close_matches(name, SETTINGS, 1, cutoff=0.85):
        return close[0]
    if field in _MEANT or field in fields:
        return _MEANT.get(field) or fields[field]
    if close := difflib.get_close_matches(field, [*fields, *_MEANT], 1, cutoff=0.75):
        return fields.get(close[0]) or _MEANT[close[0]]
    return next(iter(difflib.get_close_matches(name, SETTINGS, 1)), None)
