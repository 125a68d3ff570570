"""Memory of the compiled losses does not grow with the pairs."""

import functools

import jax
import jax.numpy as jnp
import pytest

from infcl_jax import clip_loss

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("b", [8192, 65536])
def test_memory_does_not_grow_with_the_pairs(implementation, b):
    """At 65536, the pairs would take 8 GiB in bf16."""
    loss = jax.value_and_grad(functools.partial(clip_loss, implementation=implementation), argnums=(0, 1, 2))
    features, scale = jax.ShapeDtypeStruct((b, 512), jnp.bfloat16), jax.ShapeDtypeStruct((), jnp.float32)
    memory = jax.jit(loss).lower(features, features, scale).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 512 << 20
