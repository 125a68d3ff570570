"""Gradient rule of `pairwise_lse`.

With a shared scale, the shared max-shift is tried first. If its sums are not exact, the general path computes sums with
per-sample scales (see `max_shift`).
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Bool

from infcl_jax.ops.pairwise.base import Array, Backend
from infcl_jax.ops.pairwise.gradient_rule import Loss
from infcl_jax.ops.pairwise.ids import Order
from infcl_jax.ops.pairwise.lse.block import (
    LseBlock,
    LseCotangents,
    LseGradient,
    LseSums,
    PositiveCotangents,
    PositiveLogits,
    Results,
)
from infcl_jax.ops.pairwise.lse.guide import NO_MARGIN, Margin
from infcl_jax.ops.pairwise.max_shift import MIN_SCALE, within_range


@dataclasses.dataclass(frozen=True)
class LogSumExp(Loss):
    """`gradient_rule.Loss` of row and column log-sum-exps.

    Attributes:
      columns: whether column sums are computed.
      margin: margin of the guide; not read without one.
    """

    columns: bool
    margin: Margin = NO_MARGIN
    folder = "lse"
    gradient = LseGradient
    forward_mode = 'use implementation="dense" or "local", which JAX differentiates in every mode'
    other_derivatives = f'{Loss.other_derivatives}, or implementation="dense" or "local"'

    def prepared(self, backend: Any, block: LseBlock) -> LseBlock:
        """Add the thresholds of the guide."""
        if block.x_guide is None:
            return block
        own = jnp.arange(len(block.x), dtype=jnp.int32) if block.labels is None else block.labels
        thresholds = self.margin.thresholds(backend.own_similarities(block, own))
        return block._replace(x_threshold=thresholds, y_threshold=thresholds if self.columns else None)

    def results(self, block: LseBlock, sums: LseSums) -> Results:
        """Return log-sum-exps and positives."""
        row, column = sums.row.log(), None if sums.column is None else sums.column.log()
        if sums.row_positives is None:
            return row, column, sums.positive
        y_scale = block.x_scale if block.y_scale is None else block.y_scale
        sides = ((block.x_scale, sums.row_positives), (y_scale, sums.column_positives))
        rows, columns = (None if p is None else PositiveLogits(p.lse.log(), scale * p.similarity) for scale, p in sides)
        return row, column, (rows, columns)

    def cotangents(self, sums: LseSums, d_results: Results) -> LseCotangents:
        """Join the sums with their cotangents."""
        d_row, d_column, d_positive = d_results
        if sums.row_positives is None:
            return LseCotangents(sums.row, d_row, sums.column, d_column, sums.positive, d_positive)
        sides = zip((sums.row_positives, sums.column_positives), d_positive, strict=True)
        positives = (None if p is None else PositiveCotangents(p.lse, d.lse, d.sum) for p, d in sides)
        return LseCotangents(sums.row, d_row, sums.column, d_column, sums.positive, None, *positives)

    def exact(self, block: LseBlock, sums: LseSums, devices: int) -> Bool[Array, ""] | None:
        """Return whether the sums with the shared shift are exact; None with per-sample scales."""
        if not block.shared:
            return None
        exact = within_range(sums.row.sumexp, block.x_mask, block.y.shape[0] * devices)
        if sums.column is not None:
            exact &= within_range(sums.column.sumexp, block.y_mask, block.x.shape[0] * devices)
        for positives, count in ((sums.row_positives, block.x_count), (sums.column_positives, block.y_count)):
            if positives is not None and count is not None:  # a single positive does not use its exponential
                terms = max(block.x.shape[0], block.y.shape[0]) * devices
                exact &= within_range(positives.lse.sumexp, count > 1, terms)
        return exact & (block.x_scale > MIN_SCALE)

    def restore(self, results: Results, x_order: Order, y_order: Order) -> Results:
        """Return the results in the caller's order."""
        row, column, (row_positives, column_positives) = results
        row, row_positives = jax.tree.map(x_order.restore, (row, row_positives))
        column, column_positives = jax.tree.map(y_order.restore, (column, column_positives))
        return row, column, (row_positives, column_positives)

    def general(self, backend: Backend, block: LseBlock) -> tuple[Backend, LseBlock]:
        """Return the backend, and the block with per-sample scales."""
        return backend, block.per_sample(self.columns)

    def general_gradients(
        self, gradients: Callable[..., Any], backend: Backend, block: LseBlock, sums: LseSums, needs_grad: LseGradient
    ) -> LseGradient:
        """Compute the gradients with per-sample scales; a shared scale gets the sum over its copies."""
        per_sample_needs_grad = needs_grad._replace(y_scale=needs_grad.x_scale)
        grads = gradients(*self.general(backend, block), sums, per_sample_needs_grad)
        if not needs_grad.x_scale:
            return grads
        x_scale = grads.x_scale.sum()
        return grads._replace(x_scale=x_scale if grads.y_scale is None else x_scale + grads.y_scale.sum(), y_scale=None)
