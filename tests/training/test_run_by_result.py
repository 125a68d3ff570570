"""Evaluation by result: the results of one program, from few compiled programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from infcl_jax.runtime.mesh import data_mesh
from infcl_jax.training.run_by_result import run_by_result

REPLICATED = PartitionSpec()
CONSTANT = jnp.arange(8.0)


def draw(arrays):
    """Draws of one shape, with a result that is used, a constant and a number."""
    keys = [jax.random.fold_in(jax.random.key(0), number) for number in range(arrays)]
    drawn = [0.02 * jax.random.normal(key, (8, 5)) for key in keys]
    step = jnp.zeros((), jnp.int32)
    return {"drawn": drawn, "largest": drawn[0].max(), "constants": [CONSTANT, CONSTANT], "step": step}


def evaluated(arrays, spec=REPLICATED):
    traced = jax.jit(lambda: draw(arrays)).trace()
    sharding = NamedSharding(data_mesh(), REPLICATED)
    shardings = jax.tree.map(lambda shape: sharding.update(spec=spec if shape.ndim else ()), traced.out_info)
    return shardings, run_by_result(traced, shardings)


@pytest.mark.parametrize("spec", [REPLICATED, PartitionSpec("data")], ids=["replicated", "sharded"])
def test_results_are_those_of_one_program(spec):
    shardings, results = evaluated(3, spec)
    expected = jax.jit(lambda: draw(3), out_shardings=shardings)()
    for result, array in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        assert (result.dtype, result.sharding, result.weak_type) == (array.dtype, array.sharding, array.weak_type)
        np.testing.assert_array_equal(result, array)


def test_draws_of_equal_shape_compile_once():
    programs = []

    def listen(event, _seconds, **_):
        if event.endswith("/backend_compile_duration"):
            programs.append(event)

    counts = []
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for arrays in (2, 20):
            jax.clear_caches()
            programs.clear()
            evaluated(arrays)
            counts.append(len(programs))
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert counts[0] == counts[1] > 0


def test_no_two_results_share_a_buffer():
    """The train step donates each buffer of its state."""
    _, results = evaluated(2)
    pointers = [leaf.addressable_shards[0].data.unsafe_buffer_pointer() for leaf in jax.tree.leaves(results)]
    assert len(set(pointers)) == len(pointers)
    assert CONSTANT.unsafe_buffer_pointer() not in pointers
