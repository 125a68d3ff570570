"""Contrastive losses over a global batch."""

from infcl_jax.losses.base import Loss, LossOutput
from infcl_jax.losses.clip import ClipLoss, clip_loss
from infcl_jax.losses.distillation import clip_and_distillation, distillation_loss
from infcl_jax.losses.distilled import DistilledLoss
from infcl_jax.losses.global_contrastive import global_contrastive_loss
from infcl_jax.losses.matryoshka import MatryoshkaLoss, matryoshka
from infcl_jax.losses.retrieval import retrieval_loss
from infcl_jax.losses.samples import SampleState, create_samples, write_samples
from infcl_jax.losses.siglip import SiglipLoss, siglip_loss

__all__ = [
    "ClipLoss",
    "DistilledLoss",
    "Loss",
    "LossOutput",
    "MatryoshkaLoss",
    "SampleState",
    "SiglipLoss",
    "clip_and_distillation",
    "clip_loss",
    "create_samples",
    "distillation_loss",
    "global_contrastive_loss",
    "matryoshka",
    "retrieval_loss",
    "siglip_loss",
    "write_samples",
]
