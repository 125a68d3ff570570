"""Training steps that are not finite: stop the run, or skip their updates."""

from __future__ import annotations

import functools
import json
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool

from infcl_jax.runtime.file_io import LINES_BYTES, read_regular
from infcl_jax.runtime.outputs import AppendFile, Outputs, print_line
from infcl_jax.training.ema import updated_ema

if TYPE_CHECKING:
    from infcl_jax.losses import SampleState
    from infcl_jax.training.state import TrainState

ON_NONFINITE = ("stop", "skip")
SKIPPED_FILE = "skipped_batches.jsonl"


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
        raise FloatingPointError(_message(step, bad[0], metrics))


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


class NonfiniteSteps:
    """Reaction to steps that are not finite, and their count.

    With "skip", `workdir/skipped_batches.jsonl` gets one line for each skipped step:
    `{"step": ..., "stage": ..., "loss": ..., "indices": [...]}` with the sample indices of the global batch. A resumed
    run drops the lines of later steps.

    Attributes:
      skipped: number of skipped steps of the run, on the leading process; of this process on the others.
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
        say: Callable[[str], None] = print_line,
    ) -> None:
        """Read the skipped steps of a resumed run.

        Args:
          reaction: one of `ON_NONFINITE`.
          limit: skipped steps in a row after which the run stops.
          workdir: directory of the run.
          start: number of completed steps.
          batch_indices: function from the number of a batch, from 0, to its sample indices.
          lead: whether this process writes and prints.
          outputs: handling of write errors; None: one of its own.
          say: function that prints a line.
        """
        self.skipped = 0
        self._reaction, self._limit, self._in_a_row = reaction, limit, 0
        self._batch_indices, self._say = batch_indices, say
        self._file: AppendFile | None = None
        if reaction == "skip" and lead:
            path = Path(workdir) / SKIPPED_FILE
            lines = _lines_until(path, start)
            self.skipped = len(lines)
            self._file = AppendFile(path, outputs or Outputs(), keep=sum(map(len, lines)))

    def check(self, step: int, metrics: Mapping[str, Any]) -> None:
        """React to a step.

        Args:
          step: training step of the metrics.
          metrics: metrics of a step from `make_train_step`, on the host.

        Raises:
          FloatingPointError: a stage is not finite, with "stop", or in `limit` steps in a row, with "skip". The message
            names the first such stage.
        """
        bad = nonfinite_stages(metrics)
        if not bad:
            self._in_a_row = 0
            return
        if self._reaction == "stop":
            check_finite(step, metrics)
        self.skipped += 1
        self._in_a_row += 1
        if self._file is not None:
            indices = [int(index) for index in self._batch_indices(step - 1)]
            line = {"step": step, "stage": bad[0], "loss": str(float(metrics["loss"])), "indices": indices}
            self._file.write(json.dumps(line).encode() + b"\n")
            self._say(
                f"step {step}: skipped, {bad[0]} became NaN or infinite ({self._in_a_row} in a row, at most "
                f"{self._limit}); its samples are in {SKIPPED_FILE}"
            )
        if self._in_a_row >= self._limit:
            raise FloatingPointError(f"{self._in_a_row} skipped steps in a row; {_message(step, bad[0], metrics)}")

    def metrics(self) -> dict[str, int]:
        """Return the count for the metrics; empty with "stop"."""
        return {} if self._reaction == "stop" else {"skipped_steps": self.skipped}

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def _message(step: int, stage: str, metrics: Mapping[str, Any]) -> str:
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


def _lines_until(path: Path, step: int) -> list[bytes]:
    """Read the lines of skipped steps up to a step.

    A truncated line ends them.
    """
    lines = []
    for raw in read_regular(path, LINES_BYTES).splitlines(keepends=True) if path.is_file() else ():
        try:
            if not raw.endswith(b"\n") or json.loads(raw)["step"] > step:
                break
        except (ValueError, KeyError, TypeError, RecursionError):
            break
        lines.append(raw)
    return lines
