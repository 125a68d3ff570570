"""Objectives of SogCLR, iSogCLR and FastCLIP v0 to v3, and their settings.

Yuan et al. 2022 (SogCLR), Qiu et al. 2023 (iSogCLR) and Wei et al. 2024 (FastCLIP). GCL, RGCL and RGCL-g are FastCLIP's
names of the objectives.
"""

import dataclasses
from typing import Any, NamedTuple

from infcl_jax.losses.samples import SampleState
from infcl_jax.ops.common.checks import check_choice

# Loss of the papers, or of the authors' code.
MODES = ("published", "reference")


@dataclasses.dataclass(frozen=True)
class Variant:
    """Objective of one global contrastive loss.

    Attributes:
      temperature: "constant", "learned" (a single one), or "samples" (two learned temperatures per sample).
      scaled: whether c = t in the paper, else c = 1: each sample's term is multiplied by its temperature.
      scaled_in_code: whether c = t in the authors' code.
      gamma_schedule: schedule of gamma in the papers, "constant" or "cosine" by epoch. The caller applies it.
      regularized: whether the loss contains `rho` times the temperature.
    """

    temperature: str
    scaled: bool
    scaled_in_code: bool
    gamma_schedule: str
    regularized: bool = False

    @property
    def per_sample(self) -> bool:
        """True if each sample has its own temperatures."""
        return self.temperature == "samples"


# g1_i, g2_i: mean exponentials over the negatives of image i and text i in the dataset. t, t1_i, t2_i: temperatures.
VARIANTS = {
    # GCL: t mean_i(log(eps + g1_i) + log(eps + g2_i)), t constant
    "sogclr": Variant("constant", True, False, "constant"),
    # RGCL: mean_i(t1_i (log(eps + g1_i) + rho) + t2_i (log(eps + g2_i) + rho)), t1_i and t2_i learned
    "isogclr": Variant("samples", True, False, "constant", regularized=True),
    # mean_i(log(eps + g1_i) + log(eps + g2_i)), t learned
    "fastclip_v0": Variant("learned", False, False, "cosine"),
    # GCL
    "fastclip_v1": Variant("constant", True, False, "cosine"),
    # RGCL
    "fastclip_v2": Variant("samples", True, False, "cosine", regularized=True),
    # RGCL-g: t mean_i(log(eps + g1_i) + log(eps + g2_i) + 2 rho), t learned
    "fastclip_v3": Variant("learned", True, True, "cosine", regularized=True),
}


class Adam(NamedTuple):
    """Adam settings for per-sample temperatures."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Static settings of one call, as described by `infcl_jax.global_contrastive_loss`."""

    name: str
    mode: str
    eps: float
    rho: float
    temperature_learning_rate: float | None
    temperature_adam: Adam
    implementation: str | None

    def __post_init__(self) -> None:
        check_choice("variant", self.name, tuple(VARIANTS))
        check_choice("mode", self.mode, MODES)
        if not self.eps > 0:
            raise ValueError(f"expected eps > 0, got {self.eps}")
        if self.rho and not self.variant.regularized:
            raise ValueError(f"expected no rho for {self.name}, which has none, got {self.rho}")
        beta1, beta2, eps = self.temperature_adam
        for name, beta in (("temperature_beta1", beta1), ("temperature_beta2", beta2)):
            if not 0 <= beta < 1:
                raise ValueError(f"expected 0 <= {name} < 1, got {beta}")
        if not eps > 0:
            raise ValueError(f"expected temperature_eps > 0, got {eps}")
        if self.temperature_adam != Adam() and not self.variant.per_sample:
            raise ValueError(
                f"expected no temperature_beta1, temperature_beta2, temperature_eps for {self.name}, got "
                f"{self.temperature_adam}"
            )

    @property
    def variant(self) -> Variant:
        """Objective of the loss."""
        return VARIANTS[self.name]

    @property
    def published(self) -> bool:
        """True for the papers' formulas, False for the authors' code."""
        return self.mode == "published"

    @property
    def factor(self) -> float:
        """Factor k of the loss."""
        return 1.0 if self.published else 0.5

    @property
    def scaled(self) -> bool:
        """True for c = t, False for c = 1."""
        return self.variant.scaled if self.published else self.variant.scaled_in_code

    def check_call(self, state: SampleState, logit_scale: Any, epoch: Any) -> None:
        """Raise `ValueError` unless the call has the arguments of the variant and no others."""
        per_sample = self.variant.per_sample
        requirements = {
            "logit_scale": (logit_scale, not per_sample),
            "epoch": (epoch, per_sample),
            "temperature_learning_rate": (self.temperature_learning_rate, per_sample),
            "temperatures in the state": (state.temperature, per_sample),
        }
        for name, (value, required) in requirements.items():
            if (value is not None) != required:
                no, got = ("", "none") if required else ("no ", "one")
                raise ValueError(f"expected {no}{name} for {self.name}, got {got}")
