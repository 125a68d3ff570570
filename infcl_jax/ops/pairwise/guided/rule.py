"""Gradient rule of `pairwise_lse` with a guide.

With the guide's similarities `t_ij`, a negative pair (i, j) is in the sum of row i if `t_ij <= x_threshold_i`, and in
that of column j if `t_ij <= y_threshold_j`. A threshold is the similarity of the own pair minus a margin. A pair may be
in one of its two sums only.
"""

import dataclasses
from typing import Any

from jaxtyping import Bool

from infcl_jax.ops.pairwise.base import Array, LogSum
from infcl_jax.ops.pairwise.gradient_rule import Loss
from infcl_jax.ops.pairwise.guided.guide import Margin
from infcl_jax.ops.pairwise.lse.block import LseBlock, LseSums
from infcl_jax.ops.pairwise.lse.rule import LogSumExp


@dataclasses.dataclass(frozen=True)
class Guided(LogSumExp):
    """`gradient_rule.Loss` of row and column log-sum-exps over the negatives that a guide keeps.

    Attributes:
      margin: margin of the guide.
    """

    margin: Margin
    folder = "guided"
    forward_mode = "use jax.grad or jax.vjp"
    other_derivatives = Loss.other_derivatives

    def prepared(self, backend: Any, block: LseBlock) -> LseBlock:
        """Add the thresholds.

        The backend computes the similarities of the own pairs as all others, so that duplicates of the own pair stay.
        """
        thresholds = self.margin.thresholds(backend.own_similarities(block))
        return block._replace(x_threshold=thresholds, y_threshold=thresholds if self.columns else None)

    def exact(self, block: LseBlock, sums: LseSums, devices: int) -> Bool[Array, ""] | None:
        """Return whether the sums with the shared shift are exact; an empty one is (see `GuidedStrips.terms`)."""
        nonempty = block._replace(x_mask=_nonempty(sums.row, block.x_mask))
        if sums.column is not None:
            nonempty = nonempty._replace(y_mask=_nonempty(sums.column, block.y_mask))
        return super().exact(nonempty, sums, devices)


def _nonempty(sums: LogSum, mask: Bool[Array, "n"] | None) -> Bool[Array, "n"]:
    nonempty = sums.sumexp != 0
    return nonempty if mask is None else nonempty & mask
