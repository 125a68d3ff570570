"""Blocks with at most one positive by id in each row and column.

With unique ids every block is one. Labels then describe the positives, and sums over all pairs of rows and columns with
equal ids are not needed.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int32, Shaped

from infcl_jax.ops.pairwise.base import Array, accumulation_dtype, zero_masked
from infcl_jax.ops.pairwise.ids import Order, ranges_by_id
from infcl_jax.ops.pairwise.lse.block import LseBlock, LseCotangents, LseGradient, LseSums, PositiveSums
from infcl_jax.ops.pairwise.max_shift import factor, shared_shift, shifted_log_sum, weighted


class LonePositives(NamedTuple):
    """Positives of a block with ids and a shared scale, as labels.

    Attributes:
      labels: int32 `[bx]`, column of each row's positive, -1 without one; arbitrary unless `only`.
      only: bool scalar, whether no row and no column has several positives.
    """

    labels: Int32[Array, "bx"]
    only: Bool[Array, ""]

    @classmethod
    def of(cls, block: LseBlock) -> "LonePositives":
        """Find the positives of a block with ids."""
        order = Order.by(block.y_ids)
        first, last = ranges_by_id(block.x_ids, order.sort(block.y_ids))
        labels = jnp.where(first < 0, first, order.rows[first])
        return cls(labels, (last <= first).all() & (_per_column(jnp.ones_like(labels), labels, block) <= 1).all())

    def sums(self, block: LseBlock, forward: Callable[[LseBlock], LseSums]) -> LseSums:
        """Compute the sums of a block with ids by `forward` of the block with labels."""
        sums = forward(self._labeled(block))
        e = self._exponentials(block, sums.positive)
        shift = shared_shift(block.x_scale)

        def positives(e: Array, similarity: Array) -> PositiveSums:
            return PositiveSums(shifted_log_sum(shift, e), similarity)

        columns = None
        if sums.column is not None:
            columns = positives(*(_per_column(a, self.labels, block) for a in (e, sums.positive)))
        return sums._replace(
            positive=jnp.zeros_like(e), row_positives=positives(e, sums.positive), column_positives=columns
        )

    def gradient(
        self, block: LseBlock, cotangents: LseCotangents, backward: Callable[[LseBlock, LseCotangents], LseGradient]
    ) -> LseGradient:
        """Compute the gradient of a block with ids by `backward` of the block with labels."""
        dtype = accumulation_dtype(block.x.dtype)
        similarity = zero_masked((block.x.astype(dtype) * self._of_columns(block.y).astype(dtype)).sum(1), self._exist)
        e = self._exponentials(block, similarity)
        d_logits, columns = jnp.zeros_like(e), cotangents.column_positives
        for side in (cotangents.row_positives, jax.tree.map(self._of_columns, columns)):
            if side is not None:
                d_logits += weighted(e, factor(side.lse, side.d_lse)) + side.d_sum
        d_logits = zero_masked(d_logits, self._exist)
        labeled = cotangents._replace(d_positive=block.x_scale * d_logits, row_positives=None, column_positives=None)
        gradient = backward(self._labeled(block), labeled)
        if gradient.x_scale is None:
            return gradient
        return gradient._replace(x_scale=gradient.x_scale + (d_logits * similarity).sum())

    def _labeled(self, block: LseBlock) -> LseBlock:
        return block._replace(labels=self.labels, x_ids=None, y_ids=None)

    @property
    def _exist(self) -> Bool[Array, "bx"]:
        return self.labels >= 0

    def _of_columns(self, array: Shaped[Array, "by *rest"]) -> Shaped[Array, "bx *rest"]:
        """Take the column of each row's positive; any column without one."""
        return jnp.take(array, self.labels, axis=0, mode="clip")

    def _exponentials(self, block: LseBlock, similarity: Float[Array, "bx"]) -> Float[Array, "bx"]:
        e = jnp.exp(block.x_scale * similarity - shared_shift(block.x_scale))
        return zero_masked(e, self._exist)


def _per_column(values: Array, labels: Int32[Array, "bx"], block: LseBlock) -> Array:
    """Sum the values of the rows whose positive is each column."""
    return jnp.zeros(len(block.y) + 1, values.dtype).at[labels + 1].add(values)[1:]
