"""Learning rate schedules."""

import jax
import jax.numpy as jnp
import optax

from infcl_jax.training.optimizer_config import OptimizerConfig


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
