"""Optimizers by name, their settings, and per-parameter values from the names of parameters.

Ordered rules (regular expression, value): the first that matches a name gives its value. Layer-wise decay.
"""

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from infcl_jax.models import TOWERS
from infcl_jax.models.depth import distances_to_output
from infcl_jax.schema import Range, Section, setting

Rules = Sequence[tuple[str, float]]


def parameter_names(params: Any) -> Any:
    """Map each parameter to its path, such as "visual/proj/kernel"."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: jax.tree_util.keystr(path, simple=True, separator="/"), params
    )


def values_by_rules(name: str, rules: Rules, params: Any) -> Any:
    """Map each parameter to the value of the first rule whose regular expression matches its whole name.

    `name` is the setting that has the rules. Raises `ValueError` for a parameter without a rule.
    """

    def value_of(parameter: str) -> float:
        for pattern, value in rules:
            if re.fullmatch(pattern, parameter):
                return value
        raise ValueError(f"expected a rule of {name} for every parameter, got none for {parameter}; end with ('.*', 1)")

    return jax.tree.map(value_of, parameter_names(params))


def check_pairs(name: str, rules: Sequence[tuple[str, Any]], kind: str, is_valid: Callable[[Any], bool]) -> None:
    """Raise `ValueError` unless rules pair regular expressions with valid values.

    `name` is the setting and `kind` describes a valid value. `is_valid` may raise `TypeError` or `ValueError`.
    """
    for rule in rules:
        try:
            pattern, value = rule
            re.compile(pattern)
            valid = is_valid(value)
        except (TypeError, ValueError, re.error):
            valid = False
        if not valid:
            raise ValueError(f"expected {name} to be pairs of a regular expression and {kind}, got {rule!r}")


def layer_decay_factors(decays: Sequence[float], params: Any) -> Any:
    """Map each parameter to its factor of the learning rate under layer-wise decay.

    The factor is `decay^(L + 1 - l)` for layer l of a tower with L layers. Everything before the first layer, such as
    embeddings, has l = 0. The LayerNorm after the last layer has l = L, as in timm's `param_groups_layer_decay`.
    Projections, pooling heads, logit scale and bias have l = L + 1, so their factor is 1. Frozen towers and layers
    can be absent. Clark et al. 2020 (ELECTRA), Bao et al. 2022 (BEiT).
    """
    names = parameter_names(params)
    factors = jax.tree.map(lambda _: 1.0, names)
    for subtree, decay in zip(TOWERS.values(), decays, strict=True):
        if subtree in params:
            tower = parameter_names(params[subtree])
            distances = distances_to_output(jax.tree.leaves(tower))
            factors[subtree] = jax.tree.map(
                lambda name, distances=distances, decay=decay: decay ** distances[name], tower
            )
    return factors


SCHEDULES = ("cosine", "linear", "rsqrt", "constant")
WARMUP_STARTS = ("zero", "one_step")
TEMPERATURE_SCHEDULES = ("cosine", "constant", "threshold")

_STEPS = 2**31 - 1  # the step is an int32
_DECAY, _EPS, _RATE = Range(0, 1, below=True), Range(0, 1, above=True), Range(0, 1e4, above=True)
# Adafactor factors the second moments of matrices whose dimensions both have at least this size, as in big_vision.
_MIN_FACTORED_SIZE = 32


def _adam(config: "OptimizerConfig") -> optax.GradientTransformation:
    return optax.scale_by_adam(config.beta1, config.beta2, config.eps)


def _adafactor(config: "OptimizerConfig") -> optax.GradientTransformation:
    def decay(step: jax.Array, exponent: float) -> jax.Array:
        return jnp.minimum(1.0 - (step + 1.0) ** -exponent, config.beta2)

    return optax.chain(
        optax.scale_by_factored_rms(decay_rate_fn=decay, min_dim_size_to_factor=_MIN_FACTORED_SIZE),
        optax.clip_by_block_rms(1.0),
        _bfloat16_mean(config.beta1),
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


# Transformations of the gradient, before weight decay and learning rate.
OPTIMIZERS: dict[str, Callable[["OptimizerConfig"], optax.GradientTransformation]] = {
    "adamw": _adam,
    "lamb": _adam,
    "lion": lambda config: optax.scale_by_lion(config.beta1, config.beta2),
    "sgd": lambda config: optax.trace(config.beta1),
    "adafactor": _adafactor,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Section, prefix="optimizer.", shapes=True):
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

    The rules are ordered pairs (regular expression, factor). The expression matches whole parameter names such as
    "visual/proj/kernel", and the first match applies. The factors of `layer_decay`, see
    `infcl_jax.training.optimizer_config.layer_decay_factors`, multiply the factors of `learning_rate_rules`. Without
    `weight_decay_rules` (None), parameters with two or more dimensions and the probe of a `MapPool` have factor 1, as
    in OpenCLIP, and all others (gains, biases and the logit scale) have 0. With empty rules the probe has 0 too.

    With `warmup_start` "zero", the learning rate at step t = 0, 1, ... of the warm-up is
    `learning_rate t / warmup_steps`, so the first step changes no parameter (FastCLIP's paper, big_vision). With
    "one_step" it is `learning_rate (t + 1) / warmup_steps` (OpenCLIP and FastCLIP's code).

    With `temperature_learning_rate`, the logit scale follows neither `schedule`, `warmup_steps`, `cooldown_steps` nor
    `learning_rate_rules`. Its `temperature_schedule` has no warm-up. "threshold" uses a third of the rate while the
    temperature is at most 0.03 (FastCLIP-v3).

    `beta1` is the decay of the momentum of "sgd" and "adafactor", and the weight of the momentum in the update of
    "lion". `beta2` is the decay of the momentum of "lion", and for "adafactor" the upper limit of the decay
    `1 - t^-0.8` at step t = 1, 2, ...; "sgd" ignores it. Only "adamw" and "lamb" use `eps`.

    `docs/settings.md` explains the fields. A run has the same defaults, but for 100 `warmup_steps`.

    Examples:
      >>> config = OptimizerConfig(learning_rate=5e-4, warmup_steps=2000, clip_norm=1.0)
      >>> config.name, config.schedule
      ('adamw', 'cosine')

    Raises:
      ValueError: a value is out of range.
    """

    name: str = setting("adamw", "optimizer", OPTIMIZERS, fixed=True)
    learning_rate: float = setting(1e-3, "peak learning rate, after the warm-up", Range(0, above=True))
    schedule: str = setting("cosine", "learning rate schedule after the warm-up", SCHEDULES)
    warmup_steps: int = setting(0, "steps of linear warm-up", Range(0, _STEPS))
    warmup_start: str = setting(
        "zero",
        'learning rate of the first step; "one_step": learning_rate / warmup_steps, as in OpenCLIP',
        WARMUP_STARTS,
    )
    final_learning_rate: float = setting(
        0.0, 'learning rate at the end of "cosine", "linear" and the cooldown', Range(0)
    )
    rsqrt_timescale: float = setting(
        10_000.0, 'steps after the warm-up in which "rsqrt" falls to 0.71 of the learning rate', Range(1, _STEPS)
    )
    cooldown_steps: int = setting(
        0,
        "last steps, in which the learning rate falls to optimizer.final_learning_rate, with any schedule",
        Range(0, _STEPS),
    )
    cooldown_power: float = setting(1.0, "power of the cooldown; 1: linear", Range(0, 100, above=True))
    learning_rate_rules: Rules = setting(
        (), 'learning rate factors by parameter name, such as (("visual/.*", 0.1), (".*", 1.0)); (): 1 for all'
    )
    layer_decay: tuple[float, float] = setting(
        (1.0, 1.0),
        "factors by which the learning rates of the image and the text tower fall from layer to layer; 1: none",
        Range(0, 1, above=True),
    )
    temperature_learning_rate: float | None = setting(
        None, "learning rate of the logit scale; None: that of the other parameters", _RATE
    )
    temperature_schedule: str = setting(
        "constant", "schedule of optimizer.temperature_learning_rate", TEMPERATURE_SCHEDULES
    )
    weight_decay: float = setting(0.2, "decoupled weight decay", Range(0, 100))
    weight_decay_rules: Rules | None = setting(
        None,
        "weight decay factors by parameter name; None: matrices and the probe of SigLIP's pool decay, as in OpenCLIP; "
        "(): only matrices decay",
        before=(),
    )
    beta1: float = setting(0.9, "decay of the first moment or the momentum", _DECAY)
    beta2: float = setting(0.98, "decay of the second moment", _DECAY)
    eps: float = setting(1e-6, "constant added to the root of the second moment", _EPS)
    clip_norm: float | None = setting(
        None, "largest global norm of the gradient; None: no clipping", Range(0, above=True)
    )

    def check(self) -> None:
        """Check the rules."""
        for name in ("learning_rate_rules", "weight_decay_rules"):
            check_pairs(f"optimizer.{name}", getattr(self, name) or (), "a number >= 0", lambda value: value >= 0)
