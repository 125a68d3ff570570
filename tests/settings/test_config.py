"""Configurations from changed settings."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import runs

from configs import quickstart
from infcl_jax import run
from infcl_jax.settings import (
    SETTINGS,
    closest_setting,
    default_config,
    flattened,
    keep_recorded,
    make_config,
    scaled_learning_rate,
    with_changes,
)
from infcl_jax.settings.config import _OTHER_NAMES
from infcl_jax.training import save_config

CHANGES = {"batch_size": 64, "optimizer": {"learning_rate": 1, "name": "lamb"}, "augmentation.scale": [0.5, 1.0]}


def test_changes_are_nested_or_dotted_and_leave_the_defaults():
    config, expected = make_config(CHANGES), flattened(default_config())
    expected |= {"batch_size": 64, "optimizer.learning_rate": 1.0, "optimizer.name": "lamb"}
    assert flattened(config) == expected | {"augmentation.scale": [0.5, 1.0]}
    assert type(config.optimizer.learning_rate) is float


def test_a_configuration_keeps_its_values_and_may_lack_settings():
    config = quickstart.get_config()
    config.optimizer.learning_rate = scaled_learning_rate(config, 1e-3, 128)
    made = make_config(config)
    assert made.optimizer.learning_rate == 2e-3 and flattened(made) == flattened(config)
    with config.unlocked():
        del config.evaluation, config.seed
    assert make_config(config).seed == default_config().seed


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ("configs/base.py", r"a mapping or ConfigDict, got 'configs/base.py'; call get_config\(\) of a file"),
        ({"batchsize": 3}, "names of settings, got 'batchsize'; did you mean 'batch_size'?"),
        ({"optimizer": {"learning_rat": 3}}, "'optimizer.learning_rat'; did you mean 'optimizer.learning_rate'"),
        ({"optimizer": 3}, "names of settings, got 'optimizer'; did you mean 'optimizer.name'"),
        ({"optimizer": {"lr": 1e-3}}, "got 'optimizer.lr'; did you mean 'optimizer.learning_rate'"),
        ({"learning_rate": 1e-3}, "got 'learning_rate'; did you mean 'optimizer.learning_rate'"),
        ({"optimizer.batch-size": 3}, "got 'optimizer.batch-size'; did you mean 'batch_size'"),
        ({"evaluation": {"zero_shot_dataste": 3}}, "did you mean 'evaluation.zero_shot_dataset'"),
        ({"wd": 0.1}, "did you mean 'optimizer.weight_decay'"),
        ({"warmup_step": 1}, "did you mean 'optimizer.warmup_steps'"),
        ({"total_steps": 1.5}, "total_steps to be an integer or None, got 1.5"),
        ({"samples_seen": float("inf")}, "samples_seen to be an integer or None, got inf"),
        ({"max_bad_records": 1.5}, "max_bad_records below 1, or a whole number, got 1.5"),
        ({"zzz": 3}, "got 'zzz'; docs/settings.md lists them"),
        ({"batch_size": "many"}, "batch_size to be an integer, got 'many'"),
        ({"batch_size": None}, "batch_size to be an integer, got None"),
        ({"samples_seen": 10, "epochs": 1, "cpu_devices": 0}, "cpu_devices"),
        ({"ema_warmup": True}, "ema_decay with ema_warmup=True, got None"),
        (runs.config(loss="clop"), "loss to be one of .* got 'clop'"),
    ],
)
def test_wrong_changes_are_refused_in_one_line(changes, message):
    with pytest.raises(ValueError, match=rf"^expected [^\n]*{message}[^\n]*$"):
        make_config(changes)


def test_whole_floats_are_integers():
    made = make_config({"samples_seen": 12.8e9, "batch_size": 1e4, "grad_cache": {"chunk_size": 1e2}})
    config = default_config()
    config.samples_seen, config.batch_size, config.grad_cache.chunk_size = 12.8e9, 1e4, 1e2
    for each in (made, config):
        values = each.samples_seen, each.batch_size, each.grad_cache.chunk_size
        assert values == (12_800_000_000, 10_000, 100) and {type(value) for value in values} == {int}
    with pytest.raises(TypeError):
        config.batch_size = 1.5


def test_values_take_the_type_of_their_setting():
    changes = {"batch_size": np.int64(3), "data_dir": Path("a/b"), "augmentation.scale": [np.float32(0.5), 1]}
    config = make_config(changes | {"optimizer.learning_rate": 1})
    values = config.batch_size, config.data_dir, config.augmentation.scale, config.optimizer.learning_rate
    assert values == (3, "a/b", (0.5, 1), 1.0)
    assert [type(value) for value in values] == [int, str, tuple, float]
    with pytest.raises(ValueError, match=r"^expected batch_size to be an integer, got True$"):
        dataclasses.replace(config, batch_size=True)


def test_a_wrong_name_in_a_configuration_has_a_suggestion():
    with pytest.raises(AttributeError, match=r"no such setting: lr; did you mean optimizer\.learning_rate"):
        default_config().optimizer.lr = 1e-3


def test_other_names_mean_settings():
    assert _OTHER_NAMES.keys() <= SETTINGS.keys()
    assert not {name for names in _OTHER_NAMES.values() for name in names.split()} & SETTINGS.keys()


@pytest.mark.parametrize(("old", "new"), [("device", "none"), ("host", "host")])
def test_a_renamed_setting_keeps_loading(old, new, tmp_path):
    settings = {"grad_cache": {"chunk_size": 16, "residency": old}}
    assert make_config(settings).grad_cache.offload == new
    save_config(tmp_path, settings)
    assert run.saved_config(tmp_path).grad_cache.offload == new
    assert closest_setting("grad_cache.residency") == "grad_cache.offload"


def test_a_run_from_before_keeps_its_limit_of_the_scale_and_its_weight_decay():
    before = {name: SETTINGS[name].before for name in ("max_logit_scale", "optimizer.weight_decay_rules")}
    old, new = with_changes(default_config(), before), make_config({})
    resumed = keep_recorded(old, new)
    assert resumed.max_logit_scale == 100.0 and resumed.optimizer.weight_decay_rules == ()
    assert keep_recorded(new, new).optimizer.weight_decay_rules is None
