"""Moving averages of parameters: timm's equations, sharding, donation, checkpoints and frozen towers."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import orbax.checkpoint as ocp
import pytest
import runs

from infcl_jax.planner import plan_memory
from infcl_jax.runtime.mesh import shard_batch
from infcl_jax.training import (
    Checkpointer,
    EMAConfig,
    GradCacheConfig,
    create_state,
    make_loss,
    make_train_step,
    restore_variables,
)
from infcl_jax.training.state import initial_ema, updated_ema

pytestmark = pytest.mark.usefixtures("small_arrays_sharded")
DEVICES, BATCH, DECAY = 4, 32, 0.6
MODEL, OPTIMIZER, EMA = runs.Linear(), optax.sgd(0.5, momentum=0.9), EMAConfig(decay=DECAY)


def fresh(kind="replicated", ema=EMA, model=MODEL, **options):
    mesh = oracle.mesh_of(DEVICES)
    return create_state(model, OPTIMIZER, runs.SIDE, runs.CONTEXT, 0, mesh, kind, ema=ema, **options)


@functools.cache
def stepper(kind="replicated", **cache):
    mesh = oracle.mesh_of(DEVICES)
    return make_train_step(make_loss("clip", mesh), 0, GradCacheConfig(**cache), mesh, kind)


def train(state, steps, kind="replicated", **cache):
    """Train some steps; returns the state and the parameters before them and after each."""
    history = [jax.device_get(state.trained)]
    for _ in range(steps):
        batch = runs.batch(BATCH, seed=int(state.step))
        batch = batch if cache.get("offload") == "host" else shard_batch(oracle.mesh_of(DEVICES), batch)
        state, _ = stepper(kind, **cache)(state, batch)
        history.append(jax.device_get(state.trained))
    return state, history


@pytest.mark.parametrize("kind", ["plain", "warmup"])
def test_averages_are_those_of_timm(kind):
    """Twenty updates of a linear layer with batch normalization (golden/make_ema.py)."""
    with np.load(Path(__file__).parents[1] / "golden" / "ema.npz") as file:
        golden = dict(file)
    config = EMAConfig(decay=float(golden["decay"]), warmup=kind == "warmup")
    variables, expected = (
        {name.partition("/")[2]: value for name, value in golden.items() if name.startswith(f"{part}/")}
        for part in ("variables", kind)
    )
    assert {"1.running_var", "0.weight"} < variables.keys()
    ema = initial_ema({name: values[0] for name, values in variables.items()})
    for update in range(1, len(variables["0.weight"])):
        now = {name: values[update].astype(np.float32) for name, values in variables.items()}
        ema = updated_ema(config, ema, now, jnp.int32(update))
        for name, values in expected.items():
            np.testing.assert_allclose(ema[name], values[update - 1], rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    ("kind", "cache"),
    [("replicated", {}), ("fsdp", {"chunk_size": 16}), ("fsdp", {"chunk_size": 16, "offload": "host"})],
    ids=str,
)
def test_the_step_averages_the_updated_parameters(kind, cache):
    start = fresh(kind)
    layout = jax.tree.map(lambda leaf: leaf.sharding, start.params)
    state, history = train(start, 3, kind, **cache)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(start.ema))  # donated
    expected = history[0]
    for params in history[1:]:
        expected = jax.tree.map(lambda mean, value: DECAY * mean + (1 - DECAY) * value, expected, params)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7), state.ema["params"], expected)
    assert jax.tree.map(lambda leaf: leaf.sharding, state.ema["params"]) == layout
    assert any(not leaf.is_fully_replicated for leaf in jax.tree.leaves(layout)) == (kind == "fsdp")
    assert runs.equal_bits(state.evaluated_variables["params"], state.ema["params"])


def test_averages_do_not_change_the_training():
    (state, _), (plain, _) = (train(fresh(ema=ema), 2) for ema in (EMA, None))
    assert runs.equal_bits(state.params, plain.params)
    assert plain.ema is None and runs.equal_bits(plain.evaluated_variables, plain.variables)


@pytest.mark.parametrize("kind", ["replicated", "fsdp"])
def test_a_run_resumes_with_its_averages_bit_for_bit(tmp_path, kind):
    ema = EMAConfig(decay=DECAY, warmup=True)
    whole, _ = train(fresh(kind, ema), 4, kind)
    half, _ = train(fresh(kind, ema), 2, kind)
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(2, half, runs.NoData())
        checkpoints.wait()
        resumed, _ = train(checkpoints.restore_latest(fresh(kind, ema)), 2, kind)
        with pytest.raises(
            ValueError, match=r"^the checkpoint of step 2 is of another run: ema/[^\n]* and absent here"
        ):
            checkpoints.restore_latest(fresh(kind, None))
    assert runs.equal_bits((resumed.params, resumed.ema), (whole.params, whole.ema))


def test_variables_restored_without_optimizer_state_are_the_averages(tmp_path):
    state, _ = train(fresh(frozen=("image",)), 1)
    assert state.ema["params"].keys() == {"text", "logit_scale", "logit_bias"}
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, state, runs.NoData())
    template = jax.tree.map(ocp.utils.to_shape_dtype_struct, state.variables)
    _, restored = restore_variables(tmp_path, template)
    assert runs.equal_bits(restored, state.evaluated_variables)
    assert not runs.equal_bits(restored, state.variables)


def test_averages_of_half_precision_and_running_statistics_are_float32():
    """A tenth of a bf16 ulp each update would be lost in bf16."""
    params = {"visual": jnp.ones(4, jnp.bfloat16), "text": jnp.ones(4, jnp.bfloat16), "logit_scale": jnp.ones(())}
    state = type(fresh()).create(
        apply_fn=None,
        params=params,
        tx=optax.sgd(2.0**-7),
        batch_stats={"mean": jnp.zeros(3)},
        ema_config=EMAConfig(decay=0.9),
    )
    grads = jax.tree.map(jnp.ones_like, params)
    with jax.numpy_dtype_promotion("standard"):
        state = state.apply_gradients(grads=grads, batch_stats={"mean": jnp.ones(3)})
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state.ema)} == {"float32"}
    np.testing.assert_allclose(state.ema["params"]["visual"], 1 - 0.1 * 2.0**-7, rtol=1e-6)
    np.testing.assert_allclose(state.ema["batch_stats"]["mean"], 0.1, rtol=1e-6)
    dtypes, expected = (jax.tree.map(lambda leaf: leaf.dtype, v) for v in (state.evaluated_variables, state.variables))
    assert dtypes == expected
    np.testing.assert_allclose(state.evaluated_variables["batch_stats"]["mean"], 0.1, rtol=1e-6)


@pytest.mark.parametrize(("kind", "frozen"), [("replicated", ("text",)), ("fsdp", ())])
def test_the_planner_counts_the_averages(kind, frozen):
    model = runs.model()
    state = fresh(kind, model=model, frozen=frozen)
    shard = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state.ema))
    settings = {"model": model, "devices": DEVICES, "parameter_sharding": kind, "frozen": frozen}
    plan, plain = (plan_memory(runs.workload(**settings, ema=ema)) for ema in (True, False))
    assert (plan.ema, plain.ema) == (shard, 0)
    assert plan.peak - plain.peak == shard


@pytest.mark.parametrize("decay", [-0.1, 1.0, float("nan")])
def test_a_decay_out_of_range_is_refused(decay):
    with pytest.raises(ValueError, match=f"^expected 0 <= ema_decay < 1, got {decay}$"):
        EMAConfig(decay=decay)
