"""Arrays that the ring and the backends of the pairwise sigmoid loss exchange."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Bool, Float, Int32

from infcl_jax.ops.pairwise.base import Array, columns, join_columns

# Group numbers of masked rows and columns and of padding. They differ from the numbers in `pairwise.lse.positives`.
UNMATCHED_ROW, UNMATCHED_COLUMN = -2, -3


@columns("y", "y_mask", "y_ids")
class SigmoidBlock(NamedTuple):
    """Rows and columns that a backend compares in one call.

    Attributes:
      x: row features `[bx, D]`, bf16, fp32 or fp64.
      y: column features `[by, D]`, same dtype.
      scale: inverse temperature, scalar in the accumulation dtype.
      bias: bias of the logits, scalar in the accumulation dtype.
      x_mask: bool `[bx]`, False for masked rows; None: no row is masked.
      y_mask: bool `[by]`, False for masked columns; None: no column is masked.
      x_ids: int32 `[bx]`, group numbers. A pair with equal numbers is a positive. Masked rows match nothing. None: the
        positive of row i is column i of the same device, or the block contains no positives.
      y_ids: int32 `[by]`, group numbers of the columns.
    """

    x: Float[Array, "bx d"]
    y: Float[Array, "by d"]
    scale: Float[Array, ""]
    bias: Float[Array, ""]
    x_mask: Bool[Array, "bx"] | None = None
    y_mask: Bool[Array, "by"] | None = None
    x_ids: Int32[Array, "bx"] | None = None
    y_ids: Int32[Array, "by"] | None = None

    def with_columns(self, columns: tuple, first: int | None) -> "SigmoidBlock":
        """Implement `base.Block.with_columns`; pairs of this device get numbers."""
        block = join_columns(self, columns)
        if self.x_ids is not None or first is None:
            return block
        x_ids = _numbers(0, len(block.x), block.x_mask, UNMATCHED_ROW)
        return block._replace(x_ids=x_ids, y_ids=_numbers(first, len(block.y), block.y_mask, UNMATCHED_COLUMN))


@columns()
class SigmoidSums(NamedTuple):
    """Sums of each row's loss terms, or their cotangents.

    Attributes:
      positive: `[bx]`, sums of softplus(-logit).
      negative: `[bx]`, sums of softplus(logit).
    """

    positive: Float[Array, "bx"]
    negative: Float[Array, "bx"]


@columns("y")
class SigmoidGradient(NamedTuple):
    """Gradients, their accumulators, or flags of those that are required; see `base.Backend`.

    Attributes:
      x: `[bx, D]`.
      y: `[by, D]`.
      scale: scalar in the accumulation dtype.
      bias: scalar in the accumulation dtype.
    """

    x: Any = True
    y: Any = True
    scale: Any = True
    bias: Any = True


def _numbers(first: int, count: int, mask: Bool[Array, "{count}"] | None, unmatched: int) -> Int32[Array, "{count}"]:
    numbers = first + jnp.arange(count, dtype=jnp.int32)
    return numbers if mask is None else jnp.where(mask, numbers, jnp.full_like(numbers, unmatched))
