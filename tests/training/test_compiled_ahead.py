"""The first step finds the program that was compiled from shapes alone."""

import contextlib
import threading

import jax
import numpy as np
import pytest
import runs

from infcl_jax import run, train
from infcl_jax.run.data import batch_shapes
from infcl_jax.run.parts import state_init
from infcl_jax.runtime.distributed import data_mesh
from infcl_jax.training import compiled_ahead, make_train_step
from infcl_jax.training.compiled_ahead import CompiledAhead

NOTHING = {"evaluation.retrieval_dataset": None, "evaluation.zero_shot_dataset": None}
CHANGES = {
    "chunks": {"grad_cache.chunk_size": 16},
    "sharded": {"parameter_sharding": "fsdp", "optimizer.name": "adafactor"},
    "sample state": {"loss": "fastclip_v2"},
    "captions and colors": {"positives": "caption", "augmentation.gray_scale_prob": 0.5},
    "frozen with averages": {"frozen": ("image",), "ema_decay": 0.9},
}


@contextlib.contextmanager
def step_events():
    """Record what JAX does for the step: tracing, lowering and compilation."""
    events = []

    def record(event, seconds, fun_name="", **_):
        if "on_device" in fun_name:
            events.append(event.rsplit("/", 1)[-1].split("_duration")[0])

    jax.monitoring.register_event_duration_secs_listener(record)
    try:
        yield events
    finally:
        jax.monitoring.unregister_event_duration_listener(record)


ONCE = ["jaxpr_trace", "jaxpr_to_mlir_module", "backend_compile"]


@pytest.fixture(autouse=True)
def promotion():
    """optax mixes dtypes."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def prepared(config):
    mesh, source = data_mesh(), run.training_source(config)
    cache = run.workload(config, mesh.size, source=source).cache
    step = make_train_step(run.loss(config, mesh, source), 0, cache, mesh, config.parameter_sharding)
    return mesh, source, step, state_init(config, mesh, source)


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_the_first_step_compiles_nothing(changes):
    config = runs.config(**changes)
    mesh, source, step, init = prepared(config)
    with step_events() as events:
        ahead = CompiledAhead(step, init.shapes, batch_shapes(config, mesh, run.text_tokenizer(config)))
        state = init.create()
        with contextlib.closing(run.training_data(config, source, mesh=mesh)) as data:
            state, _ = ahead(state, run.next_batch(config, data, mesh))
    assert events == ONCE
    assert int(state.step) == 1


def test_a_resumed_run_compiles_ahead_as_well(tmp_path):
    for steps in (1, 2):
        with step_events() as events:
            train(runs.config(total_steps=steps, **NOTHING), tmp_path)
        assert events == ONCE


def test_a_batch_of_other_shapes_is_compiled_as_usual():
    config = runs.config()
    mesh, _, step, init = prepared(config)
    shapes = batch_shapes(config, mesh, run.text_tokenizer(config))
    ahead = CompiledAhead(step, init.shapes, shapes | {"text": shapes["text"].update(shape=(31, 7))})
    batch = {name: jax.device_put(np.zeros(shape.shape, shape.dtype), shape.sharding) for name, shape in shapes.items()}
    assert int(ahead(init.create(), batch)[0].step) == 1


@pytest.mark.parametrize(
    "changes", [{"grad_cache.chunk_size": 16, "grad_cache.residency": "host"}, {"distill.teacher": "unread"}]
)
def test_other_batches_are_not_announced(changes):
    config = runs.config(**changes)
    assert batch_shapes(config, data_mesh(), run.text_tokenizer(config)) is None


class Step:
    """A step whose compilation ends when its kernels are compiled, or at once if it is cached."""

    def __init__(self, cached):
        self.kernels, self.cached = threading.Event(), cached

    def lower(self, *_):
        return self

    def compile(self):
        assert self.cached or self.kernels.wait(60)

    def __call__(self, *arguments):
        return arguments


@pytest.mark.parametrize("cached", [True, False])
def test_kernels_are_compiled_ahead_unless_the_step_is_cached(monkeypatch, cached):
    monkeypatch.setattr(compiled_ahead, "mosaic_kernels", lambda lowered: lowered.kernels)
    monkeypatch.setattr(compiled_ahead, "compile_kernels", threading.Event.set)
    monkeypatch.setattr(compiled_ahead, "_CACHE_SECONDS", 60 if cached else 0)
    assert CompiledAhead(step := Step(cached), "state", "batch")("state", "batch") == ("state", "batch")
    assert [t for t in threading.enumerate() if isinstance(t, threading.Timer) and not t.finished.is_set()] == []
    assert step.kernels.is_set() != cached
