"""Backend of `pairwise_lse` with a guide in plain XLA: strips of rows."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Bool, Float, Int32

from infcl_jax.ops.pairwise.base import Array, similarities
from infcl_jax.ops.pairwise.lse.block import LseBlock
from infcl_jax.ops.pairwise.lse.xla import LseBackwardRows, LseRows, LseStrips
from infcl_jax.ops.pairwise.max_shift import factor
from infcl_jax.ops.pairwise.strips import positives, scan_strips, where_valid


@dataclasses.dataclass(frozen=True)
class GuidedStrips(LseStrips):
    """`LseStrips` over the negatives that a guide keeps."""

    def own_similarities(self, block: LseBlock) -> Float[Array, "bx"]:
        """Return the guide's similarity of each own pair, from the GEMMs of the sums.

        The own pair of row i is that of its label, or with ids column i.
        """

        def strip(carry: None, rows: tuple[Array, Int32[Array, "rows"]]) -> tuple[None, Array]:
            guide, own = rows
            return carry, positives(similarities(guide, block.y_guide), own)

        own = jnp.arange(len(block.x), dtype=jnp.int32) if block.labels is None else block.labels
        return scan_strips(strip, None, (block.x_guide, own), self.rows)[1]

    def in_sums(self, block: LseBlock, rows: LseRows) -> tuple[Bool[Array, "rows by"], Bool[Array, "rows by"]]:
        """Return which pairs are in the sums of rows, and in those of columns."""
        valid, _ = super().in_sums(block, rows)
        t = similarities(rows.guide, block.y_guide)
        row = t <= rows.threshold[:, None]
        column = row if block.y_threshold is None else t <= block.y_threshold[None, :]
        return (row, column) if valid is None else (row & valid, column & valid)

    def terms(
        self, block: LseBlock, rows: LseRows, e: Float[Array, "rows by"]
    ) -> tuple[Float[Array, "rows by"], Float[Array, "rows by"]]:
        """Return the terms of the sums of rows, and of those of columns.

        A term is at least the smallest normal number, so that a sum of 0 has no term. The sums for which this matters
        are not exact, see `max_shift`.
        """
        row, column = self.in_sums(block, rows)
        e = jnp.maximum(e, jnp.finfo(e.dtype).tiny)
        return where_valid(row, e), where_valid(column, e)

    def weighted_terms(
        self,
        block: LseBlock,
        rows: LseBackwardRows,
        e: Float[Array, "rows by"],
        column_factor: Float[Array, "by"] | None,
    ) -> Float[Array, "rows by"]:
        """Return the cotangents of the logits of a strip."""
        row, column = self.in_sums(block, rows.operands)
        weight = jnp.where(row, factor(rows.sums, rows.d_row)[:, None], jnp.zeros_like(e))
        if column_factor is not None:
            weight = weight + jnp.where(column, column_factor[None, :], jnp.zeros_like(e))
        return e * weight


BACKEND = GuidedStrips
