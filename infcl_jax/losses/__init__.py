"""Contrastive losses over a global batch."""

from infcl_jax.losses.clip import clip_loss
from infcl_jax.losses.retrieval import retrieval_loss
from infcl_jax.losses.siglip import siglip_loss

__all__ = ["clip_loss", "retrieval_loss", "siglip_loss"]
