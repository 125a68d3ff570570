"""The configurations of FastCLIP, and the comparison of losses."""

import math

import oracle
import pytest

from configs import fastclip
from infcl_jax import run
from infcl_jax.losses.variants import VARIANTS
from infcl_jax.training import GlobalContrastive, GlobalContrastiveConfig, OptimizerConfig

CONST, COSINE = "constant", None
SCHEDULE, TEMPERATURE = "experiment=schedule", "experiment=temperature"
OPTIMIZER = "experiment=optimizer"
# Wei et al. 2024, Appendix B, Table 7: beta1, beta2, eps, learning rate, final learning rate, weight decay, warm-up.
TABLE_7 = {
    "medium": (0.9, 0.999, 1e-8, 1e-3, 0.0, 0.1, 10_000),
    "large": (0.9, 0.98, 1e-6, 4e-4, 0.0, 0.1, 10_000),
    "xlarge": (0.9, 0.98, 1e-6, 2e-4, 0.0, 0.2, 13_000),
}
# Tables 8 and 9 and their text: gamma's schedule, its last value and epochs, rho, the temperature's rate and start.
TABLES_8_AND_9 = [
    ("medium", SCHEDULE, "sogclr", CONST, 0.6, None, 0.0, None, 0.03),
    ("medium", SCHEDULE, "fastclip_v1", COSINE, 0.2, 18, 0.0, None, 0.03),
    ("medium", SCHEDULE, "isogclr", CONST, 0.6, None, 9.0, 1e-2, 0.03),
    ("medium", SCHEDULE, "fastclip_v2", COSINE, 0.2, 18, 9.0, 1e-2, 0.03),
    ("medium", SCHEDULE, "fastclip_v3_const", CONST, 0.6, None, 6.5, 2e-4, 0.07),
    ("medium", SCHEDULE, "fastclip_v3", COSINE, 0.2, 18, 6.5, 2e-4, 0.07),
    ("large", SCHEDULE, "sogclr", CONST, 0.6, None, 0.0, None, 0.03),
    ("large", SCHEDULE, "fastclip_v1", COSINE, 0.2, 16, 0.0, None, 0.03),
    ("large", SCHEDULE, "isogclr", CONST, 0.8, None, 9.0, 1e-2, 0.03),
    ("large", SCHEDULE, "fastclip_v2", COSINE, 0.6, 16, 9.0, 1e-2, 0.03),
    ("large", SCHEDULE, "fastclip_v3_const", CONST, 0.6, None, 8.5, 1e-4, 0.07),
    ("large", SCHEDULE, "fastclip_v3", COSINE, 0.2, 16, 8.5, 1e-4, 0.07),
    ("xlarge", SCHEDULE, "fastclip_v3", COSINE, 0.8, 10, 16.0, 5e-5, 0.07),
    ("medium", TEMPERATURE, "fastclip_v0", COSINE, 0.2, 18, 0.0, None, 0.03),
    ("medium", TEMPERATURE, "fastclip_v1", COSINE, 0.2, 18, 0.0, None, 0.03),
    ("medium", TEMPERATURE, "fastclip_v2", COSINE, 0.2, 18, 7.0, 1e-2, 0.03),
    ("medium", TEMPERATURE, "fastclip_v3", COSINE, 0.2, 18, 6.5, 2e-4, 0.07),
    ("large", TEMPERATURE, "fastclip_v0", COSINE, 0.2, 16, 0.0, None, 0.03),
    ("large", TEMPERATURE, "fastclip_v1", COSINE, 0.2, 16, 0.0, None, 0.03),
    ("large", TEMPERATURE, "fastclip_v2", COSINE, 0.2, 16, 8.5, 1e-4, 0.03),
    ("large", TEMPERATURE, "fastclip_v3", COSINE, 0.2, 16, 8.5, 1e-4, 0.07),
    ("xlarge", TEMPERATURE, "fastclip_v3", COSINE, 0.8, 10, 16.0, 5e-5, 0.07),
    ("medium", OPTIMIZER, "fastclip_v3", COSINE, 0.2, 18, 6.5, 2e-4, 0.07),
    ("large", OPTIMIZER, "fastclip_v3", COSINE, 0.2, 16, 8.5, 1e-4, 0.07),
]
# Table 10: learning rate and weight decay of FastCLIP-v3.
TABLE_10 = [
    ("medium", "sgd", 1.0, 3e-6),
    ("medium", "lamb", 2e-3, 0.1),
    ("medium", "lion", 2e-4, 0.3),
    ("medium", "adamw", 1e-3, 0.1),
    ("large", "sgd", 2.0, 3e-6),
    ("large", "lamb", 2e-3, 0.1),
    ("large", "lion", 1e-4, 0.3),
    ("large", "adamw", 4e-4, 0.1),
]


