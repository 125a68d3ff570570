"""Ring over devices and custom VJP of contrastive and distillation terms.

Student and teacher blocks rotate around the ring together. With the student's
logits `z_ij = scale * <image_i, text_j>` and the teacher's logits `t_ij` and softmax `p_ij` along a row:

    gap_i = sum_j p_ij (t_ij - z_ij) - log sum_j exp(t_ij)        KL(p_i || softmax(z_i)) = gap_i + log sum_j exp(z_ij)

Columns are alike. Backward forms all terms of `dL/dz_ij` of a pair in the accumulation dtype before it is rounded for
the products: two softmaxes that almost agree cancel, so rounding each of them first would leave only noise.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import CustomVJPPrimal, custom_vjp_primal_tree_values
from jaxtyping import Bool, Float

from infcl_jax.ops.common.derivatives import not_reversed
from infcl_jax.ops.pairwise_distillation.base import (
    Backend,
    Block,
    Cotangents,
    Gradient,
    NeedsGrad,
    PairLogits,
    Side,
    Sums,
)
from infcl_jax.ops.pairwise_lse import ring
from infcl_jax.ops.pairwise_lse.base import Array, AxisName, accumulation_dtype, varying_over
from infcl_jax.ops.pairwise_lse.stabilization import within_range
from infcl_jax.ops.pairwise_lse.vjp import (
    HESSIAN_PRODUCT,
    decode_perturbed,
    encode_perturbed,
    instantiate,
    power_of_two_bound,
    scaled,
    unless_exact,
)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Static arguments of one call.

    Attributes:
      backend: backend whose exponentials have shared max-shifts.
      general: backend of the same results without a limit of their range, for sums that are not exact with `backend`.
      axis_name: mesh axes of the batch; None for one device.
    """

    backend: Backend
    general: Backend
    axis_name: AxisName | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def blockwise(
    plan: Plan,
    x: Float[Array, "b d"],
    y: Float[Array, "b d"],
    scale: Float[Array, ""],
    teacher_x: Float[Array, "b dt"],
    teacher_y: Float[Array, "b dt"],
    teacher_scale: Float[Array, ""],
    mask: Bool[Array, "b"] | None,
) -> PairLogits:
    """Compute the sums over all pairs that a contrastive loss with distillation needs.

    Memory is linear in the batch size. The gradient covers the student's features and scale. The arrays are fields of
    this device's `base.Block`. The positive of row i is column i of the same device.
    """
    return _forward_sums(plan, _block(x, y, scale, teacher_x, teacher_y, teacher_scale, mask))[0]


def _block(*operands: Array | None) -> Block:
    *fields, mask = operands
    labels = jnp.arange(len(fields[0]), dtype=jnp.int32)
    return Block(*fields)._replace(x_mask=mask, y_mask=mask, labels=labels)


def _forward_sums(plan: Plan, block: Block) -> tuple[PairLogits, tuple]:
    """Return the logits, and `(first sums, final sums, whether the first are exact)`."""
    first = _sweep(plan, plan.backend, block)
    devices = 1 if plan.axis_name is None else lax.axis_size(plan.axis_name)
    exact = jnp.ones((), bool)
    for sums in first[:2]:
        for lse in (sums.negatives, sums.teacher):
            exact &= within_range(lse.sumexp, block.x_mask, len(block.x) * devices)
        difference = sums.difference
        if block.x_mask is not None:
            difference = jnp.where(block.x_mask, difference, jnp.zeros_like(difference))
        exact &= jnp.isfinite(difference).all()
    if plan.axis_name is not None:  # one decision for all devices
        exact = lax.pmin(varying_over(exact.astype(jnp.int32), plan.axis_name), plan.axis_name) > 0
    final = unless_exact(exact, first, lambda: _sweep(plan, plan.general, block))
    rows, columns, positive = final
    logits = PairLogits(rows.negatives.log(), columns.negatives.log(), positive, rows.gap(), columns.gap())
    return logits, (first, final, exact)


