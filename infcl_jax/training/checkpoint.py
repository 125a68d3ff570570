"""Asynchronous checkpoints of the train state and the data position."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import jax
import numpy as np
import orbax.checkpoint as ocp

from infcl_jax.training.ema import evaluated_variables

CONFIG_FILE = "config.json"


CHECKPOINTS = "checkpoints"  # folder in the work directory


class DataIterator(Protocol):
    """Interface of a checkpointable data iterator.

    Its state must be JSON-serializable and the same on every process.
    """

    def get_state(self) -> dict[str, Any]:
        """Return the position after the last batch."""

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from a position that `get_state` returned."""


class Checkpointer:
    """Save and restore a run in `workdir/checkpoints` with orbax.

    Checkpoints are written in the background. A checkpoint gets its name only when it is complete, so a run killed
    during a write restores the previous one. All processes must call every method together.

    Example:
      with Checkpointer(workdir, keep=3) as checkpoints:
          state = checkpoints.restore_latest(state, data)
          checkpoints.save(step, state, data)
    """

    def __init__(self, workdir: str | os.PathLike[str], *, keep: int = 2):
        """Open the checkpoint directory.

        Args:
          workdir: directory of the run, created if missing.
          keep: number of latest checkpoints to keep.
        """
        self._manager = ocp.CheckpointManager(
            (Path(workdir) / CHECKPOINTS).absolute(),
            options=ocp.CheckpointManagerOptions(max_to_keep=keep, create=True, enable_async_checkpointing=True),
            item_handlers={"state": ocp.StandardCheckpointHandler(), "data": ocp.JsonCheckpointHandler()},
        )

    def latest_step(self) -> int | None:
        """Return the step of the latest complete checkpoint, or None."""
        return self._manager.latest_step()

    def save(self, step: int, state: Any, data: DataIterator) -> None:
        """Start to save `state` and the position of `data`.

        Does nothing if the latest checkpoint already has this step.

        Args:
          step: step under which the checkpoint is saved.
          state: train state.
          data: data iterator.
        """
        if step == self._manager.latest_step():
            return
        items = {"state": ocp.args.StandardSave(_array_fields(state)), "data": ocp.args.JsonSave(data.get_state())}
        self._manager.save(step, args=ocp.args.Composite(**items))

    def restore_latest(self, state: Any, data: DataIterator | None = None) -> Any:
        """Restore the latest checkpoint, or return `state` if there is none.

        Args:
          state: train state with the structure, shapes, dtypes and shardings to restore.
          data: iterator to move to the saved position; None restores the state alone, for evaluation.

        Returns:
          The saved state with the shardings of `state`.

        Raises:
          ValueError: an array of the checkpoint differs from `state` in shape or dtype, or `data` rejects the position.
        """
        step = self.latest_step()
        if step is None:
            return state
        template = jax.tree.map(ocp.utils.to_shape_dtype_struct, _array_fields(state))
        # Checked before the restore, so that orbax reads no array of another run.
        _check_array_types(step, self._manager.item_metadata(step)["state"].tree, template)
        fields = self._manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(template)))["state"]
        if data is not None:
            self.restore_position(data)
        if state.samples is not None:
            fields["samples"] = state.samples._replace(**fields["samples"])
        return state.replace(**fields)

    def restore_position(self, data: DataIterator) -> None:
        """Move `data` to the position of the latest checkpoint, if there is one.

        Raises:
          ValueError: `data` rejects the position.
        """
        step = self.latest_step()
        if step is not None:
            restored = self._manager.restore(step, args=ocp.args.Composite(data=ocp.args.JsonRestore()))
            data.set_state(restored["data"])

    def wait(self) -> None:
        """Wait until all checkpoints are on disk."""
        self._manager.wait_until_finished()

    def __enter__(self) -> "Checkpointer":
        """Return the checkpointer."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Wait for the last write and close."""
        self._manager.close()


