"""Contrastive and distillation terms of all pairs from one sweep.

Student and teacher blocks rotate around the ring together. With the student's
logits `z_ij = scale * <image_i, text_j>` and the teacher's logits `t_ij` and softmax `p_ij` along a row:

    gap_i = sum_j p_ij (t_ij - z_ij) - log sum_j exp(t_ij)        KL(p_i || softmax(z_i)) = gap_i + log sum_j exp(z_ij)

Columns are alike. Backward forms all terms of `dL/dz_ij` of a pair in the accumulation dtype before it is rounded for
the products: two softmaxes that almost agree cancel, so rounding each of them first would leave only noise.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Bool, Float

from infcl_jax.losses.teacher_student import Logits, Operands, teacher_logits
from infcl_jax.ops.pairwise_lse import ring
from infcl_jax.ops.pairwise_lse.base import (
    Array,
    AxisName,
    LogSum,
    constant,
    empty_log_sum,
    finite_shift,
    matmul,
    similarities,
    varying_over,
)
from infcl_jax.ops.pairwise_lse.chunking import is_positive, padding_mask, positives, scan_strips, valid_pairs
from infcl_jax.ops.pairwise_lse.stabilization import factor, shared_shift, shifted_log_sum, within_range
from infcl_jax.ops.pairwise_lse.vjp import power_of_two_bound, unless_exact


@dataclasses.dataclass(frozen=True)
class Plan:
    """Static settings of one call.

    Attributes:
      axis_name: mesh axes of the batch; None for one device.
      strip_rows: rows whose similarities are in memory at once; None: all rows of a block.
    """

    axis_name: AxisName | None
    strip_rows: int | None


class _Sums(NamedTuple):
    """Sums over the columns of each row, or over the rows of each column.

    Attributes:
      negatives: student's log-sum-exp over the negatives `[n]`.
      teacher: teacher's log-sum-exp over all pairs `[n]`.
      difference: sum of the teacher's exponentials, shifted as in `teacher`, times the difference of the teacher's from
        the student's logits `[n]`.
    """

    negatives: LogSum
    teacher: LogSum
    difference: Array

    def merge(self, other: "_Sums") -> "_Sums":
        """Return the sums over both sets of terms."""
        teacher = self.teacher.merge(other.teacher)
        shift = finite_shift(teacher.shift)
        first, second = (sums.difference * jnp.exp(sums.teacher.shift - shift) for sums in (self, other))
        return _Sums(self.negatives.merge(other.negatives), teacher, first + second)

    def gap(self) -> Array:
        """Compute `Logits.row_gap`; 0 for an empty sum."""
        lse = self.teacher.log()
        return factor(self.teacher, self.difference) - jnp.where(jnp.isneginf(lse), jnp.zeros_like(lse), lse)


class _Rows(NamedTuple):
    """Row operands, to be split into strips.

    `sums` and `d_sums`, cotangents `(d_negatives, d_gap)`, and `d_positive` are None in the forward pass.
    """

    x: Array
    teacher_x: Array
    labels: Array
    mask: Array | None
    sums: _Sums | None = None
    d_sums: tuple[Array, Array] | None = None
    d_positive: Array | None = None


class _Pairs(NamedTuple):
    """Logits of a strip of rows and the columns of a block.

    Attributes:
      s: student's similarities `[rows, columns]`.
      student: student's logits.
      teacher: teacher's logits.
      valid: False for masked pairs; None: no pair is masked.
      negative: False for masked and positive pairs; None: all pairs are negatives.
    """

    s: Array
    student: Array
    teacher: Array
    valid: Array | None
    negative: Array | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def pair_logits(plan: Plan, *operands: Array | None) -> Logits:
    """Compute the sums over all pairs that a contrastive loss with distillation needs.

    Memory is linear in the batch size. The gradient covers the student's features and scale.

    Args:
      plan: settings.
      *operands: fields of this device's `Operands`.
    """
    return _forward(plan, *operands)[0]


def _forward(plan: Plan, *fields: Array | None) -> tuple[Logits, tuple]:
    operands = Operands(*fields)
    first = _sweep(plan, operands, shared=True)
    devices = 1 if plan.axis_name is None else lax.axis_size(plan.axis_name)
    exact = jnp.ones((), bool)
    for sums in first[:2]:
        for lse in (sums.negatives, sums.teacher):
            exact &= within_range(lse.sumexp, operands.mask, len(operands.x) * devices)
        exact &= jnp.isfinite(sums.difference).all()
    if plan.axis_name is not None:  # one decision for all devices
        exact = lax.pmin(varying_over(exact.astype(jnp.int32), plan.axis_name), plan.axis_name) > 0
    final = unless_exact(exact, first, lambda: _sweep(plan, operands, shared=False))
    rows, columns, positive = final
    logits = Logits(rows.negatives.log(), columns.negatives.log(), positive, rows.gap(), columns.gap())
    return logits, (operands, first, final, exact)


def _sweep(plan: Plan, operands: Operands, *, shared: bool) -> tuple[_Sums, _Sums, Array]:
    """Return the sums of rows and of columns, and the positives' logits."""
    shifts = _shifts(operands, shared)

    def compare(columns: tuple, own: bool) -> tuple[tuple, _Sums]:
        def strip(carry: _Sums, rows: _Rows) -> tuple[_Sums, tuple]:
            pairs = _pairs(operands, rows, columns, own)
            row, column = (_strip_sums(pairs, shifts, axis) for axis in (1, 0))
            positive = positives(pairs.student, rows.labels) if own else jnp.zeros_like(pairs.student[:, 0])
            return carry.merge(column), (row, positive)

        zeros = constant(columns[0].shape[:1], 0, operands.scale.dtype, varying_like=operands.x)
        start = _Sums(empty_log_sum(zeros), empty_log_sum(zeros), zeros)
        column, local = scan_strips(strip, start, _rows(plan, operands), plan.strip_rows)
        return local, column

    def merge(a: Any, b: Any) -> Any:
        return a.merge(b) if isinstance(a, _Sums) else (a[0].merge(b[0]), a[1] + b[1])

    (rows, positive), columns = ring.sweep(
        compare, (operands.y, operands.teacher_y, operands.mask), merge, plan.axis_name
    )
    return rows, columns, positive


