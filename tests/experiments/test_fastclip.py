"""The configurations of FastCLIP, and the comparison of losses."""

import json
import math

import pytest
import runs

from configs import fastclip
from experiments import build, compare_losses
from infcl_jax.training import GlobalContrastiveConfig, OptimizerConfig

ARGUMENTS = ("quickstart", "medium", "large", "xlarge", "medium,loss=isogclr", "large,loss=clip,optimizer=sgd")


@pytest.mark.parametrize("argument", ARGUMENTS)
def test_every_configuration_can_be_built(argument):
    config = fastclip.get_config(argument)
    optimizer = OptimizerConfig(**config.optimizer)
    assert optimizer.warmup_steps < config.total_steps
    GlobalContrastiveConfig(**config.global_contrastive)
    build.read_model_config(config)


def test_the_table_of_the_paper():
    large = fastclip.get_config("large,loss=fastclip_v2,optimizer=lion")
    assert (large.optimizer.name, large.optimizer.learning_rate, large.optimizer.weight_decay) == ("lion", 1e-4, 0.3)
    gcl = large.global_contrastive
    assert (gcl.gamma_min, gcl.gamma_epochs, gcl.rho, gcl.temperature_learning_rate) == (0.6, 16, 8.5, 1e-4)
    assert large.total_steps == 9_100_000 // 2048 * 33
    xlarge = fastclip.get_config("xlarge")
    assert (xlarge.model, xlarge.batch_size, xlarge.global_contrastive.eps) == ("ViT-B/16", 5120, 1e-6)
    assert (xlarge.optimizer.temperature_learning_rate, xlarge.optimizer.temperature_schedule) == (5e-5, "threshold")


@pytest.mark.parametrize(("loss", "temperature"), [("fastclip_v3", 0.07), ("clip", 0.07), ("fastclip_v1", 0.03)])
def test_where_the_temperature_starts(loss, temperature):
    model = build.read_model_config(fastclip.get_config(f"medium,loss={loss}"))
    assert math.exp(-model.init_logit_scale) == pytest.approx(temperature)


@pytest.mark.parametrize(
    "argument", ["small", "medium,loss=siglip", "xlarge,optimizer=lamb", "xlarge,loss=isogclr", "large,rho=1", "large,"]
)
def test_what_there_are_no_settings_for_is_refused_in_one_line(argument):
    with pytest.raises(ValueError, match=r"^expected [^\n]*$"):
        fastclip.get_config(argument)


def test_losses_are_compared_by_loss_and_seed(monkeypatch, tmp_path):
    def train(config, workdir):
        workdir.mkdir(parents=True)
        better = 0.1 * (config.loss == "fastclip_v3") + 0.2 * (config.optimizer.weight_decay == 0)
        lines = [
            {"step": step, "time": 0.0}
            | dict.fromkeys(compare_losses.METRICS, better + step / 100 + config.seed / 1000)
            for step in (10, 20)
        ]
        (workdir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    monkeypatch.setattr(compare_losses.train, "train", train)
    curves = compare_losses.compare(runs.config(), ("clip", "fastclip_v3,optimizer.weight_decay=0"), (0, 1), tmp_path)
    assert [len(lines) for lines in curves["clip"]] == [2, 2]
    final = json.loads((tmp_path / "losses.json").read_text())
    assert final["fastclip_v3,optimizer.weight_decay=0"][1]["zero_shot/top1"] == pytest.approx(0.1 + 0.2 + 0.2 + 0.001)
    assert (tmp_path / "losses.png").stat().st_size > 0
    assert compare_losses.summary("R@1", [0.1, 0.2, 0.3]) == "R@1 20.0 % (10.0 to 30.0)"


@pytest.mark.parametrize("change", ["depth=3", "optimizer.rate=1", "schedule.rate=1", "seed.rate=1", "batch_size=many"])
def test_a_change_that_does_not_fit_is_named(change, tmp_path):
    with pytest.raises(ValueError, match=f"--compare with settings of the configuration, got '{change}'"):
        compare_losses.compare(runs.config(), (f"clip,{change}",), (0,), tmp_path)
    assert not list(tmp_path.iterdir())