def restore_variables(workdir: str | os.PathLike[str], template: Any, step: int | None = None) -> tuple[int, Any]:
    """Restore the variables of a checkpoint to evaluate: its moving averages if it has them.

    Args:
      workdir: directory of the run.
      template: variables with the structure, shapes, dtypes and shardings to restore, as `jax.ShapeDtypeStruct`.
      step: step of the checkpoint; None: the latest.

    Returns:
      (step of the checkpoint, variables).

    Raises:
      FileNotFoundError: the run has no such checkpoint.
      ValueError: an array of the checkpoint differs from `template` in shape or dtype.
    """
    folder = (Path(workdir) / CHECKPOINTS).absolute()
    options = ocp.CheckpointManagerOptions(create=False)
    handlers = {"state": ocp.PyTreeCheckpointHandler(), "data": ocp.JsonCheckpointHandler()}
    with ocp.CheckpointManager(folder, options=options, item_handlers=handlers) as manager:
        steps = sorted(manager.all_steps())
        if not steps or step not in (None, *steps):
            wanted = "no checkpoint" if step is None else f"no checkpoint of step {step}"
            raise FileNotFoundError(f"{wanted} in {workdir}; its steps are {', '.join(map(str, steps)) or 'none yet'}")
        step = steps[-1] if step is None else step
        saved = manager.item_metadata(step)["state"].tree
        _check_array_types(step, {name: saved[name] for name in template if name in saved}, template)
        items = template | ({"ema": _ema_template(template, saved["ema"])} if "ema" in saved else {})
        args = ocp.checkpoint_utils.construct_restore_args(items)
        restore = ocp.args.PyTreeRestore(items, restore_args=args, partial_restore=True)
        restored = manager.restore(step, args=ocp.args.Composite(state=restore))["state"]
        return step, evaluated_variables({name: restored[name] for name in template}, restored.get("ema"))


def _ema_template(template: Any, saved: Any) -> Any:
    """Select the variables that have moving averages, in fp32."""
    if isinstance(template, Mapping):
        return {name: _ema_template(template[name], saved[name]) for name in saved}
    return jax.ShapeDtypeStruct(template.shape, np.float32, sharding=template.sharding)


def prepare_workdir(workdir: str | os.PathLike[str]) -> Path:
    """Create the directory of the run and check that it is writable.

    Raises:
      ValueError: the directory is not writable; the message gives the reason.
    """
    workdir = Path(workdir)
    probe = workdir / f".writable-{jax.process_index()}"
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ValueError(f"cannot write to workdir {workdir} ({reason}); choose another --workdir") from error
    return workdir


def save_config(workdir: Path, config: dict[str, Any]) -> None:
    """Write the configuration of a run to `workdir/config.json`.

    An atomic rename replaces an earlier file. `experiments.evaluate` reads the configuration from there.
    """
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    temporary = workdir / f"{CONFIG_FILE}.new"
    temporary.write_text(text)
    temporary.replace(workdir / CONFIG_FILE)


def load_config(workdir: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the configuration that `save_config` wrote.

    Raises:
      FileNotFoundError: `workdir` contains no run.
      ValueError: the file is not JSON.
    """
    path = Path(workdir) / CONFIG_FILE
    if not path.is_file():
        raise FileNotFoundError(f"no run in {workdir} ({CONFIG_FILE} is missing); train one with this --workdir first")
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(
            f"expected the configuration of a run in {path}, got no JSON ({error}); train again"
        ) from error


def _check_array_types(step: int, saved: Any, template: Any) -> None:
    """Raise `ValueError` at the first shape or dtype mismatch."""
    saved_types, expected_types = _array_types(saved), _array_types(template)
    # Parameters first: a mismatch of the model also changes the optimizer state, whose array names say less.
    for name in sorted(saved_types | expected_types, key=lambda name: (not name.startswith("params/"), name)):
        if saved_types.get(name) != expected_types.get(name):
            raise ValueError(
                f"the checkpoint of step {step} is of another run: {name} is "
                f"{saved_types.get(name, 'absent')} there and {expected_types.get(name, 'absent')} here; keep the "
                "run's settings or choose another --workdir"
            )


def _array_types(tree: Any) -> dict[str, str]:
    """Map array paths to types such as "float32[3, 4]"."""
    # Simple key strings, because orbax saves named tuples as dicts, whose keys `keystr` would quote.
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): f"{np.dtype(leaf.dtype).name}{list(leaf.shape)}"
        for path, leaf in leaves
    }


def _array_fields(state: Any) -> dict[str, Any]:
    """Collect the fields of a train state to save: those with arrays, without None."""
    fields = {name: getattr(state, name) for name in ("step", "params", "opt_state", "batch_stats", "samples", "ema")}
    samples = fields["samples"]
    fields["samples"] = None if samples is None else {k: v for k, v in samples._asdict().items() if v is not None}
    return {name: value for name, value in fields.items() if value is not None}
