"""Settings of distillation from a teacher."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistillConfig:
    """Settings of distillation.

    Examples:
      >>> DistillConfig(teacher="runs/teacher", weight=0.5).cache is None
      True

    Attributes:
      teacher: model that `infcl_jax.load` reads; None: no distillation.
      weight: weight of `infcl_jax.distillation_loss` in addition to the loss.
      cache: folder for the features of the teacher; "workdir": in the work directory; None: the teacher encodes every
        batch.

    Raises:
      ValueError: the weight is not positive, or `weight` or `cache` is set without a teacher.
    """

    teacher: str | None = None
    weight: float = 1.0
    cache: str | None = None

    def __post_init__(self) -> None:
        if not self.weight > 0:
            raise ValueError(f"expected distill.weight > 0, got {self.weight}")
        if self.teacher is not None:
            return
        for name, default in (("weight", 1.0), ("cache", None)):
            if (value := getattr(self, name)) != default:
                raise ValueError(f"expected distill.teacher with distill.{name}={value!r}, got None; set it")
