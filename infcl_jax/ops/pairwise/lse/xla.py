"""Portable backend in plain XLA.

It computes one exponential per pair with a shared scale, else up to two (see `max_shift`).
"""

import dataclasses
import functools
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Bool, Float, Int32

from infcl_jax.ops.pairwise.base import (
    Array,
    LogSum,
    accumulation_dtype,
    add_trees,
    constant,
    empty_log_sum,
    exp_below,
    finite_shift,
    matmul,
    similarities,
)
from infcl_jax.ops.pairwise.ids import is_match
from infcl_jax.ops.pairwise.lse.block import (
    LseBlock,
    LseCotangents,
    LseGradient,
    LseSums,
    PositiveCotangents,
    PositiveSums,
)
from infcl_jax.ops.pairwise.lse.guide import guided_pairs
from infcl_jax.ops.pairwise.lse.lone_positives import LonePositives
from infcl_jax.ops.pairwise.lse.positives import positive_sums, with_positives
from infcl_jax.ops.pairwise.max_shift import factor, shared_shift, shifted_log_sum, weighted
from infcl_jax.ops.pairwise.strips import Strips, is_positive, positives, scan_strips, valid_pairs, where_valid


@dataclasses.dataclass(frozen=True)
class LseStrips(Strips):
    """`base.Backend` of `pairwise_lse` in plain XLA that loops over strips of rows.

    Attributes:
      exclude: leave the positives out of the sums.
      columns: whether to compute column sums.
    """

    exclude: bool = False
    columns: bool = True

    def own_similarities(self, block: LseBlock, own: Int32[Array, "bx"]) -> Float[Array, "bx"]:
        """Return the guide's similarity of each row with the column `own`, from the same GEMMs as all others."""

        def strip(carry: None, rows: tuple[Array, Array]) -> tuple[None, Array]:
            guide, own = rows
            return carry, positives(similarities(guide, block.y_guide), own)

        return scan_strips(strip, None, (block.x_guide, own), self.rows)[1]

    def forward(self, block: LseBlock) -> LseSums:
        """Implement `base.Backend.forward`."""
        block = block._replace(x_mask=self.padding_mask(block))
        sums = self._shared_forward if block.shared else self._general_forward
        if block.x_ids is None or not block.shared:
            return sums(block)
        lone = LonePositives.of(block)
        return lax.cond(lone.only, lambda: lone.sums(block, sums), lambda: sums(block))

    def backward(self, block: LseBlock, cotangents: LseCotangents, acc: LseGradient) -> LseGradient:
        """Implement `base.Backend.backward`."""
        block = block._replace(x_mask=self.padding_mask(block))
        needs_grad = LseGradient(*(a is not None for a in acc))
        backward = self._shared_backward if block.shared else self._general_backward
        gradient = functools.partial(backward, needs_grad=needs_grad)
        if block.x_ids is None or not block.shared:
            return add_trees(acc, gradient(block, cotangents))
        lone = LonePositives.of(block)
        return add_trees(
            acc,
            lax.cond(
                lone.only, lambda: lone.gradient(block, cotangents, gradient), lambda: gradient(block, cotangents)
            ),
        )

    def _shared_forward(self, block: LseBlock) -> LseSums:
        shift = shared_shift(block.x_scale)

        def strip(carry: tuple, rows: _LseRows) -> tuple[tuple, tuple]:
            column, column_positives = carry
            s, e = _shared_exponentials(block, rows, shift)
            match = _match(block, rows)
            row_positives, strip_positives = positive_sums(
                match, s, lambda axis: shifted_log_sum(shift, where_valid(match, e).sum(axis)), columns=self.columns
            )
            e = where_valid(_valid(block, rows, self.exclude), e)
            in_row, in_column = _guided(block, rows)
            carry = column + where_valid(in_column, e).sum(0), _merge(column_positives, strip_positives)
            return carry, (where_valid(in_row, e).sum(1), _positives(s, rows.labels), row_positives)

        start = _column_zeros(block), _no_positives(block, self.columns)
        (column, column_positives), results = scan_strips(strip, start, _rows(block), self.rows)
        row, positive, row_positives = results
        row, column = shifted_log_sum(shift, row), shifted_log_sum(shift, column) if self.columns else None
        return LseSums(row, column, positive, row_positives, column_positives)

    def _general_forward(self, block: LseBlock) -> LseSums:
        def strip(carry: tuple, rows: _LseRows) -> tuple[tuple, tuple]:
            column, column_positives = carry
            s = similarities(rows.x, block.y)
            row_valid, column_valid = _valid_sides(block, rows, self.exclude)
            row = _log_sum(rows.scale[:, None] * s, row_valid, axis=1)
            if column is not None:
                column = column.merge(_log_sum(block.y_scale[None, :] * s, column_valid, axis=0))
            match, scales = _match(block, rows), _pair_scales(block, rows)
            row_positives, strip_positives = positive_sums(
                match, s, lambda axis: _log_sum(scales[axis] * s, match, axis), columns=self.columns
            )
            carry = column, _merge(column_positives, strip_positives)
            return carry, (row, _positives(s, rows.labels), row_positives)

        start = empty_log_sum(_column_zeros(block)) if self.columns else None, _no_positives(block, self.columns)
        (column, column_positives), results = scan_strips(strip, start, _rows(block), self.rows)
        row, positive, row_positives = results
        return LseSums(row, column, positive, row_positives, column_positives)

    def _shared_backward(self, block: LseBlock, cotangents: LseCotangents, needs_grad: LseGradient) -> LseGradient:
        scale, shift = block.x_scale, shared_shift(block.x_scale)
        column_factor = None if cotangents.column is None else factor(cotangents.column, cotangents.d_column)

        def strip(carry: tuple, rows: _LseBackwardRows) -> tuple[tuple, Array | None]:
            d_y, d_scale = carry
            s, e_all = _shared_exponentials(block, rows.operands, shift)
            e = where_valid(_valid(block, rows.operands, self.exclude), e_all)
            in_row, in_column = _guided(block, rows.operands)
            row_col_factor = _where_in_sum(in_row, factor(rows.sums, rows.d_row)[:, None])
            if column_factor is not None:
                row_col_factor = row_col_factor + _where_in_sum(in_column, column_factor[None, :])
            p = e * row_col_factor
            for side, axis in ((rows.positives, 1), (cotangents.column_positives, 0)):
                weights = functools.partial(_weighted_exponentials, e_all, axis=axis)
                p = with_positives(p, _match(block, rows.operands), side, weights, axis)
            d_s = _with_positive(block, rows, scale * p)
            if d_scale is not None:
                d_scale = d_scale + (p * s).sum()
            d_y, d_x = _feature_gradients(block, rows, d_s, d_y, needs_grad)
            return (d_y, d_scale), d_x

        start = (
            _zeros(block, block.y.shape) if needs_grad.y else None,
            _zeros(block, ()) if needs_grad.x_scale else None,
        )
        (d_y, d_scale), d_x = scan_strips(strip, start, _backward_rows(block, cotangents), self.rows)
        return LseGradient(d_x, d_y, d_scale, None)

    def _general_backward(self, block: LseBlock, cotangents: LseCotangents, needs_grad: LseGradient) -> LseGradient:
        column = cotangents.column

        def strip(carry: tuple, rows: _LseBackwardRows) -> tuple[tuple, tuple]:
            d_y, d_y_scale = carry
            s = similarities(rows.operands.x, block.y)
            row_valid, column_valid = _valid_sides(block, rows.operands, self.exclude)
            match = _match(block, rows.operands)
            alpha = rows.operands.scale[:, None]

            def positive_softmax(side: PositiveCotangents, scale: Array, axis: int) -> Array:
                return _weighted_softmax(scale * s, side.lse, side.d_lse, match, axis)

            p_row = _weighted_softmax(alpha * s, rows.sums, rows.d_row, row_valid, axis=1)
            row_softmax = functools.partial(positive_softmax, scale=alpha, axis=1)
            p_row = with_positives(p_row, match, rows.positives, row_softmax, axis=1)
            d_s = alpha * p_row
            if column is not None:
                beta = block.y_scale[None, :]
                p_column = _weighted_softmax(beta * s, column, cotangents.d_column, column_valid, axis=0)
                column_softmax = functools.partial(positive_softmax, scale=beta, axis=0)
                p_column = with_positives(p_column, match, cotangents.column_positives, column_softmax, axis=0)
                d_s = d_s + beta * p_column
                if d_y_scale is not None:
                    d_y_scale = d_y_scale + (p_column * s).sum(0)
            d_y, d_x = _feature_gradients(block, rows, _with_positive(block, rows, d_s), d_y, needs_grad)
            return (d_y, d_y_scale), (d_x, (p_row * s).sum(1) if needs_grad.x_scale else None)

        needs_y_scale = needs_grad.y_scale and column is not None
        start = (
            _zeros(block, block.y.shape) if needs_grad.y else None,
            _column_zeros(block) if needs_y_scale else None,
        )
        (d_y, d_y_scale), (d_x, d_x_scale) = scan_strips(strip, start, _backward_rows(block, cotangents), self.rows)
        return LseGradient(d_x, d_y, d_x_scale, d_y_scale)


