"""Ring over devices and custom VJP of the pairwise sigmoid loss."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import CustomVJPPrimal, custom_vjp_primal_tree_values
from jaxtyping import Bool, Float, Int32

from infcl_jax.ops.common.derivatives import not_reversed
from infcl_jax.ops.pairwise_lse import ring
from infcl_jax.ops.pairwise_lse.base import Array, AxisName, accumulation_dtype, add_trees
from infcl_jax.ops.pairwise_lse.vjp import (
    HESSIAN_PRODUCT,
    decode_perturbed,
    encode_perturbed,
    instantiate,
    power_of_two_bound,
    scaled,
)
from infcl_jax.ops.pairwise_sigmoid.base import (
    UNMATCHED_COLUMN,
    UNMATCHED_ROW,
    Backend,
    Block,
    Gradient,
    NeedsGrad,
    Sums,
)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Static arguments of one call."""

    backend: Backend
    axis_name: AxisName | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def blockwise(
    plan: Plan,
    x: Float[Array, "b d"],
    y: Float[Array, "b d"],
    scale: Float[Array, ""],
    bias: Float[Array, ""],
    x_mask: Bool[Array, "b"] | None,
    y_mask: Bool[Array, "b"] | None,
    x_ids: Int32[Array, "b"] | None,
    y_ids: Int32[Array, "b"] | None,
) -> Sums:
    """Compute the row sums over the columns of all devices, with a custom VJP.

    The arrays are the fields of this device's `base.Block`. Without ids, the positive of row i is column i of the same
    device.
    """
    return _sums(plan, Block(x, y, scale, bias, x_mask, y_mask, x_ids, y_ids))


def _sums(plan: Plan, block: Block) -> Sums:
    def compare(columns: tuple, own: bool) -> tuple[Sums, None]:
        return plan.backend.forward(_with_columns(block, columns, 0, own)), None

    return ring.sweep(compare, _column_operands(block), add_trees, plan.axis_name)[0]


def _forward(plan: Plan, *primals: CustomVJPPrimal | None) -> tuple[Sums, tuple]:
    block = Block(*custom_vjp_primal_tree_values(primals))
    return _sums(plan, block), (block, encode_perturbed(primals[:4]))


def _backward(plan: Plan, residuals: tuple, cotangents: Sums) -> tuple:
    block, perturbed = residuals
    needs_grad = NeedsGrad(*decode_perturbed(perturbed))
    cotangents = Sums(*(instantiate(c, block.x) for c in cotangents))
    grad_scale = power_of_two_bound(cotangents, plan.axis_name)
    grads = _gradient(plan, block, Sums(*(c / grad_scale for c in cotangents)), needs_grad)
    # Multiplying by a power of two after the GEMMs is exact and keeps dS from underflow.
    feature_scale = jnp.where(block.scale == 0, jnp.zeros_like(grad_scale), grad_scale)
    d_x, d_y = (None if g is None else scaled(g, feature_scale, block.x.dtype) for g in (grads.x, grads.y))
    d_scale, d_bias = (None if g is None else g * grad_scale for g in (grads.scale, grads.bias))
    return *not_reversed((d_x, d_y, d_scale, d_bias), HESSIAN_PRODUCT), None, None, None, None


def _gradient(plan: Plan, block: Block, cotangents: Sums, needs_grad: NeedsGrad) -> Gradient:
    """Compute the gradients of this device's rows, columns and scalars; the column accumulators rotate."""
    backend, axis_name = plan.backend, plan.axis_name
    dtype = accumulation_dtype(block.x.dtype) if ring.ring_axes(axis_name) else block.x.dtype
    init = backend.accumulators(block, needs_grad, dtype)

    def compare(first: int, columns: tuple, local: Gradient, d_y: Array | None, own: bool) -> tuple[Gradient, Any]:
        step_block = _with_columns(block, columns, first, own)
        acc = backend.backward(step_block, cotangents, local._replace(y=d_y))
        return acc._replace(y=None), acc.y

    columns, local = _column_operands(block), init._replace(y=None)
    local, d_y = ring.accumulate(compare, columns, local, init.y, axis_name)
    return backend.gradient(block, local._replace(y=d_y))


blockwise.defvjp(_forward, _backward, symbolic_zeros=True)


def _column_operands(block: Block) -> tuple:
    return block.y, block.y_mask, block.y_ids


def _with_columns(block: Block, operands: tuple, first: int, own: bool) -> Block:
    """Return the block with other columns.

    `first` is the index of the first of them on the device that owns them.
    """
    y, y_mask, y_ids = operands
    x_ids = block.x_ids
    if x_ids is None and own:  # own pairs
        x_ids = _numbers(0, block.x.shape[0], block.x_mask, UNMATCHED_ROW)
        y_ids = _numbers(first, y.shape[0], y_mask, UNMATCHED_COLUMN)
    return block._replace(y=y, y_mask=y_mask, x_ids=x_ids, y_ids=y_ids)


def _numbers(first: int, count: int, mask: Bool[Array, "{count}"] | None, unmatched: int) -> Int32[Array, "{count}"]:
    numbers = first + jnp.arange(count, dtype=jnp.int32)
    return numbers if mask is None else jnp.where(mask, numbers, jnp.full_like(numbers, unmatched))
