"""Training with global contrastive losses: settings, gamma schedule and sample state."""

import dataclasses
import math
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from infcl_jax.losses import Loss, LossOutput, SampleState, create_samples, global_contrastive_loss
from infcl_jax.losses.base import ONE_POSITIVE, SAMPLE_INPUTS, Targets
from infcl_jax.losses.variants import MODES, VARIANTS, Variant
from infcl_jax.models import CLIPOutput
from infcl_jax.ops.common.checks import check_choice
from infcl_jax.training.optimizer_config import OptimizerConfig

GAMMA_SCHEDULES = ("constant", "cosine")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GlobalContrastiveConfig:
    """Settings of SogCLR, iSogCLR and FastCLIP.

    The loss is `infcl_jax.global_contrastive_loss`.

    Examples:
      >>> config = GlobalContrastiveConfig(gamma_schedule="constant", gamma_min=0.8)
      >>> loss = make_loss("fastclip_v3", mesh, config=config, steps_per_epoch=100, optimizer=OptimizerConfig())

    Attributes:
      mode: "published" follows the papers, "reference" the authors' code.
      gamma_schedule: schedule of gamma, the inner learning rate; gamma is constant within an epoch. "cosine": from 1 in
        the first epoch to `gamma_min` in epoch `gamma_epochs`. "constant": 1 in the first epoch and `gamma_min`
        afterwards. None: the schedule of the variant, constant for SogCLR and iSogCLR and cosine for FastCLIP (Wei et
        al. 2024, section 4).
      gamma_min: final gamma, in [0, 1].
      gamma_epochs: epochs until the cosine reaches `gamma_min`.
      rho: weight of the temperature regularizer; ignored by variants without one.
      eps: constant added to u, the moving average of a sample's mean exponential, inside its logarithm.
      temperature_learning_rate: Adam's learning rate for per-sample temperatures. Other variants have one temperature,
        the inverse of the model's logit scale, whose learning rate `OptimizerConfig` sets.
      temperature_beta1: Adam's beta1 for per-sample temperatures. None: beta1 of the run's optimizer in mode
        "reference", as in FastCLIP's code, and 0.9 in mode "published".
      temperature_beta2: Adam's beta2 for per-sample temperatures. None: beta2 of the run's optimizer in mode
        "reference", and 0.999 in mode "published".
      temperature_eps: Adam's eps for per-sample temperatures. None: eps of the run's optimizer in mode "reference", and
        1e-8 in mode "published".

    Raises:
      ValueError: a value is out of range.
    """

    mode: str = "published"
    gamma_schedule: str | None = None
    gamma_min: float = 0.2
    gamma_epochs: int = 18
    rho: float = 6.5
    eps: float = 1e-14
    temperature_learning_rate: float = 1e-2
    temperature_beta1: float | None = None
    temperature_beta2: float | None = None
    temperature_eps: float | None = None

    def __post_init__(self) -> None:
        check_choice("global_contrastive.mode", self.mode, MODES)
        if self.gamma_schedule is not None:
            check_choice("global_contrastive.gamma_schedule", self.gamma_schedule, GAMMA_SCHEDULES)
        if not 0 <= self.gamma_min <= 1:
            raise ValueError(f"expected 0 <= global_contrastive.gamma_min <= 1, got {self.gamma_min}")
        for name in ("gamma_epochs", "eps", "temperature_learning_rate"):
            if not getattr(self, name) > 0:
                raise ValueError(f"expected global_contrastive.{name} > 0, got {getattr(self, name)}")
        if not self.rho >= 0:
            raise ValueError(f"expected global_contrastive.rho >= 0, got {self.rho}")
        for name in ("temperature_beta1", "temperature_beta2"):
            if getattr(self, name) is not None and not 0 <= getattr(self, name) < 1:
                raise ValueError(f"expected 0 <= global_contrastive.{name} < 1 or None, got {getattr(self, name)}")
        if self.temperature_eps is not None and not self.temperature_eps > 0:
            raise ValueError(f"expected global_contrastive.temperature_eps > 0 or None, got {self.temperature_eps}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GlobalContrastive(Loss):
    """Global contrastive loss with its gamma schedule.

    Examples:
      >>> loss = GlobalContrastive(name="sogclr", steps_per_epoch=100)
      >>> loss.inputs
      ('index', 'samples', 'step')

    Attributes:
      name: one of `infcl_jax.losses.variants.VARIANTS`.
      config: settings of the loss.
      steps_per_epoch: training steps per epoch.
      optimizer: settings of the run's optimizer. Mode "reference" takes Adam's betas and eps for per-sample
        temperatures from them.

    Raises:
      ValueError: the name or implementation is unknown, `steps_per_epoch` < 1, or `optimizer` is None for per-sample
        temperatures in mode "reference".
    """

    config: GlobalContrastiveConfig = GlobalContrastiveConfig()
    steps_per_epoch: int
    optimizer: OptimizerConfig | None = None

    inputs: ClassVar[tuple[str, ...]] = SAMPLE_INPUTS

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("loss", self.name, tuple(VARIANTS))
        if self.steps_per_epoch < 1:
            raise ValueError(f"expected steps_per_epoch >= 1, got {self.steps_per_epoch}")
        if self.variant.per_sample and self.config.mode == "reference" and self.optimizer is None:
            raise ValueError(
                f"expected the run's optimizer for {self.name} in mode 'reference', got None; pass its settings"
            )

    @classmethod
    def create(
        cls, name: str, mesh: Mesh | None, implementation: str | None, targets: Targets = ONE_POSITIVE, **settings: Any
    ) -> Self:
        """Create the loss from the settings of a run, see `Loss.create`."""
        del targets
        return cls(name=name, mesh=mesh, implementation=implementation, **settings)

    @property
    def variant(self) -> Variant:
        """Objective of the loss."""
        return VARIANTS[self.name]

    def init_samples(self, num_samples: int, init_logit_scale: float) -> SampleState:
        """Create the sample state (u, tau).

        Per-sample temperatures all start at `exp(-init_logit_scale)`.

        Args:
          num_samples: number of samples in the dataset.
          init_logit_scale: initial logit scale of the model, the logarithm of the inverse temperature.

        Returns:
          The state, fp32 `[n, 2]` with n at least `num_samples`, see `infcl_jax.create_samples`.

        Raises:
          ValueError: `infcl_jax.create_samples` rejects the number or the temperature.
        """
        temperature = math.exp(-init_logit_scale) if self.variant.per_sample else None
        return create_samples(num_samples, temperature=temperature, axis_name=self.axis_name, mesh=self.mesh)

    def __call__(self, output: CLIPOutput, **inputs: Any) -> LossOutput:
        """Compute the loss and the new sample state of the batch, see `Loss`."""
        epoch = inputs["step"] // self.steps_per_epoch
        value, rows = global_contrastive_loss(
            output.image,
            output.text,
            inputs["index"],
            inputs["samples"],
            variant=self.name,
            gamma=self.gamma(epoch),
            rho=self.config.rho if self.variant.regularized else 0.0,
            eps=self.config.eps,
            mode=self.config.mode,
            axis_name=self.axis_name,
            mesh=self.mesh,
            implementation=self.implementation,
            rows_only=True,
            **(self._temperature_settings(epoch) if self.variant.per_sample else {"logit_scale": output.logit_scale}),
        )
        return LossOutput(value, rows, 1 / rows.temperature.mean() if self.variant.per_sample else None)

    def _temperature_settings(self, epoch: jax.Array) -> dict[str, Any]:
        """Collect the arguments of `global_contrastive_loss` for per-sample temperatures."""
        adam = {name: getattr(self.config, f"temperature_{name}") for name in ("beta1", "beta2", "eps")}
        if self.config.mode == "reference":
            adam = {name: getattr(self.optimizer, name) if v is None else v for name, v in adam.items()}
        settings = {"learning_rate": self.config.temperature_learning_rate} | adam
        return {"epoch": epoch} | {f"temperature_{name}": v for name, v in settings.items() if v is not None}

    def gamma(self, epoch: jax.Array) -> jax.Array:
        """Compute gamma, an fp32 scalar, from the number of completed epochs."""
        gamma_min, epochs = self.config.gamma_min, self.config.gamma_epochs
        if (self.config.gamma_schedule or self.variant.gamma_schedule) == "constant":
            return jnp.where(epoch == 0, jnp.float32(1), jnp.float32(gamma_min))
        phase = jnp.minimum(epoch, epochs).astype(jnp.float32) * (jnp.pi / epochs)
        return gamma_min + (1 - gamma_min) * (1 + jnp.cos(phase)) / 2
