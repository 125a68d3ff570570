"""Sharded training state: the same training in a fraction of the memory."""

import functools
import re

import jax
import numpy as np
import optax
import oracle
import pytest
import runs

from infcl_jax.runtime.mesh import shard_batch
from infcl_jax.training import Checkpointer, GradCacheConfig, create_state, make_loss, make_train_step
from infcl_jax.training.sharding import sharded_axis

pytestmark = pytest.mark.usefixtures("small_arrays_sharded")
DEVICES, BATCH, STEPS = 4, 32, 3


# One model and optimizer each, so that steps are compiled once.
MODELS = {"clip": runs.model(), "linear": runs.Linear()}
OPTIMIZER = optax.sgd(1e-2, momentum=0.9)


@functools.cache
def initial(parameter_sharding, seed, model):
    """State on the host and its shardings; steps donate their state."""
    mesh = oracle.mesh_of(DEVICES)
    state = create_state(MODELS[model], OPTIMIZER, runs.SIDE, runs.CONTEXT, seed, mesh, parameter_sharding)
    return jax.device_get(state), jax.tree.map(lambda leaf: leaf.sharding, state)


def fresh(parameter_sharding, seed=0, model="clip"):
    return jax.device_put(*initial(parameter_sharding, seed, model))


def bytes_of_each(state):
    """Bytes that every device holds."""
    shards = [shard for leaf in jax.tree.leaves(state) for shard in leaf.addressable_shards]
    return [sum(s.data.nbytes for s in shards if s.device == d) for d in jax.devices()[:DEVICES]]


def shardings_of(state):
    return [leaf.sharding for leaf in jax.tree.leaves(state)]


@functools.cache
def stepper(parameter_sharding, **cache):
    mesh = oracle.mesh_of(DEVICES)
    return make_train_step(make_loss("clip", mesh), 0, GradCacheConfig(**cache), mesh, parameter_sharding)


def train(parameter_sharding, model, **cache):
    """Losses of some steps and the last state."""
    state, losses, mesh = fresh(parameter_sharding, model=model), [], oracle.mesh_of(DEVICES)
    for number in range(STEPS):
        batch = runs.batch(BATCH, seed=number)
        batch = batch if cache.get("offload") == "host" else shard_batch(mesh, batch)
        state, metrics = stepper(parameter_sharding, **cache)(state, batch)
        losses.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    return losses, state


@pytest.fixture(scope="module")
def replicated():
    """Training with a replicated state, by model."""
    return functools.cache(functools.partial(train, "replicated"))


@pytest.mark.parametrize(
    ("model", "cache"),
    [("clip", {}), ("linear", {"chunk_size": 16}), ("linear", {"chunk_size": 16, "offload": "host"})],
    ids=str,
)
def test_training_is_the_same_and_the_state_stays_sharded(replicated, model, cache):
    (losses, state), (expected, whole) = train("fsdp", model, **cache), replicated(model)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert shardings_of(state) == shardings_of(fresh("fsdp", model=model))
    for got, want in zip(jax.tree.leaves(state.params), jax.tree.leaves(whole.params), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["replicated", "fsdp"])
def test_nothing_but_sharded_parameters_is_gathered(kind):
    """Neither activations nor the tokens, whose embedding's gradient each device sums for itself.

    Only the gradient of a layer that is computed in parts is put together of what other devices have. The part of the
    attention's bias that belongs to values is gathered for itself, and so is its gradient.
    """
    mesh, state = oracle.mesh_of(DEVICES), fresh(kind)
    program = stepper(kind).lower(state, shard_batch(mesh, runs.batch(BATCH))).compile().as_text()
    leaves = jax.tree_util.tree_leaves_with_path(state.params)
    sharded = {jax.tree_util.keystr(path): leaf for path, leaf in leaves if not leaf.sharding.is_fully_replicated}
    of_values = 2 * sum(name.endswith("['in_proj']['bias']") for name in sharded)
    gathered = re.findall(r"\w\[(\S*)\]\S* all-gather\(", program)
    assert sum("," in shape for shape in gathered) == sum(leaf.ndim > 1 for leaf in sharded.values())
    assert len(gathered) == len(re.findall(r" all-gather(-start)?\(", program)) == len(sharded) + of_values
    moved = [line for line in program.splitlines() if " all-to-all(" in line]
    assert all("attn/concatenate" in line for line in moved) and (kind == "fsdp" or not moved)


def test_every_device_holds_its_share():
    whole, shares = (bytes_of_each(fresh(kind)) for kind in ("replicated", "fsdp"))
    assert len(set(shares)) == 1
    assert 1 / DEVICES <= shares[0] / whole[0] < 1.02 / DEVICES


@pytest.mark.parametrize(("saved", "restored"), [("fsdp", "replicated"), ("replicated", "fsdp")])
def test_checkpoints_do_not_depend_on_the_sharding(tmp_path, saved, restored):
    state, template = fresh(saved, seed=1, model="linear"), fresh(restored, model="linear")
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, state, runs.NoData())
        checkpoints.wait()
        got = checkpoints.restore_latest(template)
    assert shardings_of(got) == shardings_of(template)
    assert runs.equal_bits(jax.device_get(got.params), jax.device_get(state.params))


@pytest.mark.parametrize(
    ("shape", "devices", "axis"),
    [
        ((8, 12), 4, 1),
        ((12, 8), 4, 0),
        ((7, 12), 4, 1),
        ((8, 999), 4, 0),
        ((7, 9), 4, None),
        ((8,), 4, None),
        ((), 4, None),
        ((8, 8), 1, None),
    ],
)
def test_the_largest_axis_that_the_devices_divide_is_sharded(shape, devices, axis):
    assert sharded_axis(shape, devices, "fsdp") == axis
    assert sharded_axis(shape, devices, "replicated") is None


def test_unknown_shardings_are_refused():
    with pytest.raises(ValueError, match=r"expected parameter_sharding to be one of .*'fsdp'.*got 'zero'"):
        fresh("zero")
    with pytest.raises(ValueError, match="expected a mesh with parameter_sharding 'fsdp'"):
        make_train_step(lambda output: output, 0, parameter_sharding="fsdp")
