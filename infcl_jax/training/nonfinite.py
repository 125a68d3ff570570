"""States and steps that are not finite: their arrays and stages, and updates that are skipped."""

import functools
import operator
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array, Bool

from infcl_jax.training.ema import updated_ema

if TYPE_CHECKING:
    from infcl_jax.losses import SampleState
    from infcl_jax.training.state import TrainState

ON_NONFINITE = ("stop", "skip")


def nonfinite_stages(metrics: Mapping[str, Any]) -> list[str]:
    """List the stages of the metrics of a step that are not finite, in order of computation."""
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


def state_stages(batch_stats: Any, rows: "SampleState | None") -> dict[str, Bool[Array, ""]]:
    """Check the new running statistics and rows of the sample state, whose logarithms can be -inf.

    A finite loss does not imply that they are finite.
    """
    stages = {}
    if batch_stats is not None:
        stages["the running statistics"] = _conjunction(
            jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(batch_stats)
        )
    if rows is not None:
        stages["the sample state"] = _conjunction((leaf < jnp.inf).all() for leaf in jax.tree.leaves(rows))
    return stages


def select_update(finite: Mapping[str, Bool[Array, ""]], updated: "TrainState", state: "TrainState") -> "TrainState":
    """Select the updated state if all stages are finite, on the device.

    Otherwise parameters, optimizer state, moving averages and running statistics keep their values. `step` and the
    step count of the learning rate schedule always advance: the next step has another batch, other dropout keys and
    the learning rate of its own number. The caller leaves out the rows of the sample state, see `written_index`.
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


def first_nonfinite_norm(tree: Any) -> str | None:
    """Return the first array whose norm is not finite, such as "params/visual/kernel"; integers are ignored.

    The fp32 norm is NaN or infinite if an entry is, or if an entry exceeds 1.8e19, whose square overflows. A model with
    such parameters has no finite loss. One compiled reduction over all arrays; all processes must call this function.
    """
    leaves = [
        (path, leaf)
        for path, leaf in jax.tree.leaves_with_path(tree)
        if jnp.issubdtype(jnp.result_type(leaf), jnp.floating)
    ]
    if not leaves:
        return None
    sharding = getattr(leaves[0][1], "sharding", None)
    # Replicated, so that every process can read the flags.
    replicated = NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else None
    finite = np.asarray(_reduction(replicated)([leaf for _, leaf in leaves]))
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
    return next((name for name, ok in zip(names, finite, strict=True) if not ok), None)


@functools.cache
def _reduction(sharding: Sharding | None) -> Callable[[list[jax.Array]], jax.Array]:
    """Compile the tests of all arrays into one program."""

    def finite_norms(arrays: list[jax.Array]) -> jax.Array:
        return jnp.stack([jnp.isfinite(jnp.square(a.astype(jnp.float32)).sum()) for a in arrays])

    return jax.jit(finite_norms, out_shardings=sharding)
