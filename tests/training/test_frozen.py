"""Frozen towers: unchanged bits, no gradient, no optimizer state; the rest is trained."""

import functools

import jax
import numpy as np
import oracle
import pytest
import runs
from jax.sharding import NamedSharding, PartitionSpec

from infcl_jax.models import TOWERS
from infcl_jax.runtime.mesh import shard_batch
from infcl_jax.training import (
    Checkpointer,
    GradCacheConfig,
    OptimizerConfig,
    create_state,
    make_loss,
    make_optimizer,
    make_train_step,
)

BATCH, STEPS, DEVICES = 16, 2, 2
# With weight decay and clipping, so that neither reaches what is frozen.
OPTIMIZER = make_optimizer(OptimizerConfig(clip_norm=0.1), 100)
NO_CACHE, CHUNKS, HOST = {}, {"chunk_size": 8, "keep": 1}, {"chunk_size": 8, "offload": "host"}


# One model each, so that steps are compiled once.
MODELS = {"clip": runs.model(), "linear": runs.Linear()}


@functools.cache
def initial(frozen, seed, model):
    """State on the host; steps donate their state."""
    mesh = oracle.mesh_of(DEVICES)
    state = create_state(MODELS[model], OPTIMIZER, runs.SIDE, runs.CONTEXT, seed, mesh, frozen=frozen)
    return jax.device_get(state)


def fresh(*frozen, seed=0, model="clip"):
    return jax.device_put(initial(frozen, seed, model), NamedSharding(oracle.mesh_of(DEVICES), PartitionSpec()))


@functools.cache
def stepper(**cache):
    mesh = oracle.mesh_of(DEVICES)
    return make_train_step(make_loss("clip", mesh), 0, GradCacheConfig(**cache), mesh)


def train(state, steps=STEPS, **cache):
    """The state after some steps, and the last one's metrics."""
    for _ in range(steps):
        batch = runs.batch(BATCH, seed=int(state.step))
        batch = batch if cache.get("offload") == "host" else shard_batch(oracle.mesh_of(DEVICES), batch)
        state, metrics = stepper(**cache)(state, batch)
    return jax.device_get(state), jax.device_get(metrics)


@pytest.fixture(scope="module", autouse=True)
def promotion():
    with jax.numpy_dtype_promotion("standard"):  # optax divides by beta ** step, an integer
        yield


@pytest.fixture(scope="module")
def run():
    """Some steps without caching, by what is frozen and the model."""
    return functools.cache(lambda frozen, model="clip": train(fresh(frozen, model=model)))


def bits(tree):
    return {jax.tree_util.keystr(path): np.asarray(leaf).tobytes() for path, leaf in jax.tree.leaves_with_path(tree)}


@pytest.mark.parametrize("frozen", TOWERS)
def test_what_is_frozen_stays_and_all_else_moves(run, frozen):
    before, (after, metrics) = bits(fresh(frozen).params), run(frozen)
    moved = {path for path, value in bits(after.params).items() if value != before[path]}
    assert moved == {path for path in before if not path.startswith(f"['{TOWERS[frozen]}']")}
    assert [name for name in metrics["finite"] if name.endswith(f"gradient of {TOWERS[frozen]}")] == []
    assert [name for name in metrics if name.startswith("grad_norm/")] == [
        f"grad_norm/{t}" for t in TOWERS if t != frozen
    ]


@pytest.mark.parametrize("cache", [CHUNKS, HOST], ids=str)
def test_gradient_caching_trains_the_same(run, cache):
    (expected, expected_metrics), state = run("image", "linear"), fresh("image", model="linear")
    after, metrics = train(state, **cache)
    np.testing.assert_allclose(metrics["loss"], expected_metrics["loss"], rtol=1e-5)
    np.testing.assert_allclose(metrics["grad_norm"], expected_metrics["grad_norm"], rtol=1e-4)
    assert bits(after.params["visual"]) == bits(expected.params["visual"])


@pytest.mark.parametrize("cache", [NO_CACHE, CHUNKS], ids=str)
def test_no_gradient_of_it_is_computed(cache):
    """A frozen tower takes a third of a trained one's GEMMs without recomputation."""

    def products(*frozen):
        batch = shard_batch(oracle.mesh_of(DEVICES), runs.batch(BATCH))
        return stepper(**cache).lower(fresh(*frozen), batch).as_text().count("dot_general")

    assert products("image") < 0.85 * products()


def test_a_run_with_a_frozen_tower_is_restored(run, tmp_path):
    state, _ = run("image")
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(STEPS, state, runs.NoData())
        checkpoints.wait()
        restored = checkpoints.restore_latest(fresh("image", seed=1))
        with pytest.raises(ValueError, match=f"the checkpoint of step {STEPS} is of another run"):
            checkpoints.restore_latest(fresh())
    assert runs.equal_bits(*(jax.device_get((s.step, s.params, s.opt_state)) for s in (restored, state)))
