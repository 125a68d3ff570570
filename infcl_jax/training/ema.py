"""Exponential moving average (EMA) of parameters, for evaluation."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Integer

# timm's `ModelEmaV3`: after update t, the warm-up limits the decay to 1 - t^-power.
_WARMUP_POWER = 2 / 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class EMAConfig:
    """Settings of the moving average.

    Examples:
      >>> EMAConfig(decay=0.9999, warmup=True).decay
      0.9999

    Attributes:
      decay: weight of the previous average in each update, in [0, 1).
      warmup: whether the decay rises from 0 to `decay`: it is at most `1 - t^(-2/3)` after update t. Without warm-up,
        the average of a run of fewer than some `1 / (1 - decay)` steps keeps much of the initial parameters.

    Raises:
      ValueError: `decay` is out of range.
    """

    decay: float
    warmup: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ValueError(f"expected 0 <= ema_decay < 1, got {self.decay}")


def initial_ema(variables: Any) -> Any:
    """Copy variables to fp32, as the average before the first update."""
    return jax.tree.map(lambda value: jnp.array(value, jnp.float32), variables)


def updated_ema(config: EMAConfig, ema: Any, variables: Any, update: Integer[Array, ""] | int) -> Any:
    """Update the average: `ema <- decay ema + (1 - decay) variables`, at the end of update 1, 2, ...

    Running statistics of batch normalization are averaged too, as by timm's `ModelEmaV3`.
    """
    decay: Float32[Array, ""] | float = config.decay
    if config.warmup:
        decay = jnp.minimum(decay, 1.0 - jnp.asarray(update, jnp.float32) ** -_WARMUP_POWER)
    rate = 1.0 - decay
    # In this form, variables that do not change keep their average bit for bit.
    return jax.tree.map(lambda mean, value: mean + rate * (value.astype(jnp.float32) - mean), ema, variables)


def evaluated_variables(variables: Mapping[str, Any], ema: Mapping[str, Any] | None) -> dict[str, Any]:
    """Choose the variables to evaluate or export: the averages where there are some.

    Examples:
      >>> average = jax.tree.map(jnp.zeros_like, variables)
      >>> chosen = evaluated_variables(variables, average)
      >>> float(chosen["params"]["logit_scale"])
      0.0

    Args:
      variables: parameters and running statistics of a state or a checkpoint.
      ema: its averages, which lack frozen parameters; None for a run without `ema_decay`.

    Returns:
      Variables with the structure and dtypes of `variables`.
    """

    def averaged(value: Any, mean: Any) -> Any:
        if isinstance(mean, Mapping):
            return {**value, **{name: averaged(value[name], mean[name]) for name in mean}}
        return mean.astype(value.dtype)

    return dict(variables) if ema is None else averaged(variables, ema)
