"""Portable backend in plain XLA: strips of rows."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Bool, Float, Int32

from infcl_jax.ops.pairwise_distillation.base import Block, Cotangents, Gradient, NeedsGrad, Side, Sums
from infcl_jax.ops.pairwise_lse.base import (
    Array,
    LogSum,
    constant,
    empty_log_sum,
    exp_below,
    finite_shift,
    matmul,
    similarities,
)
from infcl_jax.ops.pairwise_lse.chunking import (
    STRIP_ROWS,
    is_positive,
    padding_mask,
    positives,
    scan_strips,
    valid_pairs,
)
from infcl_jax.ops.pairwise_lse.stabilization import factor, shared_shift, shifted_log_sum


@dataclasses.dataclass(frozen=True)
class XlaStrips:
    """`base.Backend` in plain XLA that loops over strips of rows.

    Attributes:
      rows: rows of one strip, so that `rows * by` similarities are in memory; None: one strip for the whole block.
      shared: whether exponentials have one shared max-shift for each model. Otherwise the shifts are the maxima of rows
        and columns, so that all sums are exact.
    """

    rows: int | None = STRIP_ROWS
    shared: bool = True

    def forward(self, block: Block) -> tuple[Sums, Sums, Float[Array, "bx"]]:
        """Implement `base.Backend.forward`."""
        shifts = self._shifts(block)

        def strip(carry: Sums, rows: _Rows) -> tuple[Sums, tuple]:
            pairs = _pairs(block, rows)
            row, column = (_strip_sums(pairs, shifts, axis) for axis in (1, 0))
            positive = jnp.zeros_like(pairs.student[:, 0])
            if rows.labels is not None:
                positive = positives(pairs.student, rows.labels)
            return carry.merge(column), (row, positive)

        zeros = constant(block.y.shape[:1], 0, block.scale.dtype, varying_like=block.x)
        start = Sums(empty_log_sum(zeros), empty_log_sum(zeros), zeros)
        column, (row, positive) = scan_strips(strip, start, self._rows(block), self.rows)
        return row, column, positive

    def accumulators(self, block: Block, needs_grad: NeedsGrad, dtype: jnp.dtype) -> Gradient:
        """Implement `base.Backend.accumulators`."""
        return zero_accumulators(block.x, block.y, block, needs_grad, dtype)

    def backward(self, block: Block, cotangents: Cotangents, acc: Gradient) -> Gradient:
        """Implement `base.Backend.backward`."""
        shifts = self._shifts(block)

        def strip(carry: Gradient, rows: _Rows) -> tuple[Gradient, Array | None]:
            pairs = _pairs(block, rows)
            d_z = _strip_gradient(pairs, shifts, rows.side, cotangents.columns)
            if rows.labels is not None:
                positive = is_positive(rows.labels, block.y)
                d_z = d_z + jnp.where(positive, rows.d_positive[:, None], jnp.zeros_like(d_z))
            d_s = (block.scale * d_z).astype(block.x.dtype)
            d_y = None if carry.y is None else carry.y + matmul(d_s, rows.x, contract=(0, 0))
            d_scale = None if carry.scale is None else carry.scale + (d_z * pairs.s).sum()
            return Gradient(None, d_y, d_scale), None if acc.x is None else matmul(d_s, block.y, contract=(1, 0))

        # One strip after the other is added to the column gradients, in the accumulation dtype.
        y = None if acc.y is None else jnp.zeros_like(acc.y, block.scale.dtype)
        rows = self._rows(block)._replace(side=cotangents.rows, d_positive=cotangents.d_positive)
        carry, d_x = scan_strips(strip, Gradient(None, y, acc.scale), rows, self.rows)
        return carry._replace(
            x=None if acc.x is None else acc.x + d_x.astype(acc.x.dtype),
            y=None if acc.y is None else acc.y + carry.y.astype(acc.y.dtype),
        )

    def gradient(self, block: Block, acc: Gradient) -> Gradient:
        """Implement `base.Backend.gradient`."""
        del block
        return acc

    def _shifts(self, block: Block) -> tuple[Array | None, Array | None]:
        """Return both models' shared shifts; None: per row and column."""
        return (shared_shift(block.scale), shared_shift(block.teacher_scale)) if self.shared else (None, None)

    def _rows(self, block: Block) -> "_Rows":
        return _Rows(block.x, block.teacher_x, padding_mask(block.x_mask, len(block.x), self.rows), block.labels)


