"""The fused kernels on adversarial inputs against float64."""

import functools

import jax
import jax.numpy as jnp
import oracle
import properties
import properties_ids
import pytest

from infcl_jax import retrieval_loss

pytestmark = pytest.mark.gpu


def checks(implementation):
    """`{name: check(data)}` of all losses on one GPU."""
    ids = {"siglip-ids": functools.partial(properties_ids.check_siglip, implementation=implementation, devices=1)}
    cases = properties.checks((implementation,), (1,)) | properties.sigmoid_checks((implementation,), (1,)) | ids
    return {name.replace(f"-{implementation}-1", ""): check for name, check in cases.items()}


NAMES = list(checks("any"))


@pytest.mark.parametrize("name", NAMES)
def test_matches_float64(implementation, name, monkeypatch):
    monkeypatch.setattr(properties, "LEAST_ERROR", 2e-5)  # dS in two bf16 terms keeps 16 bits
    properties.run(checks(implementation)[name], examples=100)


@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.bfloat16, 1e-2), (jnp.float32, 1e-5)])
def test_masked_rows_may_hold_anything(implementation, dtype, tolerance):
    args, options, check = oracle.masked_retrieval(bx=1003, by=2101, dim=640, dtype=dtype)
    loss = functools.partial(retrieval_loss, implementation=implementation)
    check(*jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(*args, **options), tolerance)
