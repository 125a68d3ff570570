"""Exact contrastive training of CLIP-like models with very large batches in JAX/Flax."""

from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from infcl_jax.encoder import Encoder, load

__all__ = [
    "Encoder",
    "PairwiseLSE",
    "Replay",
    "SampleState",
    "cached_value_and_grad",
    "chunk_rows",
    "clip_loss",
    "create_samples",
    "global_contrastive_loss",
    "load",
    "pairwise_lse",
    "pairwise_scores_lse",
    "retrieval_loss",
    "siglip_loss",
]


def __getattr__(name: str) -> Any:
    # The encoder stands on the whole library, whose import takes seconds; the losses need little of it.
    if name in ("Encoder", "load"):
        from infcl_jax import encoder

        return getattr(encoder, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
