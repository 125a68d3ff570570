"""Backend of distillation in plain XLA: strips of rows."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Bool, Float, Int32

from infcl_jax.ops.pairwise.base import (
    Array,
    LogSum,
    constant,
    empty_log_sum,
    exp_below,
    finite_shift,
    similarities,
)
from infcl_jax.ops.pairwise.distillation.block import (
    DistillationBlock,
    DistillationCotangents,
    DistillationGradient,
    DistillationSums,
    Side,
    SideSums,
)
from infcl_jax.ops.pairwise.max_shift import factor, shared_shift, shifted_log_sum
from infcl_jax.ops.pairwise.strips import Strips, is_positive, positives, scan_strips, valid_pairs, where_valid


@dataclasses.dataclass(frozen=True)
class DistillationStrips(Strips):
    """`base.Backend` of distillation in plain XLA that loops over strips of rows.

    Attributes:
      shared: whether exponentials have one shared max-shift for each model. Otherwise the shifts are the maxima of rows
        and columns, so that all sums are exact.
    """

    shared: bool = True

    def forward(self, block: DistillationBlock) -> DistillationSums:
        """Implement `base.Backend.forward`."""
        shifts = self._shifts(block)

        def strip(carry: SideSums, rows: "_DistillationRows") -> tuple[SideSums, tuple]:
            pairs = _pairs(block, rows)
            row, column = (_strip_sums(pairs, shifts, axis) for axis in (1, 0))
            positive = jnp.zeros_like(pairs.student[:, 0])
            if rows.labels is not None:
                positive = positives(pairs.student, rows.labels)
            return carry.merge(column), (row, positive)

        zeros = constant(block.y.shape[:1], 0, block.scale.dtype, varying_like=block.x)
        start = SideSums(empty_log_sum(zeros), empty_log_sum(zeros), zeros)
        columns, (rows, positive) = scan_strips(strip, start, self._rows(block), self.rows)
        return DistillationSums(rows, positive, columns)

    def backward(
        self, block: DistillationBlock, cotangents: DistillationCotangents, acc: DistillationGradient
    ) -> DistillationGradient:
        """Implement `base.Backend.backward`."""
        shifts = self._shifts(block)

        def pair_gradients(rows: "_DistillationRows") -> tuple[Array, tuple]:
            pairs = _pairs(block, rows)
            d_z = _strip_gradient(pairs, shifts, rows.side, cotangents.columns)
            if rows.labels is not None:
                positive = is_positive(rows.labels, block.y)
                d_z = d_z + jnp.where(positive, rows.d_positive[:, None], jnp.zeros_like(d_z))
            return block.scale * d_z, (d_z * pairs.s,)

        rows = self._rows(block)._replace(side=cotangents.rows, d_positive=cotangents.d_positive)
        return self.add_gradients(pair_gradients, block, rows, acc)

    def _shifts(self, block: DistillationBlock) -> tuple[Array | None, Array | None]:
        """Return both models' shared shifts; None: per row and column."""
        return (shared_shift(block.scale), shared_shift(block.teacher_scale)) if self.shared else (None, None)

    def _rows(self, block: DistillationBlock) -> "_DistillationRows":
        return _DistillationRows(block.x, block.teacher_x, self.padding_mask(block), block.labels)


class _DistillationRows(NamedTuple):
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


def _pairs(block: DistillationBlock, rows: _DistillationRows) -> _Pairs:
    s, teacher = similarities(rows.x, block.y), similarities(rows.teacher_x, block.teacher_y)
    negative = None if rows.labels is None else ~is_positive(rows.labels, block.y)
    return _Pairs(
        s,
        block.scale * s,
        block.teacher_scale * teacher.astype(block.teacher_scale.dtype),
        valid_pairs(rows.mask, block.y_mask),
        valid_pairs(rows.mask, block.y_mask, negative),
    )


def _strip_sums(pairs: _Pairs, shifts: tuple[Array | None, Array | None], axis: int) -> SideSums:
    """Sum over `axis` of a strip."""
    negatives, _ = _log_sum(pairs.student, pairs.negative, shifts[0], axis)
    teacher, f = _log_sum(pairs.teacher, pairs.valid, shifts[1], axis)
    return SideSums(negatives, teacher, (f * (pairs.teacher - pairs.student)).sum(axis))


def _log_sum(
    z: Float[Array, "rows columns"], valid: Bool[Array, "#rows #columns"] | None, shift: Array | None, axis: int
) -> tuple[LogSum, Float[Array, "rows columns"]]:
    """Return the log-sum-exp over an axis and its terms.

    Without a shared shift, the shift is the maximum.
    """
    if shift is not None:
        e = where_valid(valid, jnp.exp(z - shift))
        return shifted_log_sum(shift, e.sum(axis)), e
    largest = z if valid is None else jnp.where(valid, z, jnp.full_like(z, -jnp.inf))
    largest = largest.max(axis)
    e = where_valid(valid, exp_below(z, jnp.expand_dims(finite_shift(largest), axis)))
    return LogSum(largest, e.sum(axis)), e


def _strip_gradient(
    pairs: _Pairs, shifts: tuple[Array | None, Array | None], rows: Side, columns: Side
) -> Float[Array, "rows columns"]:
    """Compute the cotangents of the student's logits, without the positives' own term."""

    def softmax(z: Array, valid: Array | None, shift: Array | None, terms: Any) -> Array:
        """Sum `weight * exp(z - lse)` over rows and columns."""
        if shift is not None:
            row, column = (jnp.expand_dims(factor(*term), axis) for axis, term in terms)
            return where_valid(valid, jnp.exp(z - shift) * (row + column))
        d_z = jnp.zeros_like(z)
        for axis, (sums, weight) in terms:
            top = jnp.where(sums.sumexp > 0, sums.shift, jnp.full_like(sums.shift, jnp.inf))
            e = exp_below(z, jnp.expand_dims(top, axis))
            d_z = d_z + where_valid(valid, e) * jnp.expand_dims(factor(sums, weight), axis)
        return d_z

    sides = ((1, rows), (0, columns))
    student_terms = [(axis, (side.sums.negatives, side.d_negatives)) for axis, side in sides]
    teacher_terms = [(axis, (side.sums.teacher, side.d_gap)) for axis, side in sides]
    student = softmax(pairs.student, pairs.negative, shifts[0], student_terms)
    return student - softmax(pairs.teacher, pairs.valid, shifts[1], teacher_terms)


BACKEND = DistillationStrips
