import json

import numpy as np
import pytest
import runs

from experiments.benchmarks import beyond
from infcl_jax.data import load_source
from infcl_jax.data.decode.api import pixels

SIZES = [4, 8, 16]


@pytest.fixture
def trained(monkeypatch):
    """Configurations of the runs; each result depends on the settings alone."""
    configs = []

    def evaluate(config):
        names = [beyond.at_prefix(metric, size, SIZES) for metric in beyond.METRICS for size in SIZES]
        return dict.fromkeys(names, 0.5 + 0.1 * (config.positives == "caption") + config.seed / 100)

    def train(config, folder):
        configs.append(config)
        folder.mkdir()
        return evaluate(config)

    def evaluated(config, changes, folder, name):
        return evaluate(config)

    monkeypatch.setattr(beyond, "train", train)
    monkeypatch.setattr(beyond, "evaluated", evaluated)
    flags = {
        "_PREFIXES": list(map(str, SIZES)),
        "_TEACHER": "vision.layers=2",
        "_STUDENT": "vision.layers=1",
        "_WEIGHT": 0.5,
    }
    for name, value in flags.items():
        monkeypatch.setattr(beyond, name, type("Flag", (), {"value": value}))
    return configs


def test_a_repeated_series_trains_nothing_again(trained, tmp_path):
    answers = beyond.answer(runs.config(), beyond.QUESTIONS, (0, 1), tmp_path)
    assert len(trained) == 2 * 2 + 1 + 2 * 2 + 2 + 2 * 2
    assert {config.distill.teacher for config in trained} == {None, str(tmp_path / "teacher")}
    assert sum(config.matryoshka == tuple(SIZES) for config in trained) == 2
    assert all((tmp_path / f"{question}.png").stat().st_size > 0 for question in beyond.QUESTIONS)
    assert beyond.answer(runs.config(), ("positives",), (0, 1), tmp_path)["positives"] == answers["positives"]
    assert len(trained) == 15
    recorded = json.loads((tmp_path / beyond.RESULTS_FILE).read_text())
    assert recorded == answers
    assert [result["zero_shot/top1"] for result in recorded["positives"]["caption"]] == [0.6, 0.61]


def test_both_decoders_read_the_images_and_captions_of_the_training_data(trained, tmp_path):
    beyond.answer(runs.config(), ["decoders"], [0], tmp_path)
    assert [config.decode for config in trained] == ["pillow", "nvimgcodec"]
    (dataset,) = {config.dataset for config in trained}
    expected, written = (list(load_source(name, "train")) for name in ("digits", dataset))
    assert sorted(e["caption"] for e in written) == sorted(e["caption"] for e in expected)
    levels = [np.sort([pixels(e).mean() for e in examples]) for examples in (expected, written)]
    np.testing.assert_allclose(*levels, atol=1)