class _LseRows(NamedTuple):
    """Row operands of a block, to be split into strips."""

    x: Float[Array, "rows d"]
    scale: Float[Array, "rows"] | None
    mask: Bool[Array, "rows"] | None
    labels: Int32[Array, "rows"] | None
    ids: Int32[Array, "rows"] | None
    guide: Float[Array, "rows dg"] | None
    threshold: Float[Array, "rows"] | None


class _LseBackwardRows(NamedTuple):
    """Row operands of the backward pass, to be split into strips."""

    operands: _LseRows
    sums: LogSum
    d_row: Float[Array, "rows"]
    d_positive: Float[Array, "rows"] | None
    positives: PositiveCotangents | None


def _rows(block: LseBlock) -> _LseRows:
    scale = None if block.shared else block.x_scale
    return _LseRows(block.x, scale, block.x_mask, block.labels, block.x_ids, block.x_guide, block.x_threshold)


def _backward_rows(block: LseBlock, cotangents: LseCotangents) -> _LseBackwardRows:
    d_positive = None if block.labels is None else cotangents.d_positive
    return _LseBackwardRows(_rows(block), cotangents.row, cotangents.d_row, d_positive, cotangents.row_positives)


def _shared_exponentials(
    block: LseBlock, rows: _LseRows, shift: Float[Array, ""]
) -> tuple[Float[Array, "rows by"], Float[Array, "rows by"]]:
    s = similarities(rows.x, block.y)
    return s, jnp.exp(block.x_scale * s - shift)


