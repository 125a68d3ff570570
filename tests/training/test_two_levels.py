"""The mesh of hosts and their devices: the same training as on a flat mesh, with a ring within a ring."""

import json
import re

import jax
import numpy as np
import optax
import pytest
import runs
from jax.sharding import AxisType, Mesh

from infcl_jax.runtime.mesh import HOST_AXES, data_mesh, flat_mesh, shard_batch
from infcl_jax.training import (
    GlobalContrastiveConfig,
    GradCacheConfig,
    OptimizerConfig,
    create_state,
    make_loss,
    make_train_step,
    replayed,
    sharding,
)

BATCH, CHUNK = 32, 16
FLAT = data_mesh()


def two_levels(hosts):
    return Mesh(np.reshape(jax.devices(), (hosts, -1)), HOST_AXES, axis_types=(AxisType.Auto,) * 2)


class Reader:
    """A batch in host memory, read in slices."""

    def __init__(self, batch):
        self.batch, self.rows = batch, len(batch["text"])

    def read(self, slices):
        return {name: np.concatenate([rows[s] for s in slices]) for name, rows in self.batch.items()}


def make_step(mesh, loss, parameter_sharding, cache):
    settings = {"config": GlobalContrastiveConfig(), "steps_per_epoch": 1, "optimizer": OptimizerConfig()}
    loss_fn = make_loss(loss, mesh, **settings)
    state = create_state(
        runs.Linear(), optax.sgd(1e-1), runs.SIDE, runs.CONTEXT, 0, mesh, parameter_sharding=parameter_sharding
    )
    state = state.replace(samples=loss_fn.init_samples(2 * BATCH, 2.0))
    return make_train_step(loss_fn, 0, GradCacheConfig(**cache), mesh, parameter_sharding), state


def make_batch(mesh, cache):
    batch = runs.batch(BATCH)
    if cache.get("offload") == "replay":
        return replayed(Reader(batch), CHUNK, mesh)
    batch["index"] = np.random.default_rng(0).permutation(2 * BATCH)[:BATCH].astype(np.int32)
    return batch if cache.get("offload") == "host" else shard_batch(mesh, batch)


@pytest.mark.parametrize(
    ("hosts", "loss", "parameter_sharding", "cache"),
    [
        (2, "clip", "replicated", {}),
        (4, "siglip", "fsdp", {}),
        (4, "clip", "fsdp", {"chunk_size": CHUNK}),
        (2, "fastclip_v3", "replicated", {"chunk_size": CHUNK, "offload": "host"}),
        (2, "siglip", "replicated", {"chunk_size": CHUNK, "offload": "replay"}),
    ],
    ids=str,
)
def test_a_step_is_that_of_the_flat_mesh(monkeypatch, hosts, loss, parameter_sharding, cache):
    monkeypatch.setattr(sharding, "MIN_SIZE", 16)
    results = []
    for mesh in (FLAT, two_levels(hosts)):
        step, state = make_step(mesh, loss, parameter_sharding, cache)
        state, metrics = step(state, make_batch(mesh, cache))
        results.append(jax.device_get((metrics["loss"], metrics["grad_norm"], state.params, state.samples)))
    jax.tree.map(lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6), *reversed(results))


def test_blocks_rotate_within_hosts_and_across_them():
    hosts = 2
    mesh = two_levels(hosts)
    step, state = make_step(mesh, "clip", "replicated", {})
    program = step.lower(state, make_batch(mesh, {})).as_text()
    permutes = re.findall(r"source_target_pairs = dense<(\[\[.*?\]\])>", program)
    sources, targets = np.moveaxis([sorted(json.loads(pairs)) for pairs in permutes], 2, 0)
    moves = (targets // (8 // hosts) != sources // (8 // hosts)).mean(1), (targets - sources) % (8 // hosts)
    within, across = moves[0] == 0, (moves[0] == 1) & (moves[1] == 0).all(1)
    assert within.any() and across.any()
    assert not any(0 < share < 1 for share in moves[0])  # the flat ring's moves: some devices send across hosts


def test_evaluations_see_one_axis_in_the_same_order():
    mesh = two_levels(4)
    assert flat_mesh(mesh) == FLAT
    assert flat_mesh(FLAT) is FLAT
