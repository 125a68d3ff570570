"""Checks of every setting, and agreement with the dataclasses of the library."""

import dataclasses
import math
import re
from typing import get_args, get_type_hints

import pytest

from configs import base, digits, fastclip, quickstart
from infcl_jax.data import Augmentation
from infcl_jax.evaluation import EvaluationConfig
from infcl_jax.run.initialize import InitConfig
from infcl_jax.settings import SETTINGS, Range, check_config, type_name
from infcl_jax.training import (
    DistillConfig,
    GlobalContrastiveConfig,
    GradCacheConfig,
    OptimizerConfig,
    TextRetrievalConfig,
    UnlockedGroups,
)

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
    whole = int in (setting.base_type, *get_args(setting.base_type))
    return [int(value) if whole else float(value) for value in (low, *high)]


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
        allowed = setting.values if isinstance(setting.values, Range) else tuple(setting.values)
        values, got = re.escape(str(allowed)), re.escape(repr(value))
        with pytest.raises(ValueError, match=rf"^expected (every entry of )?{name} .*{values}.*, got {got}$"):
            check_config(changed(name, value))


@pytest.mark.parametrize("name", SETTINGS)
def test_bounds_choices_and_defaults_are_allowed(name):
    setting = SETTINGS[name]
    setting.check(setting.default)
    if not isinstance(setting.values, Range | None):
        for choice in setting.values:
            setting.check((choice,) if isinstance(setting.default, tuple) else choice)
    elif setting.values and not setting.values.above:
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
    "distill": DistillConfig,
    "evaluation": EvaluationConfig,
    "global_contrastive": GlobalContrastiveConfig,
    "grad_cache": GradCacheConfig,
    "init": InitConfig,
    "optimizer": OptimizerConfig,
    "text_retrieval": TextRetrievalConfig,
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


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"frozen": ("image", "text")}, "expected a tower to train, got frozen="),
        ({"frozen": ("text", "text")}, "expected each tower once in frozen"),
        ({"ema_warmup": True}, "expected ema_decay with ema_warmup=True"),
        ({"augmentation.scale": (0.9, 0.1)}, "expected augmentation.scale with 0 < low <= high <= 1"),
        ({"optimizer.final_learning_rate": 1.0}, "expected optimizer.final_learning_rate <= optimizer.learning_rate"),
        ({"optimizer.warmup_steps": 1000}, "expected optimizer.warmup_steps < total_steps"),
        ({"optimizer.cooldown_steps": 950}, "expected optimizer.warmup_steps [+] optimizer.cooldown_steps <= total"),
        ({"text_retrieval.corpus": "a.tsv"}, "expected text_retrieval.corpus and text_retrieval.questions together"),
        (
            {"grad_cache.passage_chunk_size": 8, "grad_cache.chunk_size": 8},
            "expected grad_cache.passage_chunk_size=None",
        ),
        ({"text_retrieval.judgments": "a"}, "expected text_retrieval.corpus with text_retrieval.judgments"),
        ({"grad_cache.keep": 1}, "expected grad_cache.chunk_size with keep=1"),
        ({"grad_cache.chunk_size": 512}, "expected grad_cache.chunk_size <= batch_size=256"),
        ({"grad_cache.chunk_size": 64, "grad_cache.keep": 5}, "expected grad_cache.keep <= 4, the chunks of a batch"),
        ({"samples_seen": 10**15}, "expected at most 2147483647 steps, got samples_seen=10{15} with"),
        ({"writers": ("csv", "csv")}, "expected each writer once in writers"),
        ({"profile": (100,)}, r"expected profile=.first step, last step., got .100,"),
        ({"profile": (110, 100)}, r"expected profile=.first step, last step., got .110, 100"),
        ({"total_steps": 10, "epochs": 1}, "expected one of total_steps, samples_seen, epochs"),
    ],
)
def test_contradictory_settings_are_named(values, message):
    config = base.get_config()
    config.update_from_flattened_dict(values)
    with pytest.raises(ValueError, match=f"^{message}"):
        check_config(config)


def test_unlocked_groups_train_frozen_towers():
    config = base.get_config()
    config.update_from_flattened_dict({"frozen": ("image", "text"), "unlocked_groups.text": 1})
    check_config(config)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("optimizer.learning_rate", math.inf),
        ("optimizer.learning_rate", 1e-46),  # 0 in fp32
        ("optimizer.beta2", 1 - 1e-9),  # 1 in fp32
        ("optimizer.clip_norm", 1e39),  # infinite in fp32
        ("total_steps", 2**31),  # beyond the step counter
        ("samples_seen", 10**400),
    ],
)
def test_numbers_that_training_cannot_hold_are_refused(name, value):
    with pytest.raises(ValueError, match=f"^expected {name} "):
        check_config(changed(name, value))
