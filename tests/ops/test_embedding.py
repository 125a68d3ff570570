"""Token embedding: deterministic float32 gradients on any number of devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import runs
from jax.sharding import NamedSharding, PartitionSpec

from infcl_jax.ops.embedding import embed_tokens, sum_by_id

COUNT, WIDTH = 40, 8


def ids_with_repeats(n):
    """Ids: half are 7 and fill whole blocks.

    38 occurs once, 39 never, and 41 is out of range.
    """
    rng = np.random.default_rng(0)
    ids = np.where(rng.random(n) < 0.5, 7, rng.integers(0, 38, n)).astype(np.int32)
    ids[0], ids[-1] = 38, 41
    return ids


@pytest.mark.parametrize("n", [2, 128, 129, 1000, 128 * 128 + 1])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_are_summed_by_id_in_float32(n, dtype):
    ids, rows = ids_with_repeats(n), jnp.asarray(np.random.default_rng(1).normal(size=(n, WIDTH)), dtype)
    want = np.zeros((COUNT + 2, WIDTH))
    np.add.at(want, ids, np.asarray(rows, np.float64))
    got = jax.jit(sum_by_id, static_argnums=2)(ids, rows, COUNT)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, want[:COUNT], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("devices", [1, 4])
def test_the_gradient_is_that_of_indexing_on_any_number_of_devices(devices):
    rng, mesh = np.random.default_rng(0), oracle.mesh_of(devices)
    table, positions = (jnp.asarray(rng.normal(size=(n, WIDTH)), jnp.float32) for n in (COUNT, 50))
    tokens = ids_with_repeats(400).reshape(8, 50)
    tokens[-1, -1] = 0
    weight = rng.normal(size=(8, 50, WIDTH)).astype(np.float32)

    def gradient(embed, tokens, weight):
        return jax.grad(lambda *params: jnp.sum(weight * embed(*params, tokens)), (0, 1))(table, positions)

    @jax.jit
    def ours(tokens, weight):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return gradient(functools.partial(embed_tokens, dtype=jnp.float32), tokens, weight)

    sharded = jax.device_put((tokens, weight), NamedSharding(mesh, PartitionSpec("data")))
    got = ours(*sharded)
    want = gradient(lambda table, positions, tokens: table[tokens] + positions[None], tokens, weight)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    assert runs.equal_bits(jax.device_get(got), jax.device_get(ours(*sharded)))
    assert f"f32[{8 * 50 // devices},{WIDTH}]" in ours.lower(*sharded).compile().as_text()  # nobody has all rows
