"""Optimizers by name, with schedules, weight decay and per-parameter rules."""

import operator
import re
from typing import Any

import jax
import jax.numpy as jnp
import optax

from infcl_jax.models import TOWERS
from infcl_jax.models.depth import distances_to_output
from infcl_jax.training.optimizer_config import (
    OPTIMIZERS,
    OptimizerConfig,
    layer_decay_factors,
    parameter_names,
    values_by_rules,
)

# FastCLIP-v3: at temperatures up to the threshold, the learning rate of the temperature is multiplied by the factor.
_TEMPERATURE_THRESHOLD, _THRESHOLD_FACTOR = 0.03, 1 / 3
_LOGIT_SCALE = "logit_scale"
_DECAYING_VECTORS = ("/attn_pool/probe",)  # of `infcl_jax.models.vit.MapPool`


def make_optimizer(config: OptimizerConfig, total_steps: int) -> optax.GradientTransformation:
    """Create the gradient transformation for `total_steps` steps.

    It gets the trained parameters alone, so `check_optimizer` checks rules that match no parameter.

    Examples:
      >>> optimizer = make_optimizer(OptimizerConfig(learning_rate=5e-4, warmup_steps=100), total_steps=1000)
      >>> opt_state = optimizer.init(variables["params"])

    Raises:
      ValueError: warm-up and cooldown are longer than the run. On initialization, a parameter matches no rule.
    """
    clipping = () if config.clip_norm is None else (optax.clip_by_global_norm(config.clip_norm),)
    trust = (_trust_ratio(config),) if config.name == "lamb" else ()
    transforms = (OPTIMIZERS[config.name](config), _add_decay(config), *trust, _scale_by_rates(config, total_steps))
    return optax.chain(*clipping, *transforms)


def learning_rate_schedule(config: OptimizerConfig, total_steps: int) -> optax.Schedule:
    """Create a schedule of linear warm-up, decay and cooldown.

    With the fraction `p` of the steps after the warm-up that are done, and `t` of these steps:

    | `schedule` | learning rate after the warm-up | same as |
    | --- | --- | --- |
    | "cosine" | `final + (peak - final) (1 + cos(pi p)) / 2` | OpenCLIP's `cosine_lr`, timm's `CosineLRScheduler` |
    | "linear" | `final + (peak - final) (1 - p)` | timm's `PolyLRScheduler` of power 1, big_vision's "linear" |
    | "rsqrt" | `peak / sqrt(1 + t / rsqrt_timescale)` | big_vision's "rsqrt" (Zhai et al. 2022, section 3.5) |
    | "constant" | `peak` | OpenCLIP's `const_lr` |

    In the last `cooldown_steps`, the learning rate `r` of the schedule becomes `final + d^cooldown_power (r - final)`,
    where `d` falls linearly from 1 to 0 at `total_steps`. With "constant" this is OpenCLIP's `const_lr_cooldown`. With
    the others, `final = 0` and power 1 it is the cooldown of big_vision.

    Examples:
      >>> schedule = learning_rate_schedule(OptimizerConfig(learning_rate=1e-3, warmup_steps=100), total_steps=1000)
      >>> [round(float(schedule(step)), 6) for step in (0, 50, 100, 550, 1000)]
      [0.0, 0.0005, 0.001, 0.0005, 0.0]

    Args:
      config: optimizer settings. `peak` is its `learning_rate` and `final` its `final_learning_rate`.
      total_steps: steps of the run.

    Returns:
      Function from the step, 0 in the first, to the float32 learning rate. It is constant from `total_steps` on.

    Raises:
      ValueError: warm-up and cooldown are longer than the run.
    """
    peak, final = config.learning_rate, config.final_learning_rate
    warmup, cooldown = config.warmup_steps, config.cooldown_steps
    if warmup >= total_steps:
        raise ValueError(
            f"expected optimizer.warmup_steps < total_steps, got {warmup} and {total_steps}; shorten the "
            "warm-up or train longer"
        )
    if warmup + cooldown > total_steps:
        raise ValueError(
            f"expected optimizer.warmup_steps + optimizer.cooldown_steps <= total_steps, got {warmup} + {cooldown} and "
            f"{total_steps}; shorten them or train longer"
        )

    def decayed(left: jax.Array) -> jax.Array | float:
        """Learning rate of the schedule with `left` steps to go."""
        fraction = jnp.clip(left.astype(jnp.float32) / (total_steps - warmup), 0.0, 1.0)
        if config.schedule == "cosine":
            # Half-angle form of (1 + cos(pi p)) / 2, which would cancel in fp32 near the end.
            return final + (peak - final) * jnp.sin(0.5 * jnp.pi * fraction) ** 2
        if config.schedule == "linear":
            return final + (peak - final) * fraction
        if config.schedule == "rsqrt":
            done = jnp.maximum(total_steps - warmup - left, 0).astype(jnp.float32)
            return peak * jax.lax.rsqrt(1.0 + done / config.rsqrt_timescale)
        return peak

    def schedule(step: jax.Array | int) -> jax.Array:
        step = jnp.minimum(step, total_steps)
        rate = decayed(total_steps - step)
        if cooldown:
            remaining = jnp.clip((total_steps - step).astype(jnp.float32) / cooldown, 0.0, 1.0)
            rate = final + remaining**config.cooldown_power * (rate - final)
        if warmup:
            completed = (step + int(config.warmup_start == "one_step")).astype(jnp.float32)
            rate = jnp.where(step < warmup, peak * completed / warmup, rate)
        return jnp.asarray(rate, jnp.float32)

    return schedule


