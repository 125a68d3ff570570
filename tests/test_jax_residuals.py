"""JAX's behavior that the gradient rules of `infcl_jax.ops` work around, without `infcl_jax`.

JAX 0.11.2 and 0.12.0.1 keep one pytree structure of the residuals for each traced call of a `custom_vjp` function. If
that structure depends on which arguments need a gradient, the backward rule of every trace gets the structure of the
latest one, without an error (jax-ml/jax#16614 reported the error of JAX 0.4.13). The shape of a residual belongs to its
own trace.
"""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax import lax


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class InStructure:
    flags: tuple[bool, ...]


def in_shape(flags):
    return jnp.zeros((0, *map(int, flags)))


def product_with(residual, flags_of):
    """A product whose residual says which factors need a gradient; the others get none."""

    @jax.custom_vjp
    def product(x, y):
        return x * y

    def forward(x, y):
        return x.value * y.value, (x.value, y.value, residual((x.perturbed, y.perturbed)))

    def backward(residuals, cotangent):
        x, y, flags = residuals
        needs_x, needs_y = flags_of(flags)
        return cotangent * y if needs_x else None, cotangent * x if needs_y else None

    product.defvjp(forward, backward, symbolic_zeros=True)
    return jax.jit(product)


WRONG = pytest.mark.xfail(strict=True, raises=AssertionError, reason="one structure of residuals for all traces")


@pytest.mark.parametrize(
    ("residual", "flags_of"),
    [
        pytest.param(InStructure, lambda residual: residual.flags, id="structure", marks=WRONG),
        pytest.param(in_shape, lambda residual: residual.shape[1:], id="shape"),
    ],
)
def test_sum_of_two_calls_matches_float64(residual, flags_of):
    product = product_with(residual, flags_of)
    gradient = jax.grad(lambda x, y: product(x, y) + product(x, lax.stop_gradient(y)), (0, 1))
    assert gradient(2.0, 3.0) == (6.0, 2.0)
