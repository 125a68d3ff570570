"""The fused kernels on adversarial inputs against float64."""

import functools

import jax
import jax.numpy as jnp
import oracle
import properties
import pytest

from infcl_jax import retrieval_loss

pytestmark = pytest.mark.gpu
NAMES = [name.replace("-any-1", "") for name in properties.checks(("any",), (1,))]


@pytest.mark.parametrize("name", NAMES)
def test_matches_float64(implementation, name, monkeypatch):
    monkeypatch.setattr(properties, "LEAST_ERROR", 2e-5)  # dS in two bf16 terms keeps 16 bits
    check = properties.checks((implementation,), (1,))[f"{name}-{implementation}-1"]
    properties.run(check, examples=100)


@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.bfloat16, 1e-2), (jnp.float32, 1e-5)])
def test_masked_rows_may_hold_anything(implementation, dtype, tolerance):
    args, options, check = oracle.masked_retrieval(bx=1003, by=2101, dim=640, dtype=dtype)
    loss = functools.partial(retrieval_loss, implementation=implementation)
    check(*jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(*args, **options), tolerance)
