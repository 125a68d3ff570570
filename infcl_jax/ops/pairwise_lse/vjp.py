"""Custom VJP of a strategy and its backend.

With a shared scale, the shared max-shift is tried first. If its sums are not exact, the general path recomputes them
(see `stabilization`).
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero, custom_vjp_primal_tree_values
from jaxtyping import Bool, Float, Int32

from infcl_jax.ops.common.derivatives import not_reversed
from infcl_jax.ops.pairwise_lse.base import (
    Array,
    AxisName,
    Backend,
    Block,
    Cotangents,
    Gradient,
    NeedsGrad,
    PositiveCotangents,
    PositiveLogits,
    Results,
    Strategy,
    Sums,
    constant,
    varying_over,
)
from infcl_jax.ops.pairwise_lse.chunking import loop_over_slices, update_rows
from infcl_jax.ops.pairwise_lse.stabilization import all_within_range, is_shared, per_sample

# Rows of a gradient that are scaled at a time: 64 MiB in fp32 for 512 features.
SCALED_ROWS = 1 << 15
HESSIAN_PRODUCT = "use forward over reverse, such as jax.jvp of jax.grad"


@dataclasses.dataclass(frozen=True)
class Plan:
    """Static arguments of one call."""

    strategy: Strategy
    backend: Backend
    axis_name: AxisName | None
    exclude: bool
    columns: bool


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def blockwise(
    plan: Plan,
    x: Float[Array, "bx d"],
    y: Float[Array, "by d"],
    x_scale: Float[Array, ""] | Float[Array, "bx"],
    y_scale: Float[Array, "by"] | None,
    x_mask: Bool[Array, "bx"] | None,
    y_mask: Bool[Array, "by"] | None,
    labels: Int32[Array, "bx"] | None,
    x_ids: Int32[Array, "bx"] | None,
    y_ids: Int32[Array, "by"] | None,
    x_count: Int32[Array, "bx"] | None,
    y_count: Int32[Array, "by"] | None,
) -> Results:
    """Compute row and column log-sum-exps and positives, with a custom VJP.

    The arrays are the fields of this device's `base.Block`, and the counts of `positives.Groups`. The results are over
    all devices.
    """
    block = Block(x, y, x_scale, y_scale, x_mask, y_mask, labels, x_ids, y_ids)
    return _logarithms(block, _sums(plan, block, (x_count, y_count)).final)


class _ForwardSums(NamedTuple):
    """Forward sums of this device over all devices.

    Attributes:
      first: sums of the first attempt, with the shared shift if the scale is shared.
      exact: whether the first sums of all devices are exact; None with per-sample scales.
      final: exact sums.
    """

    first: Sums
    exact: Bool[Array, ""] | None
    final: Sums


def _sums(plan: Plan, block: Block, counts: tuple[Array | None, Array | None]) -> _ForwardSums:
    """Compute the sums of this device's rows and columns over all devices."""
    axis_name = plan.axis_name

    def sums(block: Block) -> Sums:
        return plan.strategy.forward(
            plan.backend, block, axis_name=axis_name, exclude=plan.exclude, columns=plan.columns
        )

    first = sums(block)
    if not is_shared(block):
        return _ForwardSums(first, None, first)
    # One decision for all blocks and devices: it costs one collective and, on GPUs, one host synchronization.
    exact = all_within_range(block, first, counts, 1 if axis_name is None else lax.axis_size(axis_name))
    if axis_name is not None:
        exact = lax.pmin(varying_over(exact.astype(jnp.int32), axis_name), axis_name) > 0
    return _ForwardSums(first, exact, unless_exact(exact, first, lambda: sums(per_sample(block, plan.columns))))


def unless_exact[T](exact: Bool[Array, ""], value: T, recompute: Callable[[], T]) -> T:
    """Return `value` if `exact`, else `recompute()`.

    On GPUs the host evaluates the condition, so it synchronizes on `exact`. Work enqueued before is not delayed. A loop
    with zero iterations returns `value` without a copy, unlike a conditional.
    """
    return lax.while_loop(lambda state: ~state[0], lambda _: (jnp.ones_like(exact), recompute()), (exact, value))[1]


def _logarithms(block: Block, sums: Sums) -> Results:
    row, column = sums.row.log(), None if sums.column is None else sums.column.log()
    if sums.row_positives is None:
        return row, column, sums.positive
    y_scale = block.x_scale if block.y_scale is None else block.y_scale
    sides = ((block.x_scale, sums.row_positives), (y_scale, sums.column_positives))
    rows, columns = (None if p is None else PositiveLogits(p.lse.log(), scale * p.similarity) for scale, p in sides)
    return row, column, (rows, columns)


def _forward(plan: Plan, *primals: CustomVJPPrimal | None) -> tuple:
    *fields, x_count, y_count = custom_vjp_primal_tree_values(primals)
    block = Block(*fields)
    sums = _sums(plan, block, (x_count, y_count))
    return _logarithms(block, sums.final), (block, sums, encode_perturbed(primals[:4]))


