"""Backend of the pairwise sigmoid loss in plain XLA: strips of rows."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int32

from infcl_jax.ops.pairwise.base import Array, similarities
from infcl_jax.ops.pairwise.ids import is_match
from infcl_jax.ops.pairwise.sigmoid.block import SigmoidBlock, SigmoidGradient, SigmoidSums
from infcl_jax.ops.pairwise.strips import Strips, scan_strips, valid_pairs, where_valid


@dataclasses.dataclass(frozen=True)
class SigmoidStrips(Strips):
    """`base.Backend` of the pairwise sigmoid loss in plain XLA that loops over strips of rows."""

    def forward(self, block: SigmoidBlock) -> SigmoidSums:
        """Implement `base.Backend.forward`."""

        def strip(carry: None, rows: "_SigmoidRows") -> tuple[None, SigmoidSums]:
            _, logits, match, valid = _pairs(block, rows)
            negative = where_valid(valid, jax.nn.softplus(logits))
            if match is None:
                return carry, SigmoidSums(jnp.zeros_like(negative[:, 0]), negative.sum(1))
            positive = where_valid(valid, jax.nn.softplus(-logits))
            return carry, SigmoidSums(where_valid(match, positive).sum(1), where_valid(~match, negative).sum(1))

        return scan_strips(strip, None, self._rows(block), self.rows)[1]

    def backward(self, block: SigmoidBlock, cotangents: SigmoidSums, acc: SigmoidGradient) -> SigmoidGradient:
        """Implement `base.Backend.backward`."""

        def pair_gradients(rows: "_SigmoidRows") -> tuple[Array, tuple]:
            s, logits, match, valid = _pairs(block, rows)
            d_positive, d_negative = (d[:, None] for d in (rows.d_positive, rows.d_negative))
            d_logits = d_negative * jax.nn.sigmoid(logits)
            if match is not None:  # sigmoid(z) - 1 = -sigmoid(-z), without cancellation
                d_logits = jnp.where(match, -d_positive * jax.nn.sigmoid(-logits), d_logits)
            d_logits = where_valid(valid, d_logits)
            return block.scale * d_logits, (d_logits * s, d_logits)

        return self.add_gradients(pair_gradients, block, self._rows(block, cotangents), acc)

    def _rows(self, block: SigmoidBlock, cotangents: SigmoidSums | None = None) -> "_SigmoidRows":
        return _SigmoidRows(block.x, self.padding_mask(block), block.x_ids, *(cotangents or (None, None)))


class _SigmoidRows(NamedTuple):
    """Row operands of a block, to be split into strips."""

    x: Float[Array, "rows d"]
    mask: Bool[Array, "rows"] | None
    ids: Int32[Array, "rows"] | None
    d_positive: Float[Array, "rows"] | None
    d_negative: Float[Array, "rows"] | None


def _pairs(block: SigmoidBlock, rows: _SigmoidRows) -> tuple[Array, Array, Array | None, Array | None]:
    """Return similarities, logits, positives and valid pairs of a strip."""
    s = similarities(rows.x, block.y)
    match = None if rows.ids is None else is_match(rows.ids, block.y_ids)
    return s, block.scale * s + block.bias, match, valid_pairs(rows.mask, block.y_mask)


BACKEND = SigmoidStrips
