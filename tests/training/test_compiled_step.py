"""The first step finds the program that was compiled from shapes alone."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs

from infcl_jax import run, train
from infcl_jax.run.base import make_run
from infcl_jax.runtime.mesh import data_mesh
from infcl_jax.settings import make_config
from infcl_jax.training.compiled_step import StepMemory, compile_ahead, compiled_bytes, is_out_of_memory

NOTHING = {"evaluation.retrieval_dataset": None, "evaluation.zero_shot_dataset": None}
PACKED = {"model_overrides": f"{runs.OVERRIDES},text.context_length=128"}
CHANGES = {
    "chunks": {"grad_cache.chunk_size": 16},
    "sharded": {"parameter_sharding": "fsdp", "optimizer.name": "adafactor"},
    "sample state": {"loss": "fastclip_v2"},
    "packed captions and colors": {"positives": "caption", "augmentation.gray_scale_prob": 0.5, **PACKED},
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


def built(changes):
    config = make_config(runs.config(**changes))
    return make_run(config, data_mesh(), run.training_source(config))


FULL = ("sharded", "sample state")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full if name in FULL else ()) for name in CHANGES]
)
def test_the_first_step_compiles_nothing(name):
    changes = CHANGES[name]
    parts = built(changes)
    with step_events() as events:
        compiled = compile_ahead(parts.step, parts.init.shapes, parts.batch_shapes())
        state = parts.init.create()
        compiled.result()
        with contextlib.closing(parts.open_iterator()) as data:
            state, _ = parts.step(state, parts.next_batch(data))
    assert events == ONCE
    assert int(state.step) == 1


def test_a_resumed_run_compiles_ahead_as_well(tmp_path):
    for steps in (1, 2):
        with step_events() as events:
            train(runs.config(total_steps=steps, **NOTHING), tmp_path)
        assert events == ONCE


def test_a_batch_of_other_shapes_is_compiled_as_usual():
    parts = built({})
    shapes = parts.batch_shapes()
    compile_ahead(parts.step, parts.init.shapes, shapes | {"text": shapes["text"].update(shape=(32, 7))}).result()
    batch = {name: jax.device_put(np.zeros(shape.shape, shape.dtype), shape.sharding) for name, shape in shapes.items()}
    assert int(parts.step(parts.init.create(), batch)[0].step) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"grad_cache.chunk_size": 16, "grad_cache.offload": "host"},
        {"distill.teacher": "unread"},
        {"guide.model": "unread"},
    ],
)
def test_other_batches_are_not_announced(changes):
    assert make_run(make_config(runs.config(**changes)), data_mesh()).batch_shapes() is None


def test_the_memory_is_that_of_xla():
    compiled = jax.jit(lambda x: (x + 1, x.sum()), donate_argnums=0).lower(jnp.zeros((256, 1024))).compile()
    memory = StepMemory.of(compiled, limit=10 << 20)
    assert 1 << 20 <= memory.arguments < (1 << 20) + 64  # the donated array counts once
    assert compiled_bytes(compiled) == memory.peak == sum(memory.components.values())
    parts = f"(state and batch 1.0, temporaries {memory.temporaries / 2**20:.1f})"
    share = f"{10 * memory.peak / 2**20:.1f} % of the limit"
    assert str(memory) == f"memory per device: {memory.peak / 2**20:.1f} MiB, {share} {parts}"


def test_errors_of_the_compilation_are_those_of_the_future():
    class Lowered:
        def lower(self, state, batch):
            return self

        def compile(self):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no memory")

    error = compile_ahead(Lowered(), None, {}).exception(timeout=60)
    assert is_out_of_memory(error) and not is_out_of_memory(ValueError("RESOURCE_EXHAUSTED"))
