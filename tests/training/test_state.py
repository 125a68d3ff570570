"""Initial state: equal on any number of devices and replicated on each."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import runs
from oracle import mesh_of

from infcl_jax.models.clip import row_shapes
from infcl_jax.training import EMAConfig, create_state, make_loss, parameter_count, sharding


def fresh(devices, seed=0):
    return create_state(runs.model(), optax.adam(1e-3), runs.SIDE, runs.CONTEXT, seed, mesh_of(devices))


@pytest.fixture(scope="module")
def state():
    return fresh(8)


def test_the_same_bits_on_one_device_as_on_eight(state):
    one = fresh(1)
    assert runs.equal_bits((one.step, one.params, one.opt_state), (state.step, state.params, state.opt_state))
    assert int(state.step) == 0


def test_every_device_holds_all_of_it(state):
    for leaf in jax.tree.leaves(state):
        assert leaf.sharding.is_fully_replicated
        assert len(leaf.sharding.device_set) == 8


@pytest.mark.parametrize("parameter_sharding", ["replicated", "fsdp"])
def test_a_state_is_that_of_one_program_with_buffers_of_its_own(monkeypatch, parameter_sharding):
    monkeypatch.setattr(sharding, "MIN_SIZE", 16)
    model, optimizer = runs.model(), optax.adam(1e-3)
    arguments = model, optimizer, runs.SIDE, runs.CONTEXT, 0, mesh_of(4), parameter_sharding
    state = create_state(*arguments, ema=EMAConfig(decay=0.9))

    @jax.jit
    def program():
        params = model.lazy_init(jax.random.key(0), *row_shapes(model, 1).values())["params"]
        return params, optimizer.init(params), params

    assert runs.equal_bits((state.params, state.opt_state, state.ema["params"]), program())
    leaves = jax.tree.leaves(state)
    expected = jax.tree.leaves(sharding.shardings(state, mesh_of(4), parameter_sharding))
    assert [leaf.sharding for leaf in leaves] == expected
    assert len({leaf.addressable_shards[0].data.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)


def test_draws_of_equal_shape_compile_once():
    programs = []

    def listen(event, _seconds, **_):
        if event.endswith("/backend_compile_duration"):
            programs.append(event)

    counts = []
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for layers in (2, 4):
            jax.clear_caches()
            programs.clear()
            model = runs.model(**{"text.layers": layers})
            create_state(model, optax.adam(1e-3), runs.SIDE, runs.CONTEXT, 0, mesh_of(2))
            counts.append(len(programs))
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert counts[0] == counts[1] > 0


def test_another_seed_gives_other_parameters(state):
    other = fresh(8, seed=1).params
    assert not runs.equal_bits(other["visual"], state.params["visual"])
    assert not runs.equal_bits(other["text"], state.params["text"])


def test_parameter_count(state):
    assert parameter_count({"a": jnp.zeros((2, 3)), "b": {"c": jnp.zeros(())}}) == 7
    assert parameter_count(state.params) == sum(np.size(leaf) for leaf in jax.tree.leaves(state.params))


@pytest.mark.parametrize(
    ("stored", "slope", "expected"), [(4.6, -1.0, np.log(100.0)), (0.1, 1.0, 0.0), (1.0, 1.0, 0.0)]
)
def test_an_update_cannot_carry_the_logit_scale_out_of_its_range(state, stored, slope, expected):
    params = {**state.params, "logit_scale": jnp.float32(stored)}
    state = state.replace(params=params, tx=optax.sgd(5.0), opt_state=optax.sgd(5.0).init(params))
    grads = jax.tree.map(jnp.zeros_like, params) | {"logit_scale": jnp.float32(slope)}
    updated = state.apply_gradients(grads=grads)
    np.testing.assert_allclose(updated.params["logit_scale"], expected, rtol=1e-6)
    assert int(updated.step) == 1
    assert runs.equal_bits(updated.params["visual"], params["visual"])


def with_scale(state, scale):
    return state.replace(params=state.params | {"logit_scale": jnp.log(jnp.float32(scale))})


@pytest.mark.parametrize(
    ("name", "limit", "after"), [("clip", None, 100), ("siglip", None, 115.2), ("clip", 120, 115.2), ("siglip", 50, 50)]
)
def test_the_loss_says_how_far_an_update_limits_the_scale(state, name, limit, after):
    loss = make_loss(name, None, max_logit_scale=limit)
    state = with_scale(state, 115.2).replace(tx=optax.sgd(0.0), opt_state=optax.sgd(0.0).init(state.params))
    grads = jax.tree.map(jnp.zeros_like, state.params)
    params = state.apply_gradients(grads=grads, max_logit_scale=loss.max_logit_scale).params
    np.testing.assert_allclose(jnp.exp(params["logit_scale"]), after, rtol=1e-5)


@pytest.mark.parametrize("scale", [14.3, 100.003, 115.2])
def test_an_initial_scale_above_the_limit_is_cut_with_a_warning(state, scale, caplog):
    cut = with_scale(state, scale).with_limited_scale(100.0)
    np.testing.assert_allclose(
        jnp.exp(cut.params["logit_scale"]), min(scale, 100.003), rtol=1e-6 + 1e-4 * (scale > 101)
    )
    expected = ["logit scale 115.2 of the initial parameters is above max_logit_scale=100; it is cut"]
    assert [record.getMessage() for record in caplog.records] == (expected if scale > 101 else [])
    assert with_scale(state, scale).with_limited_scale(np.inf).params["logit_scale"] == np.log(np.float32(scale))
