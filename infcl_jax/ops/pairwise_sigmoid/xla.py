"""Portable backend in plain XLA: strips of rows."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int32

from infcl_jax.ops.pairwise_lse.base import Array, constant, matmul, similarities
from infcl_jax.ops.pairwise_lse.chunking import STRIP_ROWS, padding_mask, scan_strips, valid_pairs
from infcl_jax.ops.pairwise_lse.positives import is_match
from infcl_jax.ops.pairwise_sigmoid.base import Block, Gradient, NeedsGrad, Sums


@dataclasses.dataclass(frozen=True)
class XlaStrips:
    """`base.Backend` in plain XLA that loops over strips of rows.

    Attributes:
      rows: rows of one strip, so that `rows * by` similarities are in memory; None: one strip for the whole block.
    """

    rows: int | None = STRIP_ROWS

    @property
    def sorts_ids(self) -> bool:
        """Implement `base.Backend.sorts_ids`."""
        return False

    def forward(self, block: Block) -> Sums:
        """Implement `base.Backend.forward`."""

        def strip(carry: None, rows: _Rows) -> tuple[None, Sums]:
            _, logits, match, valid = self._pairs(block, rows)
            negative = _where(valid, jax.nn.softplus(logits))
            if match is None:
                return carry, Sums(jnp.zeros_like(negative[:, 0]), negative.sum(1))
            positive = _where(valid, jax.nn.softplus(-logits))
            return carry, Sums(_where(match, positive).sum(1), _where(~match, negative).sum(1))

        return scan_strips(strip, None, self._rows(block), self.rows)[1]

    def accumulators(self, block: Block, needs_grad: NeedsGrad, dtype: jnp.dtype) -> Gradient:
        """Implement `base.Backend.accumulators`."""
        return zero_accumulators(block.x, block.y, block, needs_grad, dtype)

    def backward(self, block: Block, cotangents: Sums, acc: Gradient) -> Gradient:
        """Implement `base.Backend.backward`."""

        def strip(carry: Gradient, rows: _Rows) -> tuple[Gradient, Array | None]:
            s, logits, match, valid = self._pairs(block, rows)
            d_positive, d_negative = (d[:, None] for d in (rows.d_positive, rows.d_negative))
            d_logits = d_negative * jax.nn.sigmoid(logits)
            if match is not None:  # sigmoid(z) - 1 = -sigmoid(-z), without cancellation
                d_logits = jnp.where(match, -d_positive * jax.nn.sigmoid(-logits), d_logits)
            d_logits = _where(valid, d_logits)
            d_s = (block.scale * d_logits).astype(block.x.dtype)
            scale, bias = (
                None if a is None else a + update.sum()
                for a, update in ((carry.scale, d_logits * s), (carry.bias, d_logits))
            )
            y = None if carry.y is None else carry.y + matmul(d_s, rows.x, contract=(0, 0)).astype(carry.y.dtype)
            return Gradient(None, y, scale, bias), None if acc.x is None else matmul(d_s, block.y, contract=(1, 0))

        # One strip after the other is added to the column gradients, in the accumulation dtype.
        y = None if acc.y is None else jnp.zeros_like(acc.y, acc_dtype(block))
        start = Gradient(None, y, acc.scale, acc.bias)
        carry, d_x = scan_strips(strip, start, self._rows(block, cotangents), self.rows)
        return carry._replace(
            x=None if acc.x is None else acc.x + d_x.astype(acc.x.dtype),
            y=None if acc.y is None else acc.y + carry.y.astype(acc.y.dtype),
        )

    def gradient(self, block: Block, acc: Gradient) -> Gradient:
        """Implement `base.Backend.gradient`."""
        del block
        return acc

    def _rows(self, block: Block, cotangents: Sums | None = None) -> "_Rows":
        mask = padding_mask(block.x_mask, block.x.shape[0], self.rows)
        return _Rows(block.x, mask, block.x_ids, *(cotangents or (None, None)))

    def _pairs(self, block: Block, rows: "_Rows") -> tuple[Array, Array, Array | None, Array | None]:
        """Return similarities, logits, positives and valid pairs of a strip."""
        s = similarities(rows.x, block.y)
        match = None if rows.ids is None else is_match(rows.ids, block.y_ids)
        return s, block.scale * s + block.bias, match, valid_pairs(rows.mask, block.y_mask)


class _Rows(NamedTuple):
    """Row operands of a block, to be split into strips."""

    x: Float[Array, "rows d"]
    mask: Bool[Array, "rows"] | None
    ids: Int32[Array, "rows"] | None
    d_positive: Float[Array, "rows"] | None
    d_negative: Float[Array, "rows"] | None


def zero_accumulators(x: Array, y: Array, block: Block, needs_grad: NeedsGrad, dtype: jnp.dtype) -> Gradient:
    """Return zeros for every needed gradient; those of the features in `dtype`."""

    def zeros(shape: tuple[int, ...], needed: bool, dtype: jnp.dtype) -> Array | None:
        return constant(shape, 0, dtype, varying_like=x) if needed else None

    return Gradient(
        zeros(x.shape, needs_grad.x, dtype),
        zeros(y.shape, needs_grad.y, dtype),
        zeros((), needs_grad.scale, block.scale.dtype),
        zeros((), needs_grad.bias, block.scale.dtype),
    )


def acc_dtype(block: Block) -> jnp.dtype:
    """Return the accumulation dtype of a block."""
    return block.scale.dtype


def _where(valid: Bool[Array, "#rows #by"] | None, values: Float[Array, "rows by"]) -> Float[Array, "rows by"]:
    return values if valid is None else jnp.where(valid, values, jnp.zeros_like(values))
