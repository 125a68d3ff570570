"""Settings of distillation from a teacher."""

import dataclasses

from infcl_jax.schema import Range, Section, setting


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