def _backward(plan: Plan, residuals: tuple, cotangents: tuple) -> tuple:
    block, sums, perturbed = residuals
    needs_grad = NeedsGrad(*decode_perturbed(perturbed))
    cotangents = jax.tree.map(lambda c: instantiate(c, block.x), cotangents)
    grad_scale = power_of_two_bound(cotangents, plan.axis_name)
    cotangents = jax.tree.map(lambda d: d / grad_scale, cotangents)

    def gradient(block: Block, sums: Sums, needs_grad: NeedsGrad) -> Gradient:
        grads = plan.strategy.backward(
            plan.backend,
            block,
            _with_sums(cotangents, sums),
            axis_name=plan.axis_name,
            exclude=plan.exclude,
            needs_grad=needs_grad,
        )
        # The cotangents of a mean contain 1/b. Multiplying by a power of two after the GEMMs is exact and keeps dS from
        # underflow.
        d_x, d_y = (None if g is None else scaled(g, grad_scale, block.x.dtype) for g in (grads.x, grads.y))
        x_scale, y_scale = (None if g is None else g * grad_scale for g in (grads.x_scale, grads.y_scale))
        return Gradient(d_x, d_y, x_scale, y_scale)

    def recompute() -> Gradient:
        # The gradient of a shared scale is the sum over its per-sample copies.
        per_sample_needs_grad = needs_grad._replace(y_scale=needs_grad.x_scale)
        grads = gradient(per_sample(block, plan.columns), sums.final, per_sample_needs_grad)
        if not needs_grad.x_scale:
            return grads
        x_scale = grads.x_scale.sum()
        return grads._replace(x_scale=x_scale if grads.y_scale is None else x_scale + grads.y_scale.sum(), y_scale=None)

    # Uses the first sums whether they are exact or not, so that the backward pass is enqueued before the host
    # synchronizes.
    grads = gradient(block, sums.first, needs_grad)
    if sums.exact is not None:
        grads = unless_exact(sums.exact, grads, recompute)
    grads = not_reversed(grads, f'{HESSIAN_PRODUCT}, or implementation="dense" or "local"')
    return *grads, *[None] * (len(Block._fields) + 2 - len(grads))


def _with_sums(cotangents: Results, sums: Sums) -> Cotangents:
    """Join the forward results with their cotangents."""
    d_row, d_column, d_positive = cotangents
    if sums.row_positives is None:
        return Cotangents(sums.row, d_row, sums.column, d_column, sums.positive, d_positive)
    sides = zip((sums.row_positives, sums.column_positives), d_positive, strict=True)
    positives = (None if p is None else PositiveCotangents(p.lse, d.lse, d.sum) for p, d in sides)
    return Cotangents(sums.row, d_row, sums.column, d_column, sums.positive, None, *positives)


blockwise.defvjp(_forward, _backward, symbolic_zeros=True)


def encode_perturbed(primals: Sequence[CustomVJPPrimal | None]) -> Bool[Array, "0 *flags"]:
    """Encode which arguments are perturbed as the shape of an empty residual.

    Array shapes belong to one trace, the pytree structure of residuals does not: JAX stores one structure for each
    `custom_vjp` call and overwrites it when the forward rule is traced again (tests/ops/test_jax_residuals.py).
    Flags in the structure would give the backward rule of one trace those of another.
    """
    return jnp.zeros((0, *(int(p is not None and p.perturbed) for p in primals)), bool)


def decode_perturbed(perturbed: Bool[Array, "0 *flags"]) -> tuple[bool, ...]:
    """Return the flags encoded by `encode_perturbed`."""
    return tuple(map(bool, perturbed.shape[1:]))


def instantiate(cotangent: Array | SymbolicZero, like: Array) -> Array:
    """Return a cotangent as an array that varies over the mesh axes of `like`."""
    if isinstance(cotangent, SymbolicZero):
        return constant(cotangent.shape, 0, cotangent.dtype, varying_like=like)
    return cotangent


def scaled(array: Float[Array, "n d"], factor: Float[Array, ""], dtype: jnp.dtype) -> Float[Array, "n d"]:
    """Multiply by `factor` and round once to `dtype`.

    If the dtype stays the same, slices are updated in place. XLA would otherwise allocate a copy of the whole array.
    """
    if array.dtype != dtype:
        return (array * factor).astype(dtype)

    def multiply(first: Array, count: int, array: Array) -> Array:
        rows = lax.dynamic_slice_in_dim(array, first, count)
        return update_rows(array, rows.astype(factor.dtype) * factor, first)

    return loop_over_slices(array.shape[0], min(array.shape[0], SCALED_ROWS), multiply, array)


def power_of_two_bound(cotangents: Any, axis_name: AxisName | None) -> Float[Array, ""]:
    """Return the power of two above the largest absolute cotangent.

    The maximum is over all devices. The result is 1 if all cotangents are zero.
    """
    # Constant almost everywhere, and JAX does not differentiate `pmax`.
    cotangents = jax.tree.map(lax.stop_gradient, cotangents)
    largest = jnp.stack([jnp.abs(c).max() for c in jax.tree.leaves(cotangents)]).max()
    if axis_name is not None:
        largest = lax.pmax(varying_over(largest, axis_name), axis_name)
    power = jnp.ldexp(jnp.ones_like(largest), jnp.frexp(largest)[1])
    return jnp.where(largest > 0, power, jnp.ones_like(power))
