"""Row and column log-sum-exp over all pairs of a sharded batch.

Every loss of the package is built on this primitive. It depends on JAX and jaxtyping only.
"""

from infcl_jax.ops.pairwise_lse.api import PairwiseLSE, pairwise_lse
from infcl_jax.ops.pairwise_lse.implementations import IMPLEMENTATIONS, available_implementations

__all__ = ["IMPLEMENTATIONS", "PairwiseLSE", "available_implementations", "pairwise_lse"]