def _backward(plan: Plan, residuals: tuple, d_logits: Logits) -> tuple:
    operands, first, final, exact = residuals
    grad_scale = power_of_two_bound(d_logits, plan.axis_name)  # keeps dS from underflow, as 1/b is in the cotangents
    d_logits = jax.tree.map(lambda d: d / grad_scale, d_logits)
    # The first sums are used whether they are exact or not, so that the host need not wait for them.
    grads = _gradients(plan, operands, first, d_logits, shared=True)
    grads = unless_exact(exact, grads, lambda: _gradients(plan, operands, final, d_logits, shared=False))
    d_x, d_y, d_scale = (g * grad_scale for g in grads)
    return d_x.astype(operands.x.dtype), d_y.astype(operands.y.dtype), d_scale, None, None, None, None


def _gradients(
    plan: Plan, operands: Operands, sums: tuple[_Sums, _Sums, Array], d_logits: Logits, *, shared: bool
) -> tuple[Array, Array, Array]:
    """Compute the gradients of the student's features and scale, in the accumulation dtype."""
    row_sums, column_sums, _ = sums
    shifts, dtype = _shifts(operands, shared), operands.scale.dtype
    d_columns = d_logits.column_negatives, d_logits.column_gap
    slices = ring.split((operands.y, operands.teacher_y, operands.mask, column_sums, d_columns), plan.axis_name)

    def compare(i: int, column_slice: tuple, local: tuple, d_y: Array, own: bool) -> tuple[tuple, Array]:
        *columns, sums, d_sums = column_slice

        def strip(carry: tuple, rows: _Rows) -> tuple[tuple, Array]:
            d_y, d_scale = carry
            if own:
                rows = rows._replace(labels=rows.labels - slices[i][0])
            pairs = _pairs(operands, rows, columns, own)
            d_z = _strip_gradient(pairs, shifts, (rows.sums, rows.d_sums), (sums, d_sums))
            if own:
                positive = is_positive(rows.labels, columns[0])
                d_z = d_z + jnp.where(positive, rows.d_positive[:, None], jnp.zeros_like(d_z))
            d_s = (operands.scale * d_z).astype(operands.x.dtype)
            d_y = d_y + matmul(d_s, rows.x, contract=(0, 0))
            return (d_y, d_scale + (d_z * pairs.s).sum()), matmul(d_s, columns[0], contract=(1, 0))

        d_x, d_scale = local
        d_rows = d_logits.row_negatives, d_logits.row_gap
        rows = _rows(plan, operands)._replace(sums=row_sums, d_sums=d_rows, d_positive=d_logits.positive)
        (d_y, d_scale), d_x_slice = scan_strips(strip, (d_y, d_scale), rows, plan.strip_rows)
        return (d_x + d_x_slice, d_scale), d_y

    local = tuple(constant(shape, 0, dtype, varying_like=operands.x) for shape in (operands.x.shape, ()))
    remote = [constant(columns[0].shape, 0, dtype, varying_like=operands.x) for _, columns in slices]
    local, remote = ring.accumulate(compare, [columns for _, columns in slices], local, remote, plan.axis_name)
    return local[0], jnp.concatenate(remote), local[1]


