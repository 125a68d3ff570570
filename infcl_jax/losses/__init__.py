"""Contrastive losses over a global batch."""

from infcl_jax.losses.base import Loss as Loss
from infcl_jax.losses.base import LossOutput as LossOutput
from infcl_jax.losses.clip import ClipLoss as ClipLoss
from infcl_jax.losses.clip import clip_loss as clip_loss
from infcl_jax.losses.distillation import clip_and_distillation as clip_and_distillation
from infcl_jax.losses.distillation import distillation_loss as distillation_loss
from infcl_jax.losses.distilled import DistilledLoss as DistilledLoss
from infcl_jax.losses.global_contrastive import global_contrastive_loss as global_contrastive_loss
from infcl_jax.losses.matryoshka import MatryoshkaLoss as MatryoshkaLoss
from infcl_jax.losses.matryoshka import matryoshka as matryoshka
from infcl_jax.losses.retrieval import retrieval_loss as retrieval_loss
from infcl_jax.losses.samples import SampleState as SampleState
from infcl_jax.losses.samples import create_samples as create_samples
from infcl_jax.losses.samples import write_samples as write_samples
from infcl_jax.losses.siglip import SiglipLoss as SiglipLoss
from infcl_jax.losses.siglip import siglip_loss as siglip_loss
