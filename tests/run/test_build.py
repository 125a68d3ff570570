"""Parts of a run: each is built once, from resolved settings."""

import subprocess
import sys

import oracle
import pytest
import runs

from infcl_jax import run
from infcl_jax.run import base, image_text, model
from infcl_jax.run.base import make_run
from infcl_jax.run.build import build_run
from infcl_jax.settings import make_config
from infcl_jax.training import TextRetrievalConfig


def counted(monkeypatch, module, name):
    calls, function = [], getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args, **kwargs: calls.append(name) or function(*args, **kwargs))
    return calls


def test_each_part_is_built_once(monkeypatch):
    names = ((base, "build_model"), (base, "make_loss"), (model, "model_config"), (image_text, "load_source"))
    counts = {name: counted(monkeypatch, module, name) for module, name in names}
    built = build_run(make_config(runs.config(**{"grad_cache.chunk_size": 16})), oracle.mesh_of(1))
    for _ in range(2):
        built.open_iterator().close()
        assert built.init.shapes.step.shape == () and built.workload.cache is built.grad_cache
        assert built.suite.chance and built.batch_shapes()["image"].shape == (32, runs.SIDE, runs.SIDE, 3)
    assert {name: len(calls) for name, calls in counts.items()} == dict.fromkeys(counts, 1)


def test_the_settings_of_a_built_run_are_resolved():
    length = {"total_steps": None, "epochs": 2, "optimizer.warmup_steps": 0}
    built = build_run(make_config(runs.config(model=None, model_overrides="", **length)), oracle.mesh_of(1))
    assert (built.config.model, built.config.precision, built.config.epochs) == (model.DEFAULT_MODEL, "fp32", None)
    assert built.config.total_steps == 2 * (len(built.source) // built.config.batch_size)


def test_as_many_chunks_are_stored_as_fit(monkeypatch):
    """The setting stays -1 in the record of the run."""
    monkeypatch.setattr(base, "device_memory_limit", lambda: 2**30)
    built = make_run(make_config(runs.config(**{"grad_cache.chunk_size": 8, "grad_cache.keep": -1})), oracle.mesh_of(1))
    assert (built.config.grad_cache.keep, built.grad_cache.keep, built.grad_cache.chunk_size) == (-1, 4, 8)
    assert run.workload(built.config, 1, memory_limit=2**30).cache == built.grad_cache


def test_chunks_that_do_not_fit_the_devices_are_refused():
    with pytest.raises(ValueError, match=r"grad_cache.chunk_size to be a multiple of the 4 devices, got 6"):
        _ = make_run(make_config(runs.config(**{"grad_cache.chunk_size": 6})), oracle.mesh_of(4)).grad_cache


def test_the_planner_is_not_imported_to_train():
    code = "import sys, infcl_jax.run.train; assert 'infcl_jax.planner' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("settings", "unit", "passages"),
    [
        ({"model": "tiny"}, "images", 1),
        ({"model": "bert-tiny", "loss": "retrieval", "text_retrieval": {"hard_negatives": 3}}, "queries", 4),
    ],
)
def test_the_model_decides_the_kind(settings, unit, passages):
    run = make_run(make_config(settings))
    assert (run.unit, run.passages) == (unit, passages)


def test_a_text_pair_is_no_model_of_images():
    config = make_config({"model": "bert-tiny", "loss": "retrieval"})
    assert config.text_retrieval == TextRetrievalConfig()
    with pytest.raises(ValueError, match="expected a model of images and texts, got model='bert-tiny' of queries"):
        run.read_model_config(config)
