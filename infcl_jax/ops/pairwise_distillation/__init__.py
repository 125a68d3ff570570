"""Sums over all pairs of a student and its teacher, for a contrastive loss with distillation.

Strategies, main loops, windows and operands are those of `pairwise_lse`. This folder imports JAX, jaxtyping and
`pairwise_lse` only.
"""

from infcl_jax.ops.pairwise_distillation.implementations import DISTILLATION_IMPLEMENTATIONS, plan_of
from infcl_jax.ops.pairwise_distillation.vjp import blockwise

__all__ = ["DISTILLATION_IMPLEMENTATIONS", "blockwise", "plan_of"]