class _Rows(NamedTuple):
    """Row operands of a block, to be split into strips.

    `side` and `d_positive` are None in the forward pass.
    """

    x: Float[Array, "rows d"]
    teacher_x: Float[Array, "rows dt"]
    mask: Bool[Array, "rows"] | None
    labels: Int32[Array, "rows"] | None
    side: Side | None = None
    d_positive: Float[Array, "rows"] | None = None


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


def zero_accumulators(x: Array, y: Array, block: Block, needs_grad: NeedsGrad, dtype: jnp.dtype) -> Gradient:
    """Return zeros for every needed gradient; those of the features in `dtype`."""

    def zeros(shape: tuple[int, ...], needed: bool, dtype: jnp.dtype) -> Array | None:
        return constant(shape, 0, dtype, varying_like=x) if needed else None

    return Gradient(
        zeros(x.shape, needs_grad.x, dtype),
        zeros(y.shape, needs_grad.y, dtype),
        zeros((), needs_grad.scale, block.scale.dtype),
    )


def _pairs(block: Block, rows: _Rows) -> _Pairs:
    s, teacher = similarities(rows.x, block.y), similarities(rows.teacher_x, block.teacher_y)
    negative = None if rows.labels is None else ~is_positive(rows.labels, block.y)
    return _Pairs(
        s,
        block.scale * s,
        block.teacher_scale * teacher.astype(block.teacher_scale.dtype),
        valid_pairs(rows.mask, block.y_mask),
        valid_pairs(rows.mask, block.y_mask, negative),
    )


def _strip_sums(pairs: _Pairs, shifts: tuple[Array | None, Array | None], axis: int) -> Sums:
    """Sum over `axis` of a strip."""
    negatives, _ = _log_sum(pairs.student, pairs.negative, shifts[0], axis)
    teacher, f = _log_sum(pairs.teacher, pairs.valid, shifts[1], axis)
    return Sums(negatives, teacher, (f * (pairs.teacher - pairs.student)).sum(axis))


def _log_sum(
    z: Float[Array, "rows columns"], valid: Bool[Array, "#rows #columns"] | None, shift: Array | None, axis: int
) -> tuple[LogSum, Float[Array, "rows columns"]]:
    """Return the log-sum-exp over an axis and its terms.

    Without a shared shift, the shift is the maximum.
    """
    if shift is not None:
        e = _where(valid, jnp.exp(z - shift))
        return shifted_log_sum(shift, e.sum(axis)), e
    largest = z if valid is None else jnp.where(valid, z, jnp.full_like(z, -jnp.inf))
    largest = largest.max(axis)
    e = _where(valid, exp_below(z, jnp.expand_dims(finite_shift(largest), axis)))
    return LogSum(largest, e.sum(axis)), e


def _strip_gradient(
    pairs: _Pairs, shifts: tuple[Array | None, Array | None], rows: Side, columns: Side
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
            e = exp_below(z, jnp.expand_dims(top, axis))
            d_z = d_z + _where(valid, e) * jnp.expand_dims(factor(sums, weight), axis)
        return d_z

    sides = ((1, rows), (0, columns))
    student_terms = [(axis, (side.sums.negatives, side.d_negatives)) for axis, side in sides]
    teacher_terms = [(axis, (side.sums.teacher, side.d_gap)) for axis, side in sides]
    student = softmax(pairs.student, pairs.negative, shifts[0], student_terms)
    return student - softmax(pairs.teacher, pairs.valid, shifts[1], teacher_terms)


def _where(valid: Array | None, values: Array) -> Array:
    return values if valid is None else jnp.where(valid, values, jnp.zeros_like(values))