pair_logits.defvjp(_forward, _backward)


def _shifts(operands: Operands, shared: bool) -> tuple[Array | None, Array | None]:
    """Return both models' shared shifts; None: per row and column."""
    return (shared_shift(operands.scale), shared_shift(operands.teacher_scale)) if shared else (None, None)


def _rows(plan: Plan, operands: Operands) -> _Rows:
    labels = jnp.arange(len(operands.x), dtype=jnp.int32)
    return _Rows(operands.x, operands.teacher_x, labels, padding_mask(operands.mask, len(operands.x), plan.strip_rows))


def _pairs(operands: Operands, rows: _Rows, columns: Any, own: bool) -> _Pairs:
    y, teacher_y, y_mask = columns
    s = similarities(rows.x, y)
    negative = ~is_positive(rows.labels, y) if own else None
    return _Pairs(
        s,
        operands.scale * s,
        teacher_logits(operands, rows.teacher_x, teacher_y),
        valid_pairs(rows.mask, y_mask),
        valid_pairs(rows.mask, y_mask, negative),
    )


def _strip_sums(pairs: _Pairs, shifts: tuple[Array | None, Array | None], axis: int) -> _Sums:
    """Sum over `axis` of a strip."""
    negatives, _ = _log_sum(pairs.student, pairs.negative, shifts[0], axis)
    teacher, f = _log_sum(pairs.teacher, pairs.valid, shifts[1], axis)
    return _Sums(negatives, teacher, (f * (pairs.teacher - pairs.student)).sum(axis))


def _log_sum(
    z: Float[Array, "rows columns"], valid: Bool[Array, "rows columns"] | None, shift: Array | None, axis: int
) -> tuple[LogSum, Float[Array, "rows columns"]]:
    """Return the log-sum-exp over an axis and its terms.

    Without a shared shift, the shift is the maximum.
    """
    if shift is not None:
        e = _where(valid, jnp.exp(z - shift))
        return shifted_log_sum(shift, e.sum(axis)), e
    largest = z if valid is None else jnp.where(valid, z, jnp.full_like(z, -jnp.inf))
    largest = largest.max(axis)
    e = _where(valid, jnp.exp(z - jnp.expand_dims(finite_shift(largest), axis)))
    return LogSum(largest, e.sum(axis)), e


def _strip_gradient(
    pairs: _Pairs,
    shifts: tuple[Array | None, Array | None],
    rows: tuple[_Sums, tuple[Array, Array]],
    columns: tuple[_Sums, tuple[Array, Array]],
) -> Float[Array, "rows columns"]:
    """Compute the cotangents of the student's logits, without the positives' own term."""

    def softmax(z: Array, valid: Array | None, shift: Array | None, terms: Any) -> Array:
        """Sum `weight * exp(z - lse)` over rows and columns."""
        if shift is not None:
            row, column = (jnp.expand_dims(factor(*term), axis) for axis, term in terms)
            return _where(valid, jnp.exp(z - shift) * (row + column))
        d_z = jnp.zeros_like(z)
        for axis, (sums, weight) in terms:
            top = jnp.where(sums.sumexp > 0, sums.shift, jnp.full_like(sums.shift, jnp.inf))
            e = jnp.exp(z - jnp.expand_dims(top, axis))
            d_z = d_z + _where(valid, e) * jnp.expand_dims(factor(sums, weight), axis)
        return d_z

    sides = ((1, rows), (0, columns))
    student = softmax(
        pairs.student, pairs.negative, shifts[0], [(axis, (sums.negatives, d[0])) for axis, (sums, d) in sides]
    )
    teacher = softmax(
        pairs.teacher, pairs.valid, shifts[1], [(axis, (sums.teacher, d[1])) for axis, (sums, d) in sides]
    )
    return student - teacher


def _where(valid: Array | None, values: Array) -> Array:
    return values if valid is None else jnp.where(valid, values, jnp.zeros_like(values))
