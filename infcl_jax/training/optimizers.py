"""Optimizers by name, with schedules, weight decay and per-parameter rules."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from infcl_jax.checks import check_choice
from infcl_jax.training.rules import Rules, check_rules, parameter_names, values_by_rules

OPTIMIZERS = ("adamw", "lamb", "lion", "sgd", "adafactor")
SCHEDULES = ("cosine", "constant")
WARMUP_STARTS = ("zero", "one_step")
TEMPERATURE_SCHEDULES = (*SCHEDULES, "threshold")

# FastCLIP-v3: at temperatures up to the threshold, the learning rate of the temperature is multiplied by the factor.
_TEMPERATURE_THRESHOLD, _THRESHOLD_FACTOR = 0.03, 1 / 3
_LOGIT_SCALE = "logit_scale"
# Adafactor factors the second moments of matrices whose dimensions both have at least this size, as in big_vision.
_MIN_FACTORED_SIZE = 32


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

    Attributes:
      name: one of `OPTIMIZERS`.
      learning_rate: peak learning rate, reached at the end of the warm-up.
      schedule: schedule after the warm-up. "cosine": decay to `final_learning_rate` at the last step. "constant": no
        decay.
      warmup_steps: steps of linear warm-up.
      warmup_start: learning rate during the warm-up, at step t = 0, 1, ... "zero": `learning_rate t / warmup_steps`, so
        the first step changes no parameter (FastCLIP's paper, big_vision). "one_step":
        `learning_rate (t + 1) / warmup_steps` (OpenCLIP and FastCLIP's code).
      final_learning_rate: learning rate at the end of the cosine.
      learning_rate_rules: ordered pairs (regular expression, factor of the learning rate). The expression matches whole
        parameter names such as "visual/proj/kernel", and the first match applies. Empty: factor 1 for all.
      temperature_learning_rate: learning rate of the logit scale, to which `schedule`, `warmup_steps` and
        `learning_rate_rules` then do not apply. None: the logit scale has the learning rate of the other parameters.
      temperature_schedule: schedule of `temperature_learning_rate`, without warm-up: "constant", "cosine", or
        "threshold", which uses a third of the rate while the temperature is at most 0.03 (FastCLIP-v3).
      weight_decay: decoupled weight decay.
      weight_decay_rules: ordered pairs (regular expression, factor of the weight decay), matched like
        `learning_rate_rules`. Empty: factor 1 for parameters with two or more dimensions and 0 for all others (gains,
        biases and the logit scale).
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
    learning_rate_rules: Rules = ()
    temperature_learning_rate: float | None = None
    temperature_schedule: str = "constant"
    weight_decay: float = 0.2
    weight_decay_rules: Rules = ()
    beta1: float = 0.9
    beta2: float = 0.98
    eps: float = 1e-6
    clip_norm: float | None = None

    def __post_init__(self) -> None:
        check_choice("optimizer.name", self.name, OPTIMIZERS)
        check_choice("optimizer.schedule", self.schedule, SCHEDULES)
        check_choice("optimizer.warmup_start", self.warmup_start, WARMUP_STARTS)
        check_choice("optimizer.temperature_schedule", self.temperature_schedule, TEMPERATURE_SCHEDULES)
        for name in ("learning_rate", "eps"):
            if not getattr(self, name) > 0:  # also rejects NaN
                raise ValueError(f"expected optimizer.{name} > 0, got {getattr(self, name)}")
        for name in ("warmup_steps", "final_learning_rate", "weight_decay"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"expected optimizer.{name} >= 0, got {getattr(self, name)}")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"expected 0 <= optimizer.{name} < 1, got {getattr(self, name)}")
        for name in ("clip_norm", "temperature_learning_rate"):
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                raise ValueError(f"expected optimizer.{name} > 0 or None, got {getattr(self, name)}")
        for name in ("learning_rate_rules", "weight_decay_rules"):
            check_rules(f"optimizer.{name}", getattr(self, name))


def learning_rate_schedule(config: OptimizerConfig, total_steps: int) -> optax.Schedule:
    """Create a linear warm-up followed by a constant or cosine schedule.

    The cosine reaches `final_learning_rate` at `total_steps`.

    Raises:
      ValueError: the warm-up is longer than the run.
    """
    if config.warmup_steps >= total_steps:
        raise ValueError(
            f"expected optimizer.warmup_steps < total_steps, got {config.warmup_steps} and {total_steps}; shorten the "
            "warm-up or train longer"
        )
    peak, warmup = config.learning_rate, config.warmup_steps
    if config.schedule == "constant":
        main = optax.constant_schedule(peak)
    else:
        main = optax.cosine_decay_schedule(peak, total_steps - warmup, alpha=config.final_learning_rate / peak)
    if not warmup:
        return main
    start = 0.0 if config.warmup_start == "zero" else peak / warmup
    return optax.join_schedules((optax.linear_schedule(start, start + peak, warmup), main), (warmup,))


def make_optimizer(config: OptimizerConfig, total_steps: int) -> optax.GradientTransformation:
    """Create the gradient transformation for `total_steps` steps.

    Raises:
      ValueError: the warm-up is longer than the run. On initialization, a parameter matches no rule or a rule matches
        no parameter.
    """
    clipping = () if config.clip_norm is None else (optax.clip_by_global_norm(config.clip_norm),)
    trust = (_trust_ratio(config),) if config.name == "lamb" else ()
    transforms = (_direction(config), _add_decay(config), *trust, _scale_by_rates(config, total_steps))
    return optax.chain(*clipping, *transforms)


def _direction(config: OptimizerConfig) -> optax.GradientTransformation:
    """Create the transformation that precedes weight decay and learning rate."""
    if config.name == "lion":
        return optax.scale_by_lion(config.beta1, config.beta2)
    if config.name == "sgd":
        return optax.trace(config.beta1)
    if config.name == "adafactor":
        return _scale_by_adafactor(config.beta1, config.beta2)
    return optax.scale_by_adam(config.beta1, config.beta2, config.eps)


def _scale_by_adafactor(momentum: float, largest_decay: float) -> optax.GradientTransformation:
    def decay(step: jax.Array, exponent: float) -> jax.Array:
        return jnp.minimum(1.0 - (step + 1.0) ** -exponent, largest_decay)

    return optax.chain(
        optax.scale_by_factored_rms(decay_rate_fn=decay, min_dim_size_to_factor=_MIN_FACTORED_SIZE),
        optax.clip_by_block_rms(1.0),
        _bfloat16_mean(momentum),
    )


def _bfloat16_mean(decay: float) -> optax.GradientTransformation:
    """Average updates in fp32 without bias correction, and store the mean in bf16."""
    # `optax.ema` with a bf16 accumulator also computes the product with the decay in bf16.

    def init(params: Any) -> Any:
        return jax.tree.map(lambda p: jnp.zeros_like(p, jnp.bfloat16), params)

    def update(updates: Any, mean: Any, params: Any = None) -> tuple[Any, Any]:
        mean = jax.tree.map(lambda m, u: decay * m.astype(u.dtype) + (1 - decay) * u, mean, updates)
        return mean, jax.tree.map(lambda m: m.astype(jnp.bfloat16), mean)

    return optax.GradientTransformation(init, update)


def _trust_ratio(config: OptimizerConfig) -> optax.GradientTransformation:
    """Scale the updates of parameters with weight decay by LAMB's trust ratio."""

    def decays(params: Any) -> Any:
        return jax.tree.map(lambda factor: config.weight_decay * factor > 0, decay_factors(config, params))

    return optax.masked(optax.scale_by_trust_ratio(), decays)


