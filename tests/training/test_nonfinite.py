"""Steps that are not finite: left out on the devices, recorded, and limited in number."""

import json

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
from infcl_jax.training.nonfinite import NonfiniteSteps, state_stages

BATCH, CHUNK = 16, 8
STATIC = ("params", "opt_state", "ema", "batch_stats", "samples")


class SecondStep(Loss):
    """A finite loss whose gradient is infinite in the second step."""

    inputs = ("step",)

    def __call__(self, output, *, step):
        squares = jnp.square(output.image - output.text).sum()
        return LossOutput(squares + jnp.sqrt(jnp.where(step == 1, 0.0 * squares, squares)))


def batch_of(residency, mesh):
    batch = runs.batch(BATCH)
    if residency == "replay":
        rows = {name: value.reshape(2, 2, CHUNK // 2, *value.shape[1:]) for name, value in batch.items()}
        return {name: Replay(BATCH, lambda n, name=name: np.concatenate(rows[name][:, n])) for name in rows}
    return batch if residency == "host" else shard_batch(mesh, batch)


@pytest.mark.parametrize(
    ("residency", "chunk_size", "sharding"),
    [
        ("device", None, "replicated"),
        ("device", CHUNK, "replicated"),
        ("device", CHUNK, "fsdp"),
        ("host", CHUNK, "replicated"),
        ("replay", CHUNK, "replicated"),
    ],
)
def test_a_step_that_is_not_finite_changes_nothing_but_the_step(residency, chunk_size, sharding, monkeypatch):
    monkeypatch.setattr("infcl_jax.training.sharding.MIN_SIZE", 64)
    mesh = oracle.mesh_of(2)
    optimizer = make_optimizer(OptimizerConfig(name="lion", warmup_steps=2), total_steps=9)
    sizes = runs.SIDE, runs.CONTEXT, 0, mesh, sharding
    state = create_state(runs.Linear(), optimizer, *sizes, ema=EMAConfig(decay=0.5))
    cache = GradCacheConfig(chunk_size=chunk_size, residency=residency)
    step = make_train_step(SecondStep(name="second"), 0, cache, mesh, sharding, on_nonfinite="skip")
    states = []
    for _ in range(3):
        state, metrics = step(state, batch_of(residency, mesh))
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


def metrics(finite):
    scalars = dict.fromkeys(("loss", "logit_scale", "grad_norm"), np.float32(1.0))
    return {**scalars, "finite": {"image features": True, "the loss": finite, "the gradient of text": finite}}


def follow(workdir, flags, said=None, **options):
    """Check steps whose flags are given, after `start`."""
    said = [] if said is None else said
    steps = NonfiniteSteps("skip", workdir=workdir, batch_indices=lambda n: [n, n + 1], say=said.append, **options)
    try:
        for step, finite in enumerate(flags, start=options.get("start", 0) + 1):
            steps.check(step, metrics(finite))
    finally:
        steps.close()
    return steps


def skipped_lines(workdir):
    return [json.loads(line) for line in (workdir / "skipped_batches.jsonl").read_text().splitlines()]


def test_skipped_steps_are_counted_and_their_samples_written(tmp_path):
    said = []
    steps = follow(tmp_path, [True, False, True, False], said, limit=2)
    assert steps.metrics() == {"skipped_steps": 2}
    expected = {"step": 2, "stage": "the loss", "loss": "1.0", "indices": [1, 2]}
    assert skipped_lines(tmp_path) == [expected, {**expected, "step": 4, "indices": [3, 4]}]
    assert [line.split(",")[0] for line in said] == ["step 2: skipped", "step 4: skipped"]


def test_skipped_steps_in_a_row_stop_the_run(tmp_path):
    with pytest.raises(FloatingPointError, match=r"^3 skipped steps in a row; step 6: the loss became NaN[^\n]*$"):
        follow(tmp_path, [False, False, True, False, False, False, True], limit=3)
    assert len(skipped_lines(tmp_path)) == 5


def test_a_resumed_run_keeps_the_skipped_steps_before_it(tmp_path):
    follow(tmp_path, [False, False, True, False], limit=9)
    assert follow(tmp_path, [False], limit=9, start=2).skipped == 3
    assert [line["step"] for line in skipped_lines(tmp_path)] == [1, 2, 3]


def test_with_stop_the_first_step_that_is_not_finite_stops_the_run(tmp_path):
    steps = NonfiniteSteps(workdir=tmp_path)
    steps.check(1, metrics(True))
    with pytest.raises(FloatingPointError, match=r"^step 2: the loss became NaN"):
        steps.check(2, metrics(False))
    assert steps.metrics() == {} and list(tmp_path.iterdir()) == []


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
