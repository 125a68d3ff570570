"""Interface between the ring and the compute backends of the pairwise sigmoid loss."""

from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
from jaxtyping import Bool, Float, Int32

from infcl_jax.ops.pairwise_lse.base import Array

# Group numbers of masked rows and columns and of padding. They differ from those of `pairwise_lse.positives`.
UNMATCHED_ROW, UNMATCHED_COLUMN = -2, -3


class Block(NamedTuple):
    """Rows and columns that a backend compares in one call.

    Attributes:
      x: row features `[bx, D]`, bf16, fp32 or fp64.
      y: column features `[by, D]`, same dtype.
      scale: inverse temperature, scalar in the accumulation dtype.
      bias: bias of the logits, scalar in the accumulation dtype.
      x_mask: bool `[bx]`, False for masked rows; None: no row is masked.
      y_mask: bool `[by]`, False for masked columns; None: no column is masked.
      x_ids: int32 `[bx]`, group numbers. A pair with equal numbers is a positive. Masked rows match nothing. None: the
        block contains no positives.
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


class Sums(NamedTuple):
    """Sums of each row's loss terms, or their cotangents.

    Attributes:
      positive: `[bx]`, sums of softplus(-logit).
      negative: `[bx]`, sums of softplus(logit).
    """

    positive: Float[Array, "bx"]
    negative: Float[Array, "bx"]


class Gradient(NamedTuple):
    """Gradients or their accumulators; None for gradients that are not needed.

    Attributes:
      x: `[bx, D]`; its accumulator may be any pytree that the backend chooses.
      y: `[by, D]`, optionally padded at the end of each axis.
      scale: scalar in the accumulation dtype.
      bias: scalar in the accumulation dtype.
    """

    x: Any
    y: Float[Array, "padded_by padded_d"] | None
    scale: Float[Array, ""] | None
    bias: Float[Array, ""] | None


class NeedsGrad(NamedTuple):
    """Static flags of the required gradients."""

    x: bool = True
    y: bool = True
    scale: bool = True
    bias: bool = True


class Backend(Protocol):
    """Computation of one block of any size on one device."""

    @property
    def sorts_ids(self) -> bool:
        """True if sorted group numbers make blocks faster."""

    def forward(self, block: Block) -> Sums:
        """Compute the row sums of a block; arbitrary but never NaN for masked rows."""

    def accumulators(self, block: Block, needs_grad: NeedsGrad, dtype: jnp.dtype) -> Gradient:
        """Return zero accumulators; those of the features in `dtype`."""

    def backward(self, block: Block, cotangents: Sums, acc: Gradient) -> Gradient:
        """Add the block's gradients to `acc`, in place where that saves memory.

        Masked rows and columns contribute nothing.
        """

    def gradient(self, block: Block, acc: Gradient) -> Gradient:
        """Convert complete accumulators into gradients."""