def decay_factors(config: OptimizerConfig, params: Any) -> Any:
    """Compute the weight decay factor of each parameter.

    Raises:
      ValueError: a parameter matches no rule, or a rule matches no parameter.
    """
    if config.weight_decay_rules:
        return values_by_rules("optimizer.weight_decay_rules", config.weight_decay_rules, params)
    return jax.tree.map(lambda p: float(p.ndim >= 2), params)


def _add_decay(config: OptimizerConfig) -> optax.GradientTransformation:
    def add(updates: Any, params: Any) -> Any:
        factors = decay_factors(config, params)
        return jax.tree.map(
            lambda u, f, p: u + config.weight_decay * f * p.astype(u.dtype) if f else u, updates, factors, params
        )

    return optax.stateless(add)


def _scale_by_rates(config: OptimizerConfig, total_steps: int) -> optax.GradientTransformation:
    """Multiply by the negative learning rates; the state is the step alone."""
    schedule = learning_rate_schedule(config, total_steps)

    def init(params: Any) -> optax.ScaleByScheduleState:
        _rate_factors(config, params)  # raises here, not at the first step, if a rule is wrong
        return optax.ScaleByScheduleState(jnp.zeros([], jnp.int32))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, optax.ScaleByScheduleState]:
        rate, factors = schedule(state.count), _rate_factors(config, params)
        rates = jax.tree.map(lambda factor: factor * rate, factors)
        if config.temperature_learning_rate is not None:
            temperature_rate = _temperature_rate(config, total_steps, state.count, params)
            names = parameter_names(params)
            rates = jax.tree.map(lambda name, r: temperature_rate if name == _LOGIT_SCALE else r, names, rates)
        updates = jax.tree.map(lambda r, u: -jnp.asarray(r).astype(u.dtype) * u, rates, updates)
        return updates, optax.ScaleByScheduleState(optax.safe_increment(state.count))

    return optax.GradientTransformation(init, update)


def _rate_factors(config: OptimizerConfig, params: Any) -> Any:
    rules = config.learning_rate_rules or ((".*", 1.0),)
    return values_by_rules("optimizer.learning_rate_rules", rules, params)


def _temperature_rate(config: OptimizerConfig, total_steps: int, step: jax.Array, params: Any) -> jax.Array | float:
    peak = config.temperature_learning_rate
    if config.temperature_schedule == "cosine":
        return optax.cosine_decay_schedule(peak, total_steps)(step)
    if config.temperature_schedule == "threshold":
        temperature = jnp.exp(-params[_LOGIT_SCALE])
        return jnp.where(temperature <= _TEMPERATURE_THRESHOLD, _THRESHOLD_FACTOR * peak, peak)
    return peak
