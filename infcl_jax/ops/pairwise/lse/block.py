"""Arrays that the strategies and the backends of `pairwise_lse` exchange."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Bool, Float, Int32

from infcl_jax.ops.pairwise.base import Array, LogSum, columns, join_columns
from infcl_jax.ops.pairwise.strips import labels_from


@columns("y", "y_scale", "y_mask", "y_ids", "y_guide", "y_threshold")
class LseBlock(NamedTuple):
    """Rows and columns that a backend compares in one call.

    Attributes:
      x: row features `[bx, D]`, bf16, fp32 or fp64.
      y: column features `[by, D]`, same dtype.
      x_scale: inverse temperature of the rows `[bx]` in the accumulation dtype. A scalar `[]` is a shared scale: it
        applies to every row and every column, and `y_scale` is None.
      y_scale: inverse temperature of the columns `[by]`. None with a shared scale or without column sums.
      x_mask: bool `[bx]`, False for masked rows; None: no row is masked.
      y_mask: bool `[by]`, False for masked columns; None: no column is masked.
      labels: int32 `[bx]`, the column of each row's positive. A value outside `[0, by)` means that the row's positive
        is in another block. None: the block contains no positives, or they are given by ids.
      x_ids: int32 `[bx]`, group numbers of the rows, see `positives.Groups`. A pair with equal numbers is a positive.
        None: positives are given by labels.
      y_ids: int32 `[by]`, group numbers of the columns.
      x_count: int32 `[bx]`, number of positives of each row over all devices; None without ids, and for backends.
      y_count: int32 `[by]`, number of positives of each column over all devices; None without ids, and for backends.
      x_guide: guide's row features `[bx, Dg]`, bf16, fp32 or fp64; no gradient. None: all negatives are in the sums.
      y_guide: guide's column features `[by, Dg]`, same dtype; no gradient.
      x_threshold: largest similarity in the guide of the negatives in each row's sum `[bx]`, see `guide.Margin`.
      y_threshold: likewise for the columns `[by]`; None without column sums.
    """

    x: Float[Array, "bx d"]
    y: Float[Array, "by d"]
    x_scale: Float[Array, ""] | Float[Array, "bx"]
    y_scale: Float[Array, "by"] | None = None
    x_mask: Bool[Array, "bx"] | None = None
    y_mask: Bool[Array, "by"] | None = None
    labels: Int32[Array, "bx"] | None = None
    x_ids: Int32[Array, "bx"] | None = None
    y_ids: Int32[Array, "by"] | None = None
    x_count: Int32[Array, "bx"] | None = None
    y_count: Int32[Array, "by"] | None = None
    x_guide: Float[Array, "bx dg"] | None = None
    y_guide: Float[Array, "by dg"] | None = None
    x_threshold: Float[Array, "bx"] | None = None
    y_threshold: Float[Array, "by"] | None = None

    def with_columns(self, columns: tuple, first: int | None) -> "LseBlock":
        """Implement `base.Block.with_columns`."""
        labels = labels_from(self.labels, first)
        return join_columns(self, columns)._replace(labels=labels, x_count=None, y_count=None)

    @property
    def shared(self) -> bool:
        """Whether one scale applies to all rows and columns."""
        return self.x_scale.ndim == 0

    def per_sample(self, columns: bool) -> "LseBlock":
        """Broadcast the shared scale to the rows, and to the columns if `columns`."""
        x_scale = jnp.broadcast_to(self.x_scale, self.x.shape[:1])
        y_scale = jnp.broadcast_to(self.x_scale, self.y.shape[:1]) if columns else None
        return self._replace(x_scale=x_scale, y_scale=y_scale)


class PositiveSums(NamedTuple):
    """Sums over the positives by id of each row or column of one block.

    Attributes:
      lse: log-sum-exp of the positives' logits `[n]`; with a shared scale, its sum need not be exact where there is
        one positive.
      similarity: sum of the positives' unscaled similarities `[n]`.
    """

    lse: LogSum
    similarity: Float[Array, "n"]

    def merge(self, other: "PositiveSums") -> "PositiveSums":
        """Return the sums over both sets of positives."""
        return PositiveSums(self.lse.merge(other.lse), self.similarity + other.similarity)


class PositiveLogits(NamedTuple):
    """Log-sum-exp and sum of the logits of each row's or column's positives by id.

    Attributes:
      lse: `[n]`, -inf without a positive.
      sum: `[n]`, 0 without a positive.
    """

    lse: Float[Array, "n"]
    sum: Float[Array, "n"]


# Row log-sum-exp `[bx]`, column log-sum-exp `[by]` (None without column sums), and positives: with labels each row's
# similarity with its positive `[bx]`, with ids the `PositiveLogits` of the rows and of the columns (or None).
Results = tuple[Array, Array | None, Any]


@columns("column", "column_positives")
class LseSums(NamedTuple):
    """Forward results of one block.

    Attributes:
      row: log-sum-exp of each row over the columns `[bx]`.
      column: log-sum-exp of each column over the rows `[by]`; None without column sums.
      positive: similarity of each row with its positive `[bx]`; 0 if the positive is in another block. It comes from
        the same GEMM as the sums, so that rounding errors cancel in the loss.
      row_positives: sums over each row's positives by id `[bx]`; None without ids.
      column_positives: sums over each column's positives by id `[by]`; None without ids or without column sums.
    """

    row: LogSum
    column: LogSum | None
    positive: Float[Array, "bx"]
    row_positives: PositiveSums | None = None
    column_positives: PositiveSums | None = None


class PositiveCotangents(NamedTuple):
    """Sums over the positives by id of each row or column, and their cotangents.

    Attributes:
      lse: final `LogSum` over all blocks `[n]`.
      d_lse: dL / d lse `[n]`.
      d_sum: dL / d (sum of the positives' logits) `[n]`.
    """

    lse: LogSum
    d_lse: Float[Array, "n"]
    d_sum: Float[Array, "n"]


@columns("column", "d_column", "column_positives")
class LseCotangents(NamedTuple):
    """Forward results and their cotangents, as inputs of the backward pass.

    Vectors are in the accumulation dtype.

    Attributes:
      row: final `LogSum` of the rows over all blocks `[bx]`.
      d_row: dL / d row_lse `[bx]`.
      column: final `LogSum` of the columns over all blocks `[by]`; None without column sums.
      d_column: dL / d col_lse `[by]`; None without column sums.
      positive: similarity of each row with its positive `[bx]`; only read with labels.
      d_positive: dL / d positive `[bx]`; only read with labels, None with ids.
      row_positives: sums and cotangents of the rows' positives by id `[bx]`; None without ids.
      column_positives: sums and cotangents of the columns' positives by id `[by]`; None without ids or column sums.
    """

    row: LogSum
    d_row: Float[Array, "bx"]
    column: LogSum | None
    d_column: Float[Array, "by"] | None
    positive: Float[Array, "bx"]
    d_positive: Float[Array, "bx"] | None
    row_positives: PositiveCotangents | None = None
    column_positives: PositiveCotangents | None = None


@columns("y", "y_scale")
class LseGradient(NamedTuple):
    """Gradients, their accumulators, or flags of those that are required; see `base.Backend`.

    Attributes:
      x: `[bx, D]`.
      y: `[by, D]`.
      x_scale: same shape as `LseBlock.x_scale`, in the accumulation dtype.
      y_scale: same shape as `LseBlock.y_scale`, in the accumulation dtype.
    """

    x: Any = True
    y: Any = True
    x_scale: Any = True
    y_scale: Any = True
