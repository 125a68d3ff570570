"""States and steps that are not finite: their arrays and stages, skipped updates; and loss spikes."""

import collections
import functools
import json
import math
import operator
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array, Bool

from infcl_jax.losses import SampleState
from infcl_jax.runtime.outputs import AppendFile, Outputs, lines_until, print_line
from infcl_jax.training.state import TrainState, updated_ema

ON_NONFINITE = ("stop", "skip")
SKIPPED_FILE = "skipped_batches.jsonl"

_WINDOW = 100  # steps whose median is the recent level of the loss
_MIN_STEPS = 20  # steps before the first warning; the median of fewer is noise
_QUIET_STEPS = 100  # least distance of two warnings
# A normal distribution has a standard deviation of 1.48 median absolute deviations. Wortsman et al. 2023 (Stable and
# low-precision training for large-scale vision-language models) call 3.2 standard deviations of the loss a spike.
_SPIKE_DEVIATIONS = 8.0
_SPIKE_NATS = 0.2  # least rise: late in training the deviations are tiny


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


def state_stages(batch_stats: Any, rows: SampleState | None) -> dict[str, Bool[Array, ""]]:
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


def select_update(finite: Mapping[str, Bool[Array, ""]], updated: TrainState, state: TrainState) -> TrainState:
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


class Safeguards:
    """Reactions to steps that are not finite and to loss spikes, and their counts.

    With "skip", `workdir/skipped_batches.jsonl` gets one line for each skipped step:
    `{"step": ..., "stage": ..., "loss": ..., "indices": [...]}` with the sample indices of the global batch. A resumed
    run drops the lines of later steps.

    A loss is a spike if it is above the median of the last 100 steps by more than 8 times their median absolute
    deviation, and by more than 0.2. A line names at most one spike in 100 steps.

    Examples:
      >>> safeguards = Safeguards()
      >>> safeguards.check(1, {"loss": 4.1, "finite": {"image features": True, "loss": True}})
      >>> safeguards.metrics()
      {}
    """

    def __init__(
        self,
        reaction: str = "stop",
        *,
        limit: int = 1,
        workdir: str | os.PathLike[str] = ".",
        start: int = 0,
        batch_indices: Callable[[int], Sequence[int]] = lambda number: (),
        lead: bool = True,
        outputs: Outputs | None = None,
    ) -> None:
        """Read the skipped steps of a resumed run.

        Args:
          reaction: reaction to a step that is not finite, "stop" or "skip", as in `make_train_step`.
          limit: skipped steps in a row after which the run stops.
          workdir: directory of the run.
          start: number of completed steps.
          batch_indices: function from the number of a batch, from 0, to its sample indices.
          lead: whether this process writes and prints.
          outputs: handling of write errors; None: one of its own.
        """
        self._reaction, self._limit, self._batch_indices, self._lead = reaction, limit, batch_indices, lead
        self._skipped = self._in_a_row = 0
        self._file: AppendFile | None = None
        if reaction == "skip" and lead:
            path = Path(workdir) / SKIPPED_FILE
            lines = lines_until(path, start, lambda line: int(json.loads(line)["step"]))
            self._skipped = len(lines)
            self._file = AppendFile(path, outputs or Outputs(), keep=sum(map(len, lines)))
        self._losses: collections.deque[float] = collections.deque(maxlen=_WINDOW)
        self._spikes = self._quiet_until = 0

    def check(self, step: int, metrics: Mapping[str, Any]) -> None:
        """React to a step.

        Args:
          step: training step of the metrics.
          metrics: metrics of a step from `make_train_step`, on the host.

        Raises:
          FloatingPointError: a stage is not finite, with "stop", or in `limit` steps in a row, with "skip". The message
            names the first such stage.
        """
        if bad := nonfinite_stages(metrics):
            self._react(step, bad[0], metrics)
        else:
            self._in_a_row = 0
        self._compare(step, float(metrics["loss"]))

    def metrics(self) -> dict[str, int]:
        """Return the skipped steps, with "skip", and the spikes since the last call, if there are any."""
        counts = {} if self._reaction == "stop" else {"skipped_steps": self._skipped}
        if self._spikes:
            counts["loss_spikes"], self._spikes = self._spikes, 0
        return counts

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _react(self, step: int, stage: str, metrics: Mapping[str, Any]) -> None:
        """Stop the run, or record the step as skipped."""
        if self._reaction == "stop":
            check_finite(step, metrics)
        self._skipped += 1
        self._in_a_row += 1
        if self._file is not None:
            indices = [int(index) for index in self._batch_indices(step - 1)]
            line = {"step": step, "stage": stage, "loss": str(float(metrics["loss"])), "indices": indices}
            self._file.write(json.dumps(line).encode() + b"\n")
            print_line(
                f"step {step}: skipped, {stage} became NaN or infinite ({self._in_a_row} in a row, at most "
                f"{self._limit}); its samples are in {SKIPPED_FILE}"
            )
        if self._in_a_row >= self._limit:
            message = nonfinite_message(step, stage, metrics)
            raise FloatingPointError(f"{self._in_a_row} skipped steps in a row; {message}")

    def _compare(self, step: int, loss: float) -> None:
        """Count a loss spike, and print a line unless there was one lately."""
        if not math.isfinite(loss):
            return
        if len(self._losses) >= _MIN_STEPS:
            median = statistics.median(self._losses)
            deviation = statistics.median(abs(value - median) for value in self._losses)
            if loss - median > max(_SPIKE_DEVIATIONS * deviation, _SPIKE_NATS):
                self._spikes += 1
                if step >= self._quiet_until and self._lead:
                    self._quiet_until = step + _QUIET_STEPS
                    print_line(
                        f"warning: step {step}: loss {loss:.4f} is far above {median:.4f}, the median of the last "
                        f"{len(self._losses)} steps"
                    )
        self._losses.append(loss)
