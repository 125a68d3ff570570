"""Settings of the optimizer."""

import dataclasses

from infcl_jax.ops.common.checks import check_choice
from infcl_jax.training.rules import Rules, check_rules

OPTIMIZERS = ("adamw", "lamb", "lion", "sgd", "adafactor")
SCHEDULES = ("cosine", "linear", "rsqrt", "constant")
WARMUP_STARTS = ("zero", "one_step")
TEMPERATURE_SCHEDULES = ("cosine", "constant", "threshold")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Settings of the optimizer, its schedules and its per-parameter rules.

    - "adamw": Adam with bias-corrected moments (Loshchilov & Hutter 2019, Algorithm 2; Radford et al. 2021, Table 18).
    - "lamb": the "adamw" update, weight decay included, scaled to the norm of each parameter by a trust ratio (You et
      al. 2020, Algorithm 2). Parameters without weight decay skip the trust ratio, as with timm's default
      `always_adapt=False`. These are biases, gains and the logit scale by default, and all parameters if `weight_decay`
      is 0.
    - "lion": the sign of an interpolated momentum (Chen et al. 2023, Algorithm 2).
    - "sgd": momentum `m <- beta1 m + g` (Sutskever et al. 2013).
    - "adafactor": factored second moments, update clipping to an RMS of 1, then momentum stored in bf16. The learning
      rate is not relative to the parameters' RMS (Shazeer & Stern 2018, Algorithm 4; Zhai et al. 2022, section 3.4, for
      ViT-g).

    Weight decay is decoupled from the gradient: `p <- p - rate (update + weight_decay p)`.

    Examples:
      >>> config = OptimizerConfig(learning_rate=5e-4, warmup_steps=2000, clip_norm=1.0)
      >>> config.name, config.schedule
      ('adamw', 'cosine')

    Attributes:
      name: one of `OPTIMIZERS`.
      learning_rate: peak learning rate, reached at the end of the warm-up.
      schedule: schedule after the warm-up, see `infcl_jax.training.learning_rate_schedule`.
      warmup_steps: steps of linear warm-up.
      warmup_start: learning rate during the warm-up, at step t = 0, 1, ... "zero": `learning_rate t / warmup_steps`, so
        the first step changes no parameter (FastCLIP's paper, big_vision). "one_step":
        `learning_rate (t + 1) / warmup_steps` (OpenCLIP and FastCLIP's code).
      final_learning_rate: learning rate at the end of "cosine", "linear" and the cooldown.
      rsqrt_timescale: steps after the warm-up in which "rsqrt" falls to `2^-1/2` of `learning_rate`.
      cooldown_steps: last steps, in which the learning rate of `schedule` falls to `final_learning_rate`.
      cooldown_power: power of the cooldown; 1: linear.
      learning_rate_rules: ordered pairs (regular expression, factor of the learning rate). The expression matches whole
        parameter names such as "visual/proj/kernel", and the first match applies. Empty: factor 1 for all.
      layer_decay: factors by which the learning rates of the image and the text tower fall from each layer to the one
        below, see `infcl_jax.training.rules.layer_decay_factors`. They multiply those of `learning_rate_rules`. 1: no
        decay.
      temperature_learning_rate: learning rate of the logit scale, to which `schedule`, `warmup_steps`, `cooldown_steps`
        and `learning_rate_rules` then do not apply. None: the logit scale has the learning rate of the other
        parameters.
      temperature_schedule: schedule of `temperature_learning_rate`, without warm-up: "constant", "cosine", or
        "threshold", which uses a third of the rate while the temperature is at most 0.03 (FastCLIP-v3).
      weight_decay: decoupled weight decay.
      weight_decay_rules: ordered pairs (regular expression, factor of the weight decay), matched like
        `learning_rate_rules`. None: factor 1 for parameters with two or more dimensions and for the probe of a
        `MapPool`, as in OpenCLIP, and 0 for all others (gains, biases and the logit scale). Empty: 0 for the probe too.
      beta1: decay of the first moment. For "sgd" and "adafactor", decay of the momentum. For "lion", weight of the
        momentum in the update.
      beta2: decay of the second moment. For "lion", decay of the momentum. For "adafactor", upper limit of the decay
        `1 - t^-0.8` at step t = 1, 2, ... Ignored by "sgd".
      eps: constant added to the root of the second moment by "adamw" and "lamb".
      clip_norm: maximum global norm of the gradient; None: no clipping.

    Raises:
      ValueError: a value is out of range.
    """

    name: str = "adamw"
    learning_rate: float = 1e-3
    schedule: str = "cosine"
    warmup_steps: int = 0
    warmup_start: str = "zero"
    final_learning_rate: float = 0.0
    rsqrt_timescale: float = 10_000.0
    cooldown_steps: int = 0
    cooldown_power: float = 1.0
    learning_rate_rules: Rules = ()
    layer_decay: tuple[float, float] = (1.0, 1.0)
    temperature_learning_rate: float | None = None
    temperature_schedule: str = "constant"
    weight_decay: float = 0.2
    weight_decay_rules: Rules | None = None
    beta1: float = 0.9
    beta2: float = 0.98
    eps: float = 1e-6
    clip_norm: float | None = None

    def __post_init__(self) -> None:
        check_choice("optimizer.name", self.name, OPTIMIZERS)
        check_choice("optimizer.schedule", self.schedule, SCHEDULES)
        check_choice("optimizer.warmup_start", self.warmup_start, WARMUP_STARTS)
        check_choice("optimizer.temperature_schedule", self.temperature_schedule, TEMPERATURE_SCHEDULES)
        for name in ("learning_rate", "rsqrt_timescale", "cooldown_power", "eps"):
            if not getattr(self, name) > 0:  # also rejects NaN
                raise ValueError(f"expected optimizer.{name} > 0, got {getattr(self, name)}")
        for name in ("warmup_steps", "cooldown_steps", "final_learning_rate", "weight_decay"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"expected optimizer.{name} >= 0, got {getattr(self, name)}")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"expected 0 <= optimizer.{name} < 1, got {getattr(self, name)}")
        if len(self.layer_decay) != 2 or not all(0 < decay <= 1 for decay in self.layer_decay):
            raise ValueError(f"expected optimizer.layer_decay to be two numbers in (0, 1], got {self.layer_decay}")
        for name in ("clip_norm", "temperature_learning_rate"):
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                raise ValueError(f"expected optimizer.{name} > 0 or None, got {getattr(self, name)}")
        for name in ("learning_rate_rules", "weight_decay_rules"):
            check_rules(f"optimizer.{name}", getattr(self, name) or ())
