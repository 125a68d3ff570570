"""Losses of the trainer by name, and settings of distillation."""

import dataclasses
from typing import Any

from jax.sharding import Mesh

from infcl_jax.losses import ClipLoss, Loss, SiglipLoss
from infcl_jax.losses.variants import VARIANTS
from infcl_jax.ops.common.checks import check_choice
from infcl_jax.schema import Range, Section, setting
from infcl_jax.training.global_contrastive import GlobalContrastive
from infcl_jax.training.text_retrieval import RetrievalLoss

LOSSES: dict[str, type[Loss]] = {
    "clip": ClipLoss,
    "siglip": SiglipLoss,
    **dict.fromkeys(VARIANTS, GlobalContrastive),
    "retrieval": RetrievalLoss,
}


def loss_class(name: str) -> type[Loss]:
    """Return the class of a loss.

    Examples:
      >>> loss_class("clip").__name__
      'ClipLoss'

    Raises:
      ValueError: the name is unknown.
    """
    check_choice("loss", name, tuple(LOSSES))
    return LOSSES[name]


def make_loss(
    name: str,
    mesh: Mesh | None,
    implementation: str | None = None,
    max_logit_scale: float | None = None,
    **settings: Any,
) -> Loss:
    """Create a training loss.

    Examples:
      >>> loss = make_loss("siglip", mesh)
      >>> type(loss).__name__
      'SiglipLoss'

    Args:
      name: key of `LOSSES`.
      mesh: devices over which the batch is sharded; None: one device.
      implementation: backend of `infcl_jax.pairwise_lse`; None: the best for the platform.
      max_logit_scale: limit of the model's logit scale; None: that of the loss, 100, or none with a sigmoid.
      **settings: settings of the run. `targets`, see `infcl_jax.losses.base.Targets`, are of losses over one batch;
        `config`, `steps_per_epoch` and `optimizer`, see `GlobalContrastive`, are of losses with sample state.

    Raises:
      ValueError: the name or implementation is unknown, or a setting is wrong. Calling the "siglip" loss on the output
        of a model without a logit bias also raises it.
    """
    loss = loss_class(name).create(name, mesh, implementation, **settings)
    return loss if max_logit_scale is None else dataclasses.replace(loss, max_logit_scale=max_logit_scale)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistillConfig(Section, prefix="distill."):
    """Settings of distillation.

    Examples:
      >>> DistillConfig(teacher="runs/teacher", weight=0.5).cache is None
      True

    Raises:
      ValueError: a value is out of range, or `weight` or `cache` is set without a teacher.
    """

    teacher: str | None = setting(
        None, "model that infcl_jax.load reads, whose similarities the student learns; None: no distillation"
    )
    weight: float = setting(1.0, "weight of infcl_jax.distillation_loss in addition to the loss", Range(0, above=True))
    cache: str | None = setting(
        None,
        "folder for the features of the teacher, computed once per sample from the central square of its image; "
        '"workdir": in the work directory; None: the teacher encodes every batch as the student sees it',
    )

    def check(self) -> None:
        """Check that there is a teacher if another setting needs it."""
        if self.teacher is not None:
            return
        for name, default in (("weight", 1.0), ("cache", None)):
            if (value := getattr(self, name)) != default:
                raise ValueError(f"expected distill.teacher with distill.{name}={value!r}, got None; set it")
