"""Training loss with distillation from a teacher."""

import dataclasses
from typing import TYPE_CHECKING, Any

from infcl_jax.losses.base import IMAGE_TEXT_TEACHER, ONE_POSITIVE, Loss, LossOutput
from infcl_jax.losses.clip import ClipLoss
from infcl_jax.losses.distillation import IMPLEMENTATIONS, clip_and_distillation, distillation_loss
from infcl_jax.ops.common.checks import check_choice

if TYPE_CHECKING:
    from infcl_jax.models import CLIPOutput


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistilledLoss(Loss):
    """Training loss plus a multiple of `distillation_loss`.

    With `ClipLoss` of one positive without label smoothing, one sweep over the pairs computes both. Other losses have a
    sweep of their own.

    Examples:
      >>> loss = DistilledLoss.wrap(ClipLoss(name="clip"), weight=0.5, teacher_scale=20.0)
      >>> output = loss(
      ...     CLIPOutput(image, text, jnp.float32(14.3), logit_bias=None), teacher_image=image, teacher_text=text
      ... )
      >>> print(f"{output.value:.2f} {output.distillation:.3f}")
      0.39 0.011

    Attributes:
      loss: loss without sample state.
      weight: weight of the distillation.
      teacher_scale: inverse temperature of the teacher's similarities.

    Raises:
      ValueError: the loss has sample state, or does not support the implementation together with distillation.
    """

    loss: Loss
    weight: float
    teacher_scale: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loss.inputs:
            raise ValueError(f"expected a loss without sample state with a teacher, such as clip, got {self.loss.name}")
        if self.implementation is not None:
            check_choice("implementation with a teacher", self.implementation, self.implementations)

    @classmethod
    def wrap(cls, loss: Loss, weight: float, teacher_scale: float) -> "DistilledLoss":
        """Add distillation to a training loss."""
        settings = {field.name: getattr(loss, field.name) for field in dataclasses.fields(Loss)}
        return cls(**settings, loss=loss, weight=weight, teacher_scale=teacher_scale)

    @property
    def implementations(self) -> tuple[str, ...]:  # type: ignore[override]
        """Implementations that both the loss and the distillation support."""
        return tuple(name for name in IMPLEMENTATIONS if name in self.loss.implementations)

    @property
    def batch_inputs(self) -> tuple[str, ...]:
        """Keyword arguments of `__call__`: the loss's, and the teacher's features."""
        return (*self.loss.batch_inputs, *IMAGE_TEXT_TEACHER)

    def __call__(self, output: "CLIPOutput", **inputs: Any) -> LossOutput:
        """Compute the loss of the model output for the global batch.

        Args:
          output: model output, see `Loss`.
          **inputs: the arrays named in `batch_inputs`.
        """
        teacher = (*(inputs.pop(name) for name in IMAGE_TEXT_TEACHER), self.teacher_scale)
        operands = (output.image, output.text, output.logit_scale, *teacher)
        options: dict[str, Any] = {"axis_name": self.axis_name, "mesh": self.mesh}
        options["implementation"] = self.implementation
        if isinstance(self.loss, ClipLoss) and self.loss.targets == ONE_POSITIVE:
            clip, divergence = clip_and_distillation(*operands, **options)
            result = LossOutput(clip)
        else:
            result, divergence = self.loss(output, **inputs), distillation_loss(*operands, **options)
        return result._replace(value=result.value + self.weight * divergence, distillation=divergence)
