"""Checks of every setting, and agreement with the dataclasses of the library."""

import dataclasses
import re
from typing import get_type_hints

import pytest

from configs import base, digits, fastclip, quickstart
from infcl_jax.data import Augmentation
from infcl_jax.evaluation import EvaluationConfig
from infcl_jax.initialization import InitConfig
from infcl_jax.settings import SETTINGS, Range, check_config, type_name
from infcl_jax.training import GlobalContrastiveConfig, GradCacheConfig, OptimizerConfig, UnlockedGroups

RANGES = [name for name, setting in SETTINGS.items() if setting.values is not None]
REQUIRED = [name for name, setting in SETTINGS.items() if not setting.optional]


def changed(name, value):
    config = base.get_config()
    with config.ignore_type():
        config.update_from_flattened_dict({name: value})
    return config


def outside(setting):
    """Values beyond each bound of the range, or no choice."""
    allowed = setting.values
    if not isinstance(allowed, Range):
        return ["nonsense"]
    low = allowed.low if allowed.above else allowed.low - 1
    high = [] if allowed.high == float("inf") else [allowed.high if allowed.below else allowed.high + 1]
    return [int(value) if setting.base_type is int else float(value) for value in (low, *high)]


@pytest.mark.parametrize("name", SETTINGS)
def test_a_value_of_another_type_is_named(name):
    noun, suffix = type_name(SETTINGS[name].base_type), " or None" if SETTINGS[name].optional else ""
    with pytest.raises(ValueError, match=rf"^expected {name} to be {re.escape(noun)}{suffix}, got 1j$"):
        check_config(changed(name, 1j))


@pytest.mark.parametrize("name", RANGES)
def test_a_value_out_of_range_is_named_with_the_range(name):
    setting = SETTINGS[name]
    several = isinstance(setting.default, tuple)
    for value in outside(setting):
        value = (value,) * max(len(setting.default), 1) if several else value
        values, got = re.escape(str(setting.values)), re.escape(repr(value))
        with pytest.raises(ValueError, match=rf"^expected (every entry of )?{name} .*{values}.*, got {got}$"):
            check_config(changed(name, value))


@pytest.mark.parametrize("name", SETTINGS)
def test_bounds_choices_and_defaults_are_allowed(name):
    setting = SETTINGS[name]
    setting.check(setting.default)
    if isinstance(setting.values, tuple):
        for choice in setting.values:
            setting.check((choice,) if isinstance(setting.default, tuple) else choice)
    elif setting.values is not None and not setting.values.above:
        low = setting.values.low
        setting.check((low,) * len(setting.default) if isinstance(setting.default, tuple) else low)


@pytest.mark.parametrize("name", REQUIRED)
def test_none_is_no_value_of_required_settings(name):
    with pytest.raises(ValueError, match=f"^expected {name} to be .*, got None$"):
        SETTINGS[name].check(None)


@pytest.mark.parametrize(
    "config",
    [base.get_config(), digits.get_config(), quickstart.get_config(), *map(fastclip.get_config, fastclip._SIZES)],
)
def test_the_recipes_are_valid(config):
    check_config(config)


GROUPS = {
    "augmentation": Augmentation,
    "evaluation": EvaluationConfig,
    "global_contrastive": GlobalContrastiveConfig,
    "grad_cache": GradCacheConfig,
    "init": InitConfig,
    "optimizer": OptimizerConfig,
    "unlocked_groups": UnlockedGroups,
}
NO_SETTING = {"augmentation.ratio"}
OTHER_DEFAULT = {"optimizer.warmup_steps"}  # the library's own default is no warm-up


@pytest.mark.parametrize("group", GROUPS)
def test_settings_agree_with_the_dataclass_they_are_passed_to(group):
    fields = {f"{group}.{field.name}": field for field in dataclasses.fields(GROUPS[group])}
    hints = {f"{group}.{name}": hint for name, hint in get_type_hints(GROUPS[group]).items()}
    names = {name for name in SETTINGS if name.startswith(f"{group}.")}
    assert names == fields.keys() - NO_SETTING
    for name in names:
        assert SETTINGS[name].type == hints[name], name
        assert SETTINGS[name].default == fields[name].default or name in OTHER_DEFAULT, name


def test_every_group_has_a_dataclass():
    assert {name.partition(".")[0] for name in SETTINGS if "." in name} == GROUPS.keys()
