"""Residual structures of `custom_vjp` in JAX, without `infcl_jax`.

JAX 0.11.2 and 0.12.0.1 store one pytree structure of the residuals for each `custom_vjp` call and overwrite it when the
forward rule is traced again. If the structure depends on which arguments need a gradient, the backward rule of every
trace gets the structure of the latest one. JAX 0.4.13 raised an error instead (jax-ml/jax#16614). The shapes of
residuals belong to one trace.
"""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax import lax


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class StaticFlags:
    flags: tuple[bool, ...]


def encode_in_shape(flags):
    return jnp.zeros((0, *map(int, flags)))


def product_with(encode, decode):
    """Build a product whose residuals encode which factors need a gradient."""

    @jax.custom_vjp
    def product(x, y):
        return x * y

    def forward(x, y):
        return x.value * y.value, (x.value, y.value, encode((x.perturbed, y.perturbed)))

    def backward(residuals, cotangent):
        x, y, flags = residuals
        needs_x, needs_y = decode(flags)
        return cotangent * y if needs_x else None, cotangent * x if needs_y else None

    product.defvjp(forward, backward, symbolic_zeros=True)
    return jax.jit(product)


WRONG = pytest.mark.xfail(strict=True, raises=AssertionError, reason="JAX stores one residual structure for all traces")


@pytest.mark.parametrize(
    ("encode", "decode"),
    [
        pytest.param(StaticFlags, lambda residual: residual.flags, id="structure", marks=WRONG),
        pytest.param(encode_in_shape, lambda residual: residual.shape[1:], id="shape"),
    ],
)
def test_sum_of_two_calls_matches_oracle(encode, decode):
    product = product_with(encode, decode)
    gradient = jax.grad(lambda x, y: product(x, y) + product(x, lax.stop_gradient(y)), (0, 1))
    assert gradient(2.0, 3.0) == (6.0, 2.0)
