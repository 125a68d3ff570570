"""Gradient caching (GradCache): exact full-batch gradients with chunk-sized activations."""

from infcl_jax.grad_cache.api import RESIDENCIES, cached_value_and_grad
from infcl_jax.grad_cache.chunks import chunk_rows
from infcl_jax.grad_cache.host import Replay
from infcl_jax.grad_cache.pairs import PairScores, pairwise_scores_lse
from infcl_jax.ops.linear import DERIVED

__all__ = [
    "DERIVED",
    "RESIDENCIES",
    "PairScores",
    "Replay",
    "cached_value_and_grad",
    "chunk_rows",
    "pairwise_scores_lse",
]
