"""Row and column log-sum-exp over all pairs of a sharded batch: the primitive under every loss. Imports jax alone."""

from infcl_jax.pairwise.api import IMPLEMENTATIONS, PairwiseLSE, pairwise_lse

__all__ = ["IMPLEMENTATIONS", "PairwiseLSE", "pairwise_lse"]
