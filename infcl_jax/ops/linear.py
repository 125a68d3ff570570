"""Products with weights in the compute dtype, whose gradients are sums in float32.

The automatic gradient stores float32 copies of activations where the compiler prefers that to computing them again.
Here the backward pass stores the arguments in the compute dtype and recomputes the rest.
"""

import functools
import re
import string
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from infcl_jax.ops.layer_norm.api import along

# Name (`checkpoint_name`) of what an encoder derives from parameters alone, see `infcl_jax.cached_value_and_grad`.
DERIVED = "derived"

Parts = tuple[jax.Array, ...]
Biases = tuple[jax.Array | None, ...]


def cast(parameters: Any, x: jax.Array) -> Any:
    """Parameters in the dtype of `x`, without gradient; with gradient caching they are computed once for all chunks."""
    return jax.tree.map(lambda a: checkpoint_name(lax.stop_gradient(a).astype(x.dtype), DERIVED), parameters)


def affine(x: jax.Array, kernels: Parts, biases: Biases) -> Parts:
    """`x @ kernel + bias` for one kernel and bias or several, in the dtype of `x`.

    Args:
      x: [..., inputs], floating.
      kernels: of [inputs, features], of any floating dtype.
      biases: as many, of [features], likewise; None for no bias.

    Returns:
      As many [..., features] in the dtype of `x`. Gradients of kernels and biases are sums in float32.
    """
    rows = string.ascii_lowercase[: x.ndim - 1]
    parts = _multiply(f"{rows}y,yz->{rows}z", x, kernels, cast(kernels, x))

    def biased(part: jax.Array, bias: jax.Array | None) -> jax.Array:
        return part if bias is None else with_gradient_of(part + along(cast(bias, x), x).astype(x.dtype), bias)

    return tuple(biased(part, bias) for part, bias in zip(parts, biases, strict=True))


def contract(spec: str, x: jax.Array, kernel: jax.Array) -> jax.Array:
    """A product with a matrix in parts, in the dtype of `x`.

    Args:
      spec: of `jnp.einsum`, `"x,kernel->result"`, without a letter that occurs in one of them alone.
      x: floating.
      kernel: of any floating dtype.

    Returns:
      The product. The kernel's gradient is a sum in float32.
    """
    return _multiply(spec, x, (kernel,), (cast(kernel, x),))[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _multiply(spec: str, x: jax.Array, kernels: Parts, used: Parts) -> Parts:
    """Products with what is used of the kernels, which have the gradients."""
    return tuple(jnp.einsum(spec, x, kernel) for kernel in used)


def _multiply_forward(spec: str, x: jax.Array, kernels: Parts, used: Parts) -> tuple[Parts, tuple]:
    return _multiply(spec, x, kernels, used), (x, kernels, used)


def _multiply_backward(spec: str, saved: tuple, cotangents: Parts) -> tuple[jax.Array, Parts, None]:
    x, kernels, used = saved
    of_x, of_kernel, of_y = re.split(",|->", spec)

    def gradient(kernel: jax.Array, cotangent: jax.Array) -> jax.Array:
        found = jnp.einsum(f"{of_x},{of_y}->{of_kernel}", x, cotangent, preferred_element_type=jnp.float32)
        return found.astype(kernel.dtype)

    total, *products = (jnp.einsum(f"{of_y},{of_kernel}->{of_x}", c, k) for k, c in zip(used, cotangents, strict=True))
    for product in products:
        # Behind the barrier the sum so far is what a product is added to, in place, not another product.
        total = lax.optimization_barrier(total) + product
    return total, tuple(map(gradient, kernels, cotangents)), None


_multiply.defvjp(_multiply_forward, _multiply_backward)


@jax.custom_vjp
def with_gradient_of(x: jax.Array, added: jax.Array) -> jax.Array:
    """`x`, whose rows contain a vector that was added without gradient: its gradient comes from here.

    Args:
      x: [..., width], floating.
      added: [n], what was added to the first n columns.

    Returns:
      `x`. The gradient of `added` is that of `x` summed over rows in float32.
    """
    return x


def _sum_of_rows(added: jax.Array, of_x: jax.Array) -> tuple[jax.Array, jax.Array]:
    rows = tuple(range(of_x.ndim - 1))
    return of_x, of_x[..., : len(added)].sum(rows, dtype=jnp.float32).astype(added.dtype)


with_gradient_of.defvjp(lambda x, added: (x, added), _sum_of_rows)