def built(argument):
    """A configuration whose loss can be built."""
    config = fastclip.get_config(argument)
    optimizer = OptimizerConfig(**config.optimizer)
    assert optimizer.warmup_steps < config.total_steps
    gcl = GlobalContrastiveConfig(**config.global_contrastive)
    if config.loss != "clip":
        GlobalContrastive(name=config.loss, config=gcl, steps_per_epoch=1, mesh=oracle.mesh_of(1), optimizer=optimizer)
    return config


def start_of_temperature(config):
    return math.exp(-run.read_model_config(config).init_logit_scale)


@pytest.mark.parametrize("loss", ["clip", "fastclip_v3"])
@pytest.mark.parametrize("size", TABLE_7)
def test_table_7(size, loss):
    config = built(f"{size},loss={loss}")
    names = ("beta1", "beta2", "eps", "learning_rate", "final_learning_rate", "weight_decay", "warmup_steps")
    assert tuple(config.optimizer[name] for name in names) == TABLE_7[size]
    assert (config.optimizer.name, config.optimizer.schedule) == ("adamw", "cosine")
    assert start_of_temperature(config) == pytest.approx(0.07)


@pytest.mark.parametrize(
    ("size", "experiment", "loss", "schedule", "gamma", "epochs", "rho", "rate", "temperature"), TABLES_8_AND_9
)
def test_tables_8_and_9(size, experiment, loss, schedule, gamma, epochs, rho, rate, temperature):
    config = built(f"{size},loss={loss},{experiment}")
    gcl, optimizer = config.global_contrastive, config.optimizer
    assert config.loss == loss.removesuffix("_const")
    kind = VARIANTS[config.loss]
    assert (gcl.gamma_schedule or kind.gamma_schedule) == (schedule or "cosine")
    assert gcl.gamma_min == gamma
    assert epochs in (None, gcl.gamma_epochs)
    assert start_of_temperature(config) == pytest.approx(temperature)
    assert gcl.rho == rho or not kind.regularized
    learned, samples = kind.temperature == "learned", kind.temperature == "samples"
    assert (gcl.temperature_learning_rate if samples else rate) == rate
    assert optimizer.temperature_learning_rate == (rate if learned else None)
    assert optimizer.temperature_schedule == ("threshold" if config.loss == "fastclip_v3" else "constant")
    assert (gcl.mode, gcl.eps) == ("reference", 1e-6 if size == "xlarge" else 1e-14)


@pytest.mark.parametrize(("size", "name", "rate", "decay"), TABLE_10)
def test_table_10(size, name, rate, decay):
    config = built(f"{size},experiment=optimizer,optimizer={name}")
    optimizer = config.optimizer
    assert (optimizer.name, optimizer.learning_rate, optimizer.weight_decay) == (name, rate, decay)
    assert tuple(optimizer[key] for key in ("beta1", "beta2", "eps")) == TABLE_7[size][:3]
    assert config.loss == "fastclip_v3"


@pytest.mark.parametrize(
    ("size", "model", "batch", "steps"),
    [
        ("medium", "RN50", 1024, 2_700_000 // 1024 * 37),
        ("large", "ViT-B/32", 2048, 9_100_000 // 2048 * 33),
        ("xlarge", "ViT-B/16", 5120, 315_000_000 // 5120 * 42),
    ],
)
def test_models_and_steps_by_size(size, model, batch, steps):
    config = fastclip.get_config(size)
    assert (config.model, config.batch_size, config.total_steps) == (model, batch, steps)


def test_a_run_gives_its_loss_the_settings_of_its_optimizer():
    config = built("quickstart,loss=isogclr")
    assert run.loss(config, oracle.mesh_of(1), range(128)).optimizer == OptimizerConfig(**config.optimizer)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("small", "one of the sizes"),
        ("medium,loss=siglip", "loss"),
        ("medium,loss=isogclr", r"loss .*experiment 'temperature' at size 'medium', got 'isogclr'"),
        ("medium,loss=fastclip_v0,experiment=schedule", r"loss .*experiment 'schedule'"),
        ("medium,loss=fastclip_v2,experiment=optimizer,optimizer=lamb", r"loss .*experiment 'optimizer'"),
        ("medium,optimizer=lamb", r"optimizer .*experiment 'temperature' at size 'medium', got 'lamb'"),
        ("medium,experiment=optimizer,optimizer=adafactor", r"optimizer .*got 'adafactor'"),
        ("xlarge,experiment=optimizer", r"experiment .*size 'xlarge', got 'optimizer'"),
        ("quickstart,experiment=schedule", r"experiment .*size 'quickstart'"),
        ("xlarge,loss=isogclr", "loss"),
        ("large,rho=1", "got 'rho'"),
        ("large,mode=paper", "mode"),
        ("large,", "got ''"),
    ],
)
def test_what_there_are_no_settings_for_is_refused_in_one_line(argument, message):
    with pytest.raises(ValueError, match=rf"^expected [^\n]*{message}[^\n]*$"):
        fastclip.get_config(argument)
