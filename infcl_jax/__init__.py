"""Exact contrastive training of CLIP-like models with very large batches in JAX/Flax."""

from infcl_jax.grad_cache import Replay, cached_value_and_grad, chunk_rows, pairwise_scores_lse
from infcl_jax.losses import (
    SampleState,
    clip_loss,
    create_samples,
    global_contrastive_loss,
    retrieval_loss,
    siglip_loss,
)
from infcl_jax.ops.pairwise_lse import PairwiseLSE, pairwise_lse

__all__ = [
    "PairwiseLSE",
    "Replay",
    "SampleState",
    "cached_value_and_grad",
    "chunk_rows",
    "clip_loss",
    "create_samples",
    "global_contrastive_loss",
    "pairwise_lse",
    "pairwise_scores_lse",
    "retrieval_loss",
    "siglip_loss",
]
