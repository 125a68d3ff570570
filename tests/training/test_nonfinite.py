"""Steps that are not finite: left out on the devices, recorded, and limited in number."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
import runs

from infcl_jax.grad_cache import Replay
from infcl_jax.losses import Loss, LossOutput, SampleState
from infcl_jax.runtime.mesh import shard_batch
from infcl_jax.training import (
    EMAConfig,
    GradCacheConfig,
    OptimizerConfig,
    create_state,
    make_loss,
    make_optimizer,
    make_train_step,
)
from infcl_jax.training.nonfinite import state_stages

BATCH, CHUNK = 16, 8
STATIC = ("params", "opt_state", "ema", "batch_stats", "samples")


class SecondStep(Loss):
    """A finite loss whose gradient is infinite in the second step."""

    inputs = ("step",)

    def __call__(self, output, *, step):
        squares = jnp.square(output.image - output.text).sum()
        return LossOutput(squares + jnp.sqrt(jnp.where(step == 1, 0.0 * squares, squares)))


def batch_of(offload, mesh):
    batch = runs.batch(BATCH)
    if offload == "replay":
        rows = {name: value.reshape(2, 2, CHUNK // 2, *value.shape[1:]) for name, value in batch.items()}
        return {name: Replay(BATCH, lambda n, name=name: np.concatenate(rows[name][:, n])) for name in rows}
    return batch if offload == "host" else shard_batch(mesh, batch)


@pytest.mark.parametrize(
    ("offload", "chunk_size", "sharding"),
    [
        ("none", None, "replicated"),
        ("none", CHUNK, "replicated"),
        ("none", CHUNK, "fsdp"),
        ("host", CHUNK, "replicated"),
        ("replay", CHUNK, "replicated"),
    ],
)
def test_a_step_that_is_not_finite_changes_nothing_but_the_step(offload, chunk_size, sharding, monkeypatch):
    monkeypatch.setattr("infcl_jax.training.sharding.MIN_SIZE", 64)
    mesh = oracle.mesh_of(2)
    optimizer = make_optimizer(OptimizerConfig(name="lion", warmup_steps=2), total_steps=9)
    sizes = runs.SIDE, runs.CONTEXT, 0, mesh, sharding
    state = create_state(runs.Linear(), optimizer, *sizes, ema=EMAConfig(decay=0.5))
    cache = GradCacheConfig(chunk_size=chunk_size, offload=offload)
    step = make_train_step(SecondStep(name="second"), 0, cache, mesh, sharding, on_nonfinite="skip")
    states = []
    for _ in range(3):
        state, metrics = step(state, batch_of(offload, mesh))
        states.append((jax.device_get(state), all(jax.device_get(metrics["finite"]).values())))
    (first, _), (second, skipped_finite), (third, third_finite) = states
    assert not skipped_finite and third_finite
    assert [int(state.step) for state, _ in states] == [1, 2, 3]
    counts = [int(optax.tree.get(state.opt_state, "ScaleByScheduleState").count) for state, _ in states]
    assert counts == [1, 2, 3]
    unchanged = second.replace(opt_state=(*second.opt_state[:-1], first.opt_state[-1]))
    for name in STATIC:
        assert runs.equal_bits(getattr(unchanged, name), getattr(first, name))
        assert name not in ("params", "ema") or not runs.equal_bits(getattr(third, name), getattr(second, name))


def test_a_step_that_is_not_finite_leaves_the_sample_state():
    mesh = oracle.mesh_of(2)
    loss = make_loss("sogclr", mesh, None, steps_per_epoch=4)
    state = create_state(runs.Linear(), optax.sgd(1e-2), runs.SIDE, runs.CONTEXT, 0, mesh)
    state = state.replace(samples=loss.init_samples(BATCH, 2.0))
    batch = shard_batch(mesh, runs.batch(BATCH) | {"index": np.arange(BATCH, dtype=np.int32)})
    step = make_train_step(loss, 0, mesh=mesh, on_nonfinite="skip")
    state, metrics = step(state, batch)
    assert all(jax.device_get(metrics["finite"]).values())
    written = jax.device_get(state.samples)
    bad = {**state.params, "text": jax.tree.map(lambda x: x * jnp.nan, state.params["text"])}
    state, _ = step(state.replace(params=bad), batch)
    assert np.isfinite(written.log_u[:BATCH]).all()
    assert runs.equal_bits(jax.device_get(state.samples), written)


@pytest.mark.parametrize(
    ("value", "finite"), [(0.0, (True, True)), (np.inf, (False, False)), (-np.inf, (False, True)), (np.nan,) * 2]
)
def test_statistics_must_be_finite_and_logarithms_below_infinity(value, finite):
    values = np.array([[1.0, value]], np.float32)
    stages = state_stages({"mean": values}, SampleState(values))
    expected = (False, False) if finite is np.nan else finite
    assert tuple(map(bool, stages.values())) == expected
    assert state_stages(None, None) == {}


def test_only_skip_changes_the_program():
    mesh = oracle.mesh_of(1)
    state = create_state(runs.Linear(), optax.sgd(1e-2), runs.SIDE, runs.CONTEXT, 0, mesh)
    inputs, loss = (state, runs.batch(BATCH)), make_loss("clip", mesh, None)
    default, stop, skip = (
        make_train_step(loss, 0, mesh=mesh, **options).lower(*inputs).as_text()
        for options in ({}, {"on_nonfinite": "stop"}, {"on_nonfinite": "skip"})
    )
    assert default == stop != skip


def test_an_unknown_reaction_is_named():
    with pytest.raises(ValueError, match=r"expected on_nonfinite to be one of .* got 'ignore'"):
        make_train_step(make_loss("clip", None, None), 0, on_nonfinite="ignore")
