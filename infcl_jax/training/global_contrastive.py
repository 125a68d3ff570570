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
from infcl_jax.schema import Range, Section, setting
from infcl_jax.training.optimizer_config import OptimizerConfig

GAMMA_SCHEDULES = ("constant", "cosine")
_DECAY, _EPS = Range(0, 1, below=True), Range(0, 1, above=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GlobalContrastiveConfig(Section, prefix="global_contrastive.", shapes=True):
    """Settings of SogCLR, iSogCLR and FastCLIP.

    The loss is `infcl_jax.global_contrastive_loss`.

    Gamma, the inner learning rate, is constant within an epoch. Its schedule "cosine" falls from 1 in the first epoch
    to `gamma_min` in epoch `gamma_epochs`. "constant" is 1 in the first epoch and `gamma_min` afterwards. The default
    is constant for SogCLR and iSogCLR and cosine for FastCLIP (Wei et al. 2024, section 4).

    Variants without a temperature regularizer ignore `rho`. `eps` is added to u, the moving average of a sample's mean
    exponential, inside its logarithm. Variants with one temperature, the inverse of the model's logit scale, take its
    learning rate from `OptimizerConfig`. Mode "reference" takes Adam's betas and eps for per-sample temperatures from
    the run's optimizer, as FastCLIP's code does.

    Examples:
      >>> config = GlobalContrastiveConfig(gamma_schedule="constant", gamma_min=0.8)
      >>> loss = make_loss("fastclip_v3", mesh, config=config, steps_per_epoch=100, optimizer=OptimizerConfig())

    Raises:
      ValueError: a value is out of range.
    """

    mode: str = setting("published", '"published": loss of the papers; "reference": loss of the authors\' code', MODES)
    gamma_schedule: str | None = setting(
        None, "schedule of gamma, the inner learning rate; None: default of the loss", GAMMA_SCHEDULES
    )
    gamma_min: float = setting(0.2, "final gamma; the initial one is 1", Range(0, 1))
    gamma_epochs: int = setting(18, "epochs of the gamma schedule", Range(1, 10**6))
    rho: float = setting(6.5, "weight of the temperature regularizer", Range(0, 1e4))
    eps: float = setting(1e-14, "constant added to the sample state u", _EPS)
    temperature_learning_rate: float = setting(
        1e-2, "learning rate of per-sample temperatures", Range(0, 1e4, above=True)
    )
    temperature_beta1: float | None = setting(
        None, 'beta1 of Adam for per-sample temperatures; None: optimizer.beta1 in mode "reference", else 0.9', _DECAY
    )
    temperature_beta2: float | None = setting(
        None, 'beta2 of Adam for per-sample temperatures; None: optimizer.beta2 in mode "reference", else 0.999', _DECAY
    )
    temperature_eps: float | None = setting(
        None, 'eps of Adam for per-sample temperatures; None: optimizer.eps in mode "reference", else 1e-8', _EPS
    )


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
