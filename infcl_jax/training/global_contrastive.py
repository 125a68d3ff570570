"""Training with global contrastive losses: settings, gamma schedule and sample state."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from infcl_jax.checks import check_choice, check_implementation
from infcl_jax.losses import SampleState, create_samples, global_contrastive_loss, write_samples
from infcl_jax.losses.global_contrastive import VARIANTS
from infcl_jax.models import CLIPOutput
from infcl_jax.ops.pairwise_lse import IMPLEMENTATIONS
from infcl_jax.training.optimizers import OptimizerConfig

GAMMA_SCHEDULES = ("constant", "cosine")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GlobalContrastiveConfig:
    """Settings of SogCLR, iSogCLR and FastCLIP.

    The loss is `infcl_jax.global_contrastive_loss`.

    Attributes:
      mode: "published" or "reference".
      gamma_schedule: schedule of gamma by epoch; gamma is constant within an epoch. "cosine": from 1 in the first epoch
        to `gamma_min` in epoch `gamma_epochs`. "constant": 1 in the first epoch and `gamma_min` afterwards. None: the
        schedule of the variant, constant for SogCLR and iSogCLR and cosine for FastCLIP (Wei et al. 2024, section 4).
      gamma_min: final gamma, in [0, 1].
      gamma_epochs: epochs until the cosine reaches `gamma_min`.
      rho: weight of the temperature regularizer; ignored by variants without one.
      eps: constant added to u.
      temperature_learning_rate: learning rate of per-sample temperatures. Other variants have one temperature, the
        model's logit scale, whose learning rate `OptimizerConfig` sets.
      temperature_beta1: decay of the first moment of per-sample temperatures. None: beta1 of the run's optimizer in
        mode "reference", as in FastCLIP's code, and 0.9 in mode "published".
      temperature_beta2: decay of the second moment of per-sample temperatures. None: beta2 of the run's optimizer in
        mode "reference", and 0.999 in mode "published".
      temperature_eps: constant added to the root of the second moment of per-sample temperatures. None: eps of the
        run's optimizer in mode "reference", and 1e-8 in mode "published".

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
        check_choice("global_contrastive.mode", self.mode, ("published", "reference"))
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


def initial_samples(variant: str, samples: int, init_logit_scale: float, mesh: Mesh | None = None) -> SampleState:
    """Create the sample state (u, tau) of a global contrastive loss.

    Per-sample temperatures all start at `exp(-init_logit_scale)`.

    Args:
      variant: one of `infcl_jax.losses.global_contrastive.VARIANTS`.
      samples: number of samples in the dataset.
      init_logit_scale: initial logit scale of the model, the logarithm of the inverse temperature.
      mesh: devices over which the state and the batch are sharded; None: one device.

    Returns:
      The state, fp32 `[n, 2]` with n at least `samples`, see `infcl_jax.create_samples`.

    Raises:
      ValueError: the variant is unknown, or `infcl_jax.create_samples` rejects its arguments.
    """
    check_choice("loss", variant, tuple(VARIANTS))
    per_sample = VARIANTS[variant].temperature == "samples"
    return create_samples(samples, temperature=math.exp(-init_logit_scale) if per_sample else None, mesh=mesh)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GlobalContrastive:
    """Global contrastive loss of a training run.

    Attributes:
      variant: one of `infcl_jax.losses.global_contrastive.VARIANTS`.
      config: settings of the loss.
      steps_per_epoch: training steps per epoch.
      mesh: devices over which the batch and the sample state are sharded.
      implementation: backend of `infcl_jax.pairwise_lse`; None: the best for the platform.
      optimizer: settings of the run's optimizer. Mode "reference" takes Adam's betas and eps for per-sample
        temperatures from them.

    Raises:
      ValueError: the variant or implementation is unknown, `steps_per_epoch` < 1, or `optimizer` is None for per-sample
        temperatures in mode "reference".
    """

    variant: str
    config: GlobalContrastiveConfig
    steps_per_epoch: int
    mesh: Mesh
    implementation: str | None = None
    optimizer: OptimizerConfig | None = None

    def __post_init__(self) -> None:
        check_choice("loss", self.variant, tuple(VARIANTS))
        check_implementation(self.implementation, IMPLEMENTATIONS)
        if self.steps_per_epoch < 1:
            raise ValueError(f"expected steps_per_epoch >= 1, got {self.steps_per_epoch}")
        per_sample = VARIANTS[self.variant].temperature == "samples"
        if per_sample and self.config.mode == "reference" and self.optimizer is None:
            raise ValueError(
                f"expected the run's optimizer for {self.variant} in mode 'reference', got None; pass its settings"
            )

    def __call__(
        self, output: CLIPOutput, index: jax.Array, samples: SampleState, step: jax.Array
    ) -> tuple[jax.Array, SampleState]:
        """Compute the loss and the new sample state of the batch.

        Args:
          output: model output for the global batch.
          index: int `[b]`, sample index of each row.
          samples: sample state; not modified.
          step: int32 scalar, number of completed steps.

        Returns:
          The loss, and the new rows of the sample state for the batch.
        """
        config, variant = self.config, VARIANTS[self.variant]
        epoch = step // self.steps_per_epoch
        per_sample = variant.temperature == "samples"
        return global_contrastive_loss(
            output.image,
            output.text,
            index,
            samples,
            variant=self.variant,
            gamma=self.gamma(epoch),
            rho=config.rho if variant.regularized else 0.0,
            eps=config.eps,
            mode=config.mode,
            mesh=self.mesh,
            implementation=self.implementation,
            rows_only=True,
            logit_scale=None if per_sample else output.logit_scale,
            epoch=epoch if per_sample else None,
            temperature_learning_rate=config.temperature_learning_rate if per_sample else None,
            **(self._temperature_adam() if per_sample else {}),
        )

    def _temperature_adam(self) -> dict[str, Any]:
        """Collect the Adam settings of per-sample temperatures that are not defaults."""
        settings = {name: getattr(self.config, f"temperature_{name}") for name in ("beta1", "beta2", "eps")}
        if self.config.mode == "reference":
            settings = {name: getattr(self.optimizer, name) if v is None else v for name, v in settings.items()}
        return {f"temperature_{name}": value for name, value in settings.items() if value is not None}

    def write(self, samples: SampleState, index: jax.Array, rows: SampleState) -> SampleState:
        """Write the rows of a batch into the sample state.

        The update is in place if `samples` is donated.
        """
        return write_samples(samples, index, rows, mesh=self.mesh)

    def gamma(self, epoch: jax.Array) -> jax.Array:
        """Compute the inner learning rate gamma, fp32, of a zero-based epoch."""
        gamma_min, epochs = self.config.gamma_min, self.config.gamma_epochs
        if (self.config.gamma_schedule or VARIANTS[self.variant].gamma_schedule) == "constant":
            return jnp.where(epoch == 0, jnp.float32(1), jnp.float32(gamma_min))
        phase = jnp.minimum(epoch, epochs).astype(jnp.float32) * (jnp.pi / epochs)
        return gamma_min + (1 - gamma_min) * (1 + jnp.cos(phase)) / 2
