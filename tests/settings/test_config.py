"""Configurations from changed settings."""

import pytest
import runs

from configs import quickstart
from infcl_jax.settings import default_config, flattened, make_config, scaled_learning_rate

CHANGES = {"batch_size": 64, "optimizer": {"learning_rate": 1, "name": "lamb"}, "augmentation.scale": [0.5, 1.0]}


def test_changes_are_nested_or_dotted_and_leave_the_defaults():
    config, expected = make_config(CHANGES), flattened(default_config())
    expected |= {"batch_size": 64, "optimizer.learning_rate": 1.0, "optimizer.name": "lamb"}
    assert flattened(config) == expected | {"augmentation.scale": [0.5, 1.0]}
    assert config.is_locked and type(config.optimizer.learning_rate) is float


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
        ({"optimizer": 3}, "names of settings, got 'optimizer';"),
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
