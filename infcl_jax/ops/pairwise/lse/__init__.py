"""Row and column log-sum-exp over all pairs of a sharded batch.

The losses of the package, except SigLIP, are functions of these vectors.
"""

from infcl_jax.ops.pairwise.implementations import IMPLEMENTATIONS, available_implementations
from infcl_jax.ops.pairwise.lse.api import PairwiseLSE, pairwise_lse
from infcl_jax.ops.pairwise.lse.positives import MULTI_POSITIVE, Positives, PositivesByID

__all__ = [
    "IMPLEMENTATIONS",
    "MULTI_POSITIVE",
    "PairwiseLSE",
    "Positives",
    "PositivesByID",
    "available_implementations",
    "pairwise_lse",
]
