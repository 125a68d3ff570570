"""Training steps that are not finite: their stages, and updates that are skipped."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool

from infcl_jax.training.ema import updated_ema

if TYPE_CHECKING:
    from infcl_jax.losses import SampleState
    from infcl_jax.training.state import TrainState

ON_NONFINITE = ("stop", "skip")


def nonfinite_stages(metrics: Mapping[str, Any]) -> list[str]:
    """List the stages of a step that are not finite, in order of computation.

    Args:
      metrics: metrics of a step from `make_train_step`, on the host.
    """
    return [stage for stage, finite in metrics["finite"].items() if not finite]


def check_finite(step: int, metrics: Mapping[str, Any]) -> None:
    """Raise an error if the training step is not finite.

    Examples:
      >>> check_finite(1, {"loss": 4.1, "finite": {"image features": True, "loss": True}})

    Args:
      step: training step of the metrics.
      metrics: metrics of a step from `make_train_step`, on the host.

    Raises:
      FloatingPointError: a stage is not finite; the message names the first such stage.
    """
    if bad := nonfinite_stages(metrics):
        raise FloatingPointError(nonfinite_message(step, bad[0], metrics))


def state_stages(batch_stats: Any, rows: SampleState | None) -> dict[str, Bool[Array, ""]]:
    """Check the new running statistics and sample state.

    A finite loss does not imply that they are finite.

    Args:
      batch_stats: new running statistics of batch normalization; None if they do not change.
      rows: new rows of the sample state; None without one. Their logarithms can be -inf.

    Returns:
      Scalar by stage.
    """
    stages = {}
    if batch_stats is not None:
        stages["the running statistics"] = _conjunction(
            jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(batch_stats)
        )
    if rows is not None:
        stages["the sample state"] = _conjunction((leaf < jnp.inf).all() for leaf in jax.tree.leaves(rows))
    return stages


def select_update(finite: Mapping[str, Bool[Array, ""]], updated: TrainState, state: TrainState) -> TrainState:
    """Select the updated state if all stages are finite, on the device.

    Otherwise parameters, optimizer state, moving averages and running statistics keep their values. `step` and the
    step count of the learning rate schedule always advance: the next step has another batch, other dropout keys and
    the learning rate of its own number. The caller leaves out the rows of the sample state, see `written_index`.

    Args:
      finite: scalar by stage.
      updated: state after the update.
      state: state before the update.
    """
    all_finite = _conjunction(finite.values())
    keep = functools.partial(jax.tree.map, functools.partial(_select, all_finite), is_leaf=_is_schedule)
    names = ("params", "opt_state", "batch_stats")
    selected = updated.replace(**{name: keep(getattr(updated, name), getattr(state, name)) for name in names})
    if state.ema_config is None:
        return selected
    # From the selected parameters: those before the select would need memory of their own.
    ema = updated_ema(state.ema_config, state.ema, selected.averaged, selected.step)
    return selected.replace(ema=keep(ema, state.ema))


def written_index(finite: Mapping[str, Bool[Array, ""]], index: Array) -> Array:
    """Replace the sample indices of a step that is not finite by -1.

    The sample state drops rows with index -1. A select over the whole state would copy it.

    Args:
      finite: scalar by stage.
      index: int `[b]`.
    """
    return jnp.where(_conjunction(finite.values()), index, jnp.full_like(index, -1))


def nonfinite_message(step: int, stage: str, metrics: Mapping[str, Any]) -> str:
    """Describe a step whose first stage that is not finite is `stage`."""
    return (
        f"step {step}: {stage} became NaN or infinite (loss {float(metrics['loss']):.4g}, logit scale "
        f"{float(metrics['logit_scale']):.4g}, gradient norm {float(metrics['grad_norm']):.4g}); resume from an "
        "earlier checkpoint with a lower learning rate, a longer warm-up or a smaller clip_norm"
    )


def _conjunction(flags: Any) -> Bool[Array, ""]:
    return functools.reduce(operator.and_, flags)


def _is_schedule(node: Any) -> bool:
    return isinstance(node, optax.ScaleByScheduleState)


def _select(finite: Bool[Array, ""], new: Any, old: Any) -> Any:
    return new if _is_schedule(new) else jnp.where(finite, new, old)
