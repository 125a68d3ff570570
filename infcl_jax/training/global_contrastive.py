"""The global contrastive losses in training: their settings, the schedule of gamma, and what they remember."""

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
    """Settings of SogCLR, iSogCLR and FastCLIP, see `infcl_jax.global_contrastive_loss`.

    Attributes:
      mode: "published" or "reference".
      gamma_schedule: of gamma, which is constant within an epoch: "cosine" from 1 in the first epoch to `gamma_min` in
        epoch `gamma_epochs`, or "constant", 1 in the first and `gamma_min` from then on. None: as the variant has it,
        constant for SogCLR and iSogCLR and a cosine for FastCLIP (Wei et al. 2024, section 4).
      gamma_min: the last gamma.
      gamma_epochs: epochs until then.
      rho: weight of the temperatures; without meaning for variants that have none.
      eps: added to u.
      temperature_learning_rate: of the temperatures of samples. The one temperature of other variants is the model's
        logit scale, and learns as `OptimizerConfig` says.
      temperature_beta1: decay of the first moment of the samples' temperatures. None: beta1 of the run's optimizer in
        mode "reference", as FastCLIP's code passes it, and 0.9 in mode "published".
      temperature_beta2: decay of their second moment. None: beta2 of the run's optimizer, or 0.999.
      temperature_eps: added to the root of their second moment. None: eps of the run's optimizer, or 1e-8.

    Raises:
      ValueError: a value out of its range.
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
    """What a loss remembers before the first step; where each sample has temperatures of its own, they start alike.

    Args:
      variant: one of `infcl_jax.losses.global_contrastive.VARIANTS`.
      samples: of the dataset.
      init_logit_scale: the model's, the logarithm of the inverse of the temperature to start from.
      mesh: devices over which the state is sharded, as the batch is; None: one device.

    Returns:
      The state, fp32 `[n, 2]` with n at least `samples`, see `infcl_jax.create_samples`.

    Raises:
      ValueError: an unknown variant; otherwise as `infcl_jax.create_samples`.
    """
    check_choice("loss", variant, tuple(VARIANTS))
    own = VARIANTS[variant].temperature == "samples"
    return create_samples(samples, temperature=math.exp(-init_logit_scale) if own else None, mesh=mesh)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GlobalContrastive:
    """The loss of a run.

    Attributes:
      variant: one of `infcl_jax.losses.global_contrastive.VARIANTS`.
      config: its settings.
      steps_per_epoch: of the data.
      mesh: devices over which batch and state are sharded.
      implementation: see `infcl_jax.pairwise_lse`.
      optimizer: settings of the run's optimizer, from which mode "reference" takes Adam's for temperatures of samples.

    Raises:
      ValueError: an unknown variant or implementation, an epoch without a step, or no optimizer where it is needed.
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
        own = VARIANTS[self.variant].temperature == "samples"
        if own and self.config.mode == "reference" and self.optimizer is None:
            raise ValueError(
                f"expected the run's optimizer for {self.variant} in mode 'reference', got None; pass its settings"
            )

    def __call__(
        self, output: CLIPOutput, index: jax.Array, samples: SampleState, step: jax.Array
    ) -> tuple[jax.Array, SampleState]:
        """The loss and the batch's new rows of the state.

        Args:
          output: of the model for the global batch.
          index: int `[b]`, the sample of each row.
          samples: the state, which is left alone.
          step: int32 scalar, steps taken before this one.
        """
        config, kind = self.config, VARIANTS[self.variant]
        epoch = step // self.steps_per_epoch
        own = kind.temperature == "samples"
        return global_contrastive_loss(
            output.image,
            output.text,
            index,
            samples,
            variant=self.variant,
            gamma=self.gamma(epoch),
            rho=config.rho if kind.regularized else 0.0,
            eps=config.eps,
            mode=config.mode,
            mesh=self.mesh,
            implementation=self.implementation,
            rows_only=True,
            logit_scale=None if own else output.logit_scale,
            epoch=epoch if own else None,
            temperature_learning_rate=config.temperature_learning_rate if own else None,
            **(self._temperature_adam() if own else {}),
        )

    def _temperature_adam(self) -> dict[str, Any]:
        """Adam's settings for temperatures of samples; defaults are left out."""
        settings = {name: getattr(self.config, f"temperature_{name}") for name in ("beta1", "beta2", "eps")}
        if self.config.mode == "reference":
            settings = {name: getattr(self.optimizer, name) if v is None else v for name, v in settings.items()}
        return {f"temperature_{name}": value for name, value in settings.items() if value is not None}

    def write(self, samples: SampleState, index: jax.Array, rows: SampleState) -> SampleState:
        """The state with the rows of a batch, in place where it is donated."""
        return write_samples(samples, index, rows, mesh=self.mesh)

    def gamma(self, epoch: jax.Array) -> jax.Array:
        """The inner learning rate of an epoch, counted from 0, as fp32."""
        least, last = self.config.gamma_min, self.config.gamma_epochs
        if (self.config.gamma_schedule or VARIANTS[self.variant].gamma_schedule) == "constant":
            return jnp.where(epoch == 0, jnp.float32(1), jnp.float32(least))
        phase = jnp.minimum(epoch, last).astype(jnp.float32) * (jnp.pi / last)
        return least + (1 - least) * (1 + jnp.cos(phase)) / 2
