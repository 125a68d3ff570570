"""The optimizer of a run: AdamW with warm-up, cosine decay, decay masks and gradient clipping."""

import dataclasses
from typing import Any

import jax
import optax


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW as CLIP trains with it (Radford et al., section 2.5 and Table 18; Loshchilov & Hutter, 2019).

    Attributes:
      learning_rate: the highest, reached at the end of the warm-up.
      warmup_steps: steps of linear increase from 0.
      final_learning_rate: where the cosine ends, at the last step.
      weight_decay: decoupled, on parameters with two or more dimensions.
      beta1: decay of the first moment.
      beta2: decay of the second moment.
      eps: added to the root of the second moment.
      clip_norm: largest global norm of the gradient; None: no clipping.

    Raises:
      ValueError: a value out of its range.
    """

    learning_rate: float = 1e-3
    warmup_steps: int = 0
    final_learning_rate: float = 0.0
    weight_decay: float = 0.2
    beta1: float = 0.9
    beta2: float = 0.98
    eps: float = 1e-6
    clip_norm: float | None = None

    def __post_init__(self) -> None:
        for name in ("learning_rate", "eps"):
            if not getattr(self, name) > 0:  # so that NaN is refused too
                raise ValueError(f"expected optimizer.{name} > 0, got {getattr(self, name)}")
        for name in ("warmup_steps", "final_learning_rate", "weight_decay"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"expected optimizer.{name} >= 0, got {getattr(self, name)}")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"expected 0 <= optimizer.{name} < 1, got {getattr(self, name)}")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(f"expected optimizer.clip_norm > 0 or None, got {self.clip_norm}")


def learning_rate_schedule(config: OptimizerConfig, total_steps: int) -> optax.Schedule:
    """Linear warm-up from 0, then a cosine down to `final_learning_rate` at `total_steps`.

    Raises:
      ValueError: the warm-up is longer than the run.
    """
    if config.warmup_steps >= total_steps:
        raise ValueError(
            f"expected optimizer.warmup_steps < total_steps, got {config.warmup_steps} and {total_steps}; shorten the "
            "warm-up or train longer"
        )
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=config.learning_rate,
        warmup_steps=config.warmup_steps,
        decay_steps=total_steps,
        end_value=config.final_learning_rate,
    )


def make_optimizer(config: OptimizerConfig, total_steps: int) -> optax.GradientTransformation:
    """The gradient transformation of a run of `total_steps` steps.

    Raises:
      ValueError: the warm-up is longer than the run.
    """
    adamw = optax.adamw(
        learning_rate_schedule(config, total_steps),
        b1=config.beta1,
        b2=config.beta2,
        eps=config.eps,
        weight_decay=config.weight_decay,
        mask=decay_mask,
    )
    return adamw if config.clip_norm is None else optax.chain(optax.clip_by_global_norm(config.clip_norm), adamw)


def decay_mask(params: Any) -> Any:
    """True for the parameters that decay: matrices and larger, so no gain, bias, class token or logit scale."""
    return jax.tree.map(lambda p: p.ndim >= 2, params)