def check_optimizer(config: OptimizerConfig, params: Any) -> None:
    """Check that per-parameter rules and layer decay fit a model.

    Examples:
      >>> config = OptimizerConfig(learning_rate_rules=[("visual/.*", 0.1), (".*", 1.0)])
      >>> check_optimizer(config, variables["params"])  # every rule matches a parameter

    Args:
      config: settings of the optimizer.
      params: all parameters of the model, arrays or shapes. A rule may match frozen parameters alone.

    Raises:
      ValueError: a rule matches no parameter, or a tower with layer decay has no layers.
    """
    names = jax.tree.leaves(parameter_names(params))
    for setting in ("learning_rate_rules", "weight_decay_rules"):
        for pattern, _ in getattr(config, setting) or ():
            if not any(re.fullmatch(pattern, name) for name in names):
                raise ValueError(
                    f"expected every rule of optimizer.{setting} to match a parameter, got {pattern!r}, which matches "
                    "none"
                )
    for (name, subtree), decay in zip(TOWERS.items(), config.layer_decay, strict=True):
        if decay < 1 and not any(distances_to_output(jax.tree.leaves(parameter_names(params[subtree]))).values()):
            raise ValueError(f"expected layers in the {name} tower with optimizer.layer_decay={decay}, got none; set 1")


def _trust_ratio(config: OptimizerConfig) -> optax.GradientTransformation:
    """Scale the updates of parameters with weight decay by LAMB's trust ratio."""

    def decays(params: Any) -> Any:
        return jax.tree.map(lambda factor: config.weight_decay * factor > 0, decay_factors(config, params))

    return optax.masked(optax.scale_by_trust_ratio(), decays)


def decay_factors(config: OptimizerConfig, params: Any) -> Any:
    """Compute the weight decay factor of each parameter; raise `ValueError` if one matches no rule."""
    if config.weight_decay_rules:
        return values_by_rules("optimizer.weight_decay_rules", config.weight_decay_rules, params)
    # OpenCLIP stores the probe as [1, 1, width], so that it decays like a matrix.
    vectors = _DECAYING_VECTORS if config.weight_decay_rules is None else ()
    return jax.tree.map(lambda p, name: float(p.ndim >= 2 or name.endswith(vectors)), params, parameter_names(params))


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
    factors = values_by_rules("optimizer.learning_rate_rules", rules, params)
    return jax.tree.map(operator.mul, factors, layer_decay_factors(config.layer_decay, params))


def _temperature_rate(config: OptimizerConfig, total_steps: int, step: jax.Array, params: Any) -> jax.Array | float:
    peak = config.temperature_learning_rate
    if config.temperature_schedule == "cosine":
        return optax.cosine_decay_schedule(peak, total_steps)(step)
    if config.temperature_schedule == "threshold":
        temperature = jnp.exp(-params[_LOGIT_SCALE])
        return jnp.where(temperature <= _TEMPERATURE_THRESHOLD, _THRESHOLD_FACTOR * peak, peak)
    return peak