def _match(block: LseBlock, rows: _LseRows) -> Bool[Array, "rows by"] | None:
    return None if rows.ids is None else is_match(rows.ids, block.y_ids)


def _valid(block: LseBlock, rows: _LseRows, exclude: bool) -> Bool[Array, "#rows #by"] | None:
    positive = None
    if exclude:
        positive = _match(block, rows) if rows.labels is None else is_positive(rows.labels, block.y)
    return valid_pairs(rows.mask, block.y_mask, None if positive is None else ~positive)


def _guided(block: LseBlock, rows: _LseRows) -> tuple[Bool[Array, "rows by"] | None, Bool[Array, "rows by"] | None]:
    """Return which pairs the guide leaves in the sums of rows, and of columns; None for all."""
    return guided_pairs(rows.guide, block.y_guide, rows.threshold, block.y_threshold)


def _valid_sides(
    block: LseBlock, rows: _LseRows, exclude: bool
) -> tuple[Bool[Array, "#rows #by"] | None, Bool[Array, "#rows #by"] | None]:
    """Return which pairs are in the sums of rows, and of columns; None for all."""
    valid = _valid(block, rows, exclude)
    in_row, in_column = (
        valid if kept is None else kept if valid is None else kept & valid for kept in _guided(block, rows)
    )
    return in_row, in_column


