"""Every setting: type, range, None, errors and ways to write it; settings that limit each other."""

import json
import math
import re
from collections.abc import Sequence
from typing import get_args, get_origin

import pytest
from absl import flags
from ml_collections import config_flags

import experiments.command  # noqa: F401  (registers the parsers of settings)
from configs import base, digits, fastclip, quickstart
from infcl_jax import run
from infcl_jax.settings import (
    SETTINGS,
    Range,
    RunConfig,
    changed_settings,
    check_config,
    config_dict,
    format_python,
    make_config,
    type_name,
    with_changes,
)

SAMPLES = {int: 3, float: 0.25, str: "some", bool: True}


def entries(setting, value):
    """A value of the setting whose entries are all `value`, if it is a tuple."""
    if get_origin(setting.base_type) is None:
        return value
    return (value,) * max(1, len(setting.default or ()))


def kind(setting):
    """Type of the value, or of its entries."""
    inner = get_args(setting.base_type)[:1]
    return inner[0] if inner and get_origin(setting.base_type) in (tuple, Sequence) else setting.base_type


def other(setting):
    """An allowed value that is not the default."""
    if get_origin(kind(setting)) is tuple:  # rules
        return ((".*", SAMPLES[get_args(kind(setting))[1]]),)
    if setting.values is None:
        value = SAMPLES[kind(setting)]
    elif isinstance(setting.values, Range):
        low, high = setting.values.low, min(setting.values.high, max(1000, setting.values.low + 1))
        value = int(low) + 1 if kind(setting) is int else low + (high - low) / 4
    else:
        value = next(choice for choice in setting.values if choice not in (setting.default, *(setting.default or ())))
    if kind(setting) is bool:
        value = not setting.default
    value = entries(setting, value)
    return value if value != setting.default else entries(setting, value + 1)


def outside(setting):
    """Values of the right type beyond each bound of the range, or no choice."""
    allowed = setting.values
    if allowed is None:
        return []
    if not isinstance(allowed, Range):
        return [entries(setting, "nonsense")]
    low = allowed.low if allowed.above else allowed.low - 1
    high = [] if allowed.high == math.inf else [allowed.high if allowed.below else allowed.high + 1]
    return [entries(setting, kind(setting)(value)) for value in (low, *high)]


# Every setting at another value than its default.
CHANGED = {name: other(setting) for name, setting in SETTINGS.items()}
CHANGED |= {"augmentation.color_jitter": (0.25,) * 4, "model_overrides": "text.layers=6"}


def test_a_wrong_value_is_named_with_what_is_allowed():
    for name, setting in SETTINGS.items():
        suffix = " or None" if setting.optional else ""
        noun = re.escape(type_name(setting.base_type))
        for value in (1j, math.nan, *([] if setting.optional else [None])):
            with pytest.raises(ValueError, match=rf"^expected {name} to be {noun}{suffix}, got {value}$"):
                with_changes(RunConfig(), {name: value})
        for value in outside(setting):
            allowed = setting.values if isinstance(setting.values, Range) else tuple(setting.values)
            message = rf"^expected (every entry of )?{name} .*{re.escape(str(allowed))}{suffix}, got "
            with pytest.raises(ValueError, match=message + re.escape(repr(value))):
                with_changes(RunConfig(), {name: value})


def test_bounds_choices_and_defaults_are_allowed():
    for setting in SETTINGS.values():
        allowed = [setting.default, *([None] if setting.optional else [])]
        if isinstance(setting.values, Range):
            bounds = (setting.values.low, setting.values.above), (setting.values.high, setting.values.below)
            allowed += [entries(setting, bound) for bound, excluded in bounds if not excluded and bound < math.inf]
        elif setting.values is not None:
            allowed += [entries(setting, choice) for choice in setting.values]
        for value in allowed:
            assert setting.check(value) == value, setting.name


def from_flags(config):
    """The configuration of a command line."""
    values, argv = flags.FlagValues(), ["program", *(f"--config.{name}={config[name]}" for name in SETTINGS)]
    given = config_flags.DEFINE_config_dict("config", base.get_config(), flag_values=values, sys_argv=argv)
    values(argv)
    return with_changes(given.value, {})


def from_config_json(config, folder):
    """The configuration of a work directory."""
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    return run.saved_config(folder)


def from_python(config):
    """The configuration of a file as `--print_config` prints it."""
    names = {}
    exec(format_python(config), names)
    return with_changes(names["get_config"](), {})


@pytest.mark.parametrize("changes", [{}, CHANGED], ids=["defaults", "changed"])
def test_settings_are_the_same_in_every_form(changes, tmp_path):
    config = with_changes(RunConfig(), changes)
    assert len(changed_settings(RunConfig(), config)) == len(changes)
    assert with_changes(config_dict(config), {}) == config
    assert with_changes(RunConfig(), config.to_dict()) == config
    assert from_config_json(config, tmp_path) == config
    assert from_python(config) == config
    assert from_flags(config) == config


def test_a_branch_is_the_configuration_of_the_library():
    config = with_changes(RunConfig(), CHANGED)
    for name in SETTINGS:
        section, _, field = name.rpartition(".")
        owner = getattr(config, section) if section else config
        assert getattr(owner, field) == config[name] == CHANGED[name]
        with pytest.raises(AttributeError):
            setattr(owner, field, CHANGED[name])


@pytest.mark.parametrize(
    "config",
    [base.get_config(), digits.get_config(), quickstart.get_config(), *map(fastclip.get_config, fastclip._SIZES)],
)
def test_the_recipes_are_valid(config):
    make_config(config)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"frozen": ("image", "text")}, "expected a tower to train, got frozen="),
        ({"frozen": ("text", "text")}, "expected each tower once in frozen"),
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
        with_changes(RunConfig(), {name: value})
