"""Exact contrastive training of CLIP-like models with very large batches in JAX/Flax."""

from infcl_jax.losses import clip_loss, retrieval_loss, siglip_loss
from infcl_jax.pairwise import PairwiseLSE, pairwise_lse

__all__ = ["PairwiseLSE", "clip_loss", "pairwise_lse", "retrieval_loss", "siglip_loss"]
