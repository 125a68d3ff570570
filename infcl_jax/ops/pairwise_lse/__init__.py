"""Row and column log-sum-exp over all pairs of a sharded batch: the primitive under every loss. Imports jax alone."""

from infcl_jax.ops.pairwise_lse.api import IMPLEMENTATIONS, PairwiseLSE, pairwise_lse
from infcl_jax.ops.pairwise_lse.implementations import available_implementations

__all__ = ["IMPLEMENTATIONS", "PairwiseLSE", "available_implementations", "pairwise_lse"]
