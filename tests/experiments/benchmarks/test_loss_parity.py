"""Training curves: every implementation runs, and all give the same losses."""

import json

import jax
import runs

from experiments.benchmarks import loss_parity


def test_all_strategies_give_the_same_losses(monkeypatch, tmp_path):
    monkeypatch.setattr(loss_parity, "available_implementations", lambda: ("dense",))
    monkeypatch.setattr(loss_parity, "BATCH_RESIDENCIES", ("host",))
    with jax.numpy_dtype_promotion("standard"):  # optax's Adam mixes dtypes
        deviations = loss_parity.compare(runs.config(total_steps=3), tmp_path)
    curves = json.loads((tmp_path / loss_parity.RESULTS_FILE).read_text())
    assert list(curves) == list(deviations) == ["dense", "gradient caching, host"]
    assert all(len(curve) == 3 for curve in curves.values())
    assert max(deviations.values()) <= 1e-5
    assert (tmp_path / loss_parity.PICTURE_FILE).stat().st_size > 0


def test_a_strategy_changes_its_own_configuration_alone():
    config = runs.config()
    found = loss_parity.variants(config, loss_parity.start_devices(config))
    assert config.implementation is None
    assert [found[name].implementation for name in ("dense", "ring")] == ["dense", "ring"]
    assert [v.grad_cache.residency for v in found.values() if v.grad_cache.chunk_size] == ["device", "host", "replay"]


def test_deviation_is_relative():
    assert loss_parity.deviation([2.0, 3.0], [2.0, 4.0]).tolist() == [0.0, 0.25]