def _sweep(plan: Plan, backend: Backend, block: Block) -> tuple[Sums, Sums, Array]:
    """Return the sums of rows and of columns, and the positives' logits."""

    def compare(columns: tuple, own: bool) -> tuple[tuple, Sums]:
        row, column, positive = backend.forward(_with_columns(block, columns, 0, own))
        return (row, positive), column

    def merge(a: Any, b: Any) -> Any:
        return a.merge(b) if isinstance(a, Sums) else (a[0].merge(b[0]), a[1] + b[1])

    (rows, positive), columns = ring.sweep(compare, _column_operands(block), merge, plan.axis_name)
    return rows, columns, positive


def _forward(plan: Plan, *primals: CustomVJPPrimal | None) -> tuple[PairLogits, tuple]:
    block = _block(*custom_vjp_primal_tree_values(primals))
    logits, sums = _forward_sums(plan, block)
    return logits, (block, *sums, encode_perturbed(primals[:3]))


def _backward(plan: Plan, residuals: tuple, d_logits: PairLogits) -> tuple:
    block, first, final, exact, perturbed = residuals
    needs_grad = NeedsGrad(*decode_perturbed(perturbed))
    d_logits = PairLogits(*(instantiate(d, block.x) for d in d_logits))
    grad_scale = power_of_two_bound(d_logits, plan.axis_name)
    d_logits = PairLogits(*(d / grad_scale for d in d_logits))

    def gradient(backend: Backend, sums: tuple[Sums, Sums, Array]) -> Gradient:
        rows = Side(sums[0], d_logits.row_negatives, d_logits.row_gap)
        columns = Side(sums[1], d_logits.column_negatives, d_logits.column_gap)
        cotangents = Cotangents(rows, columns, d_logits.positive)
        grads = _gradient(plan.axis_name, backend, block, cotangents, needs_grad)
        # Multiplying by a power of two after the GEMMs is exact and keeps dS from underflow, as 1/b is in the
        # cotangents. A backend may replace a scale of zero, whose gradients of the features are zero.
        feature_scale = jnp.where(block.scale == 0, jnp.zeros_like(grad_scale), grad_scale)
        d_x, d_y = (None if g is None else scaled(g, feature_scale, block.x.dtype) for g in (grads.x, grads.y))
        return Gradient(d_x, d_y, None if grads.scale is None else grads.scale * grad_scale)

    # The first sums are used whether they are exact or not, so that the host need not wait for them.
    grads = unless_exact(exact, gradient(plan.backend, first), lambda: gradient(plan.general, final))
    return *not_reversed(grads, f'{HESSIAN_PRODUCT}, or implementation="dense"'), None, None, None, None


def _gradient(
    axis_name: AxisName | None, backend: Backend, block: Block, cotangents: Cotangents, needs_grad: NeedsGrad
) -> Gradient:
    """Compute the gradients of this device's rows, columns and scale; the column accumulators rotate."""
    dtype = accumulation_dtype(block.x.dtype) if ring.ring_axes(axis_name) else block.x.dtype
    init = backend.accumulators(block, needs_grad, dtype)

    def compare(first: int, column_slice: tuple, local: Gradient, d_y: Array | None, own: bool) -> tuple[Gradient, Any]:
        columns, side = column_slice
        step_block = _with_columns(block, columns, first, own)
        acc = backend.backward(step_block, cotangents._replace(columns=side), local._replace(y=d_y))
        return acc._replace(y=None), acc.y

    columns, local = (_column_operands(block), cotangents.columns), init._replace(y=None)
    local, d_y = ring.accumulate(compare, columns, local, init.y, axis_name)
    return backend.gradient(block, local._replace(y=d_y))


blockwise.defvjp(_forward, _backward, symbolic_zeros=True)


def _column_operands(block: Block) -> tuple:
    return block.y, block.teacher_y, block.y_mask


def _with_columns(block: Block, operands: tuple, first: int, own: bool) -> Block:
    """Return the block with other columns.

    `first` is the index of the first of them on the device that owns them.
    """
    y, teacher_y, y_mask = operands
    return block._replace(y=y, teacher_y=teacher_y, y_mask=y_mask, labels=block.labels - first if own else None)