def _where_in_sum(in_sum: Bool[Array, "rows by"] | None, factors: Float[Array, "#rows #by"]) -> Array:
    """Set the factors of pairs outside the sum to zero."""
    return factors if in_sum is None else jnp.where(in_sum, factors, jnp.zeros_like(factors))


def _pair_scales(block: LseBlock, rows: _LseRows) -> tuple[Array | None, Array]:
    """Return the scales of a strip, by the axis over which sums reduce."""
    return None if block.y_scale is None else block.y_scale[None, :], rows.scale[:, None]


def _merge(a: PositiveSums | None, b: PositiveSums | None) -> PositiveSums | None:
    return None if a is None or b is None else a.merge(b)


def _no_positives(block: LseBlock, columns: bool) -> PositiveSums | None:
    if block.x_ids is None or not columns:
        return None
    zeros = _column_zeros(block)
    return PositiveSums(empty_log_sum(zeros), zeros)


def _weighted_exponentials(e: Float[Array, "rows by"], side: PositiveCotangents, axis: int) -> Float[Array, "rows by"]:
    """Multiply by `d_lse / sumexp`."""
    return weighted(e, jnp.expand_dims(factor(side.lse, side.d_lse), axis))


def _positives(s: Float[Array, "rows by"], labels: Int32[Array, "rows"] | None) -> Float[Array, "rows"]:
    return jnp.zeros_like(s[:, 0]) if labels is None else positives(s, labels)


def _log_sum(z: Float[Array, "rows by"], valid: Bool[Array, "#rows #by"] | None, axis: int) -> LogSum:
    if valid is not None:
        z = jnp.where(valid, z, jnp.full_like(z, -jnp.inf))
    shift = z.max(axis)
    sumexp = exp_below(z, jnp.expand_dims(finite_shift(shift), axis)).sum(axis)
    return LogSum(shift, sumexp)


def _weighted_softmax(
    z: Float[Array, "rows by"],
    sums: LogSum,
    d_lse: Float[Array, "n"],
    valid: Bool[Array, "#rows #by"] | None,
    axis: int,
) -> Float[Array, "rows by"]:
    """Compute `d_lse * exp(z - lse)` without rounding the log-sum-exp.

    `axis` is the reduced axis of the sums. The result is 0 for an empty sum, whatever `z` is.
    """
    shift = jnp.where(sums.sumexp > 0, sums.shift, jnp.full_like(sums.shift, jnp.inf))
    p = exp_below(z, jnp.expand_dims(shift, axis)) * jnp.expand_dims(factor(sums, d_lse), axis)
    return where_valid(valid, p)


def _with_positive(block: LseBlock, rows: _LseBackwardRows, d_s: Float[Array, "rows by"]) -> Float[Array, "rows by"]:
    """Add the positives' term of dS in the accumulation dtype.

    Probability minus one cancels, so rounding to the features' dtype first would leave only noise.
    """
    if rows.d_positive is None or rows.operands.labels is None:
        return d_s
    d_positive = rows.d_positive[:, None]
    return d_s + jnp.where(is_positive(rows.operands.labels, block.y), d_positive, jnp.zeros_like(d_positive))


def _feature_gradients(
    block: LseBlock,
    rows: _LseBackwardRows,
    d_s: Float[Array, "rows by"],
    d_y: Float[Array, "by d"] | None,
    needs_grad: LseGradient,
) -> tuple[Float[Array, "by d"] | None, Float[Array, "rows d"] | None]:
    """Add `dS.T @ x` to `d_y` and compute `d_x = dS @ y`."""
    d_s = d_s.astype(block.x.dtype)
    if d_y is not None:
        d_y = d_y + matmul(d_s, rows.operands.x, contract=(0, 0))
    return d_y, matmul(d_s, block.y, contract=(1, 0)) if needs_grad.x else None


def _zeros(block: LseBlock, shape: tuple[int, ...]) -> Array:
    return constant(shape, 0, accumulation_dtype(block.x.dtype), varying_like=block.x)


def _column_zeros(block: LseBlock) -> Float[Array, "by"]:
    return _zeros(block, block.y.shape[:1])


BACKEND = LseStrips
