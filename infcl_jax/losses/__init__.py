"""Contrastive losses over a global batch."""

from infcl_jax.losses.base import Loss, LossOutput
from infcl_jax.losses.clip import ClipLoss, clip_loss
from infcl_jax.losses.global_contrastive import global_contrastive_loss
from infcl_jax.losses.matryoshka import MatryoshkaLoss, matryoshka
from infcl_jax.losses.retrieval import retrieval_loss
from infcl_jax.losses.samples import SampleState, create_samples, write_samples
from infcl_jax.losses.siglip import SiglipLoss, siglip_loss

__all__ = [
    "ClipLoss",
    "Loss",
    "LossOutput",
    "MatryoshkaLoss",
    "SampleState",
    "SiglipLoss",
    "clip_loss",
    "create_samples",
    "global_contrastive_loss",
    "matryoshka",
    "retrieval_loss",
    "siglip_loss",
    "write_samples",
]
