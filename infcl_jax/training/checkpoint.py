"""Checkpoints of the whole run: state and data position, written in the background, found again by themselves."""

import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import jax
import numpy as np
import orbax.checkpoint as ocp

CONFIG_FILE = "config.json"


class DataIterator(Protocol):
    """What a data iterator needs to be checkpointed: a JSON-serialisable state, the same on every process."""

    def get_state(self) -> dict[str, Any]:
        """The position after the last batch."""

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues from that position."""


class Checkpointer:
    """Saves and restores a run in `workdir/checkpoints`, with orbax.

    A checkpoint is written in the background and appears under its name only when it is complete: a run killed at any
    moment finds the one before. All processes call every method together.

    Example:
      with Checkpointer(workdir, keep=3) as checkpoints:
          state = checkpoints.restore_latest(state, data)
          checkpoints.save(step, state, data)
    """

    def __init__(self, workdir: str | os.PathLike[str], *, keep: int = 2):
        """Opens the folder.

        Args:
          workdir: the run's directory, made if it is not there.
          keep: how many of the latest checkpoints to keep.
        """
        self._manager = ocp.CheckpointManager(
            (Path(workdir) / "checkpoints").absolute(),
            options=ocp.CheckpointManagerOptions(max_to_keep=keep, create=True, enable_async_checkpointing=True),
            item_handlers={"state": ocp.StandardCheckpointHandler(), "data": ocp.JsonCheckpointHandler()},
        )

    def latest_step(self) -> int | None:
        """The step of the latest complete checkpoint, None if there is none."""
        return self._manager.latest_step()

    def save(self, step: int, state: Any, data: DataIterator) -> None:
        """Starts to save `state` and the position of `data` as step `step`; does nothing if it is there already."""
        if step == self._manager.latest_step():
            return
        args = ocp.args.Composite(state=ocp.args.StandardSave(_saved(state)), data=ocp.args.JsonSave(data.get_state()))
        self._manager.save(step, args=args)

    def restore_latest(self, state: Any, data: DataIterator | None = None) -> Any:
        """The latest checkpoint's state, placed as `state` is; `state` itself if there is no checkpoint.

        Args:
          state: a train state of the same structure, for its shapes, dtypes and shardings.
          data: iterator to be moved to the saved position; None leaves it out, for evaluation.

        Raises:
          ValueError: the checkpoint is of another model or optimizer, or of other data settings.
        """
        step = self.latest_step()
        if step is None:
            return state
        template = jax.tree.map(ocp.utils.to_shape_dtype_struct, _saved(state))
        _check_fits(step, self._manager.item_metadata(step)["state"].tree, template)
        args = {"state": ocp.args.StandardRestore(template)}
        if data is not None:
            args["data"] = ocp.args.JsonRestore()
        restored = self._manager.restore(step, args=ocp.args.Composite(**args))
        if data is not None:
            data.set_state(restored["data"])
        parts = restored["state"]
        if state.samples is not None:
            parts["samples"] = state.samples._replace(**parts["samples"])
        return state.replace(**parts)

    def wait(self) -> None:
        """Returns when everything is on disk."""
        self._manager.wait_until_finished()

    def __enter__(self) -> "Checkpointer":
        """Returns itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Waits for the last write and closes."""
        self._manager.close()


def prepare_workdir(workdir: str | os.PathLike[str]) -> Path:
    """Makes the run's directory and checks that it can be written to.

    Raises:
      ValueError: it cannot be; the message says why.
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
    """Writes the run's configuration where `experiments.evaluate` finds it, in one atomic rename."""
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    temporary = workdir / f"{CONFIG_FILE}.new"
    temporary.write_text(text)
    temporary.replace(workdir / CONFIG_FILE)


def load_config(workdir: str | os.PathLike[str]) -> dict[str, Any]:
    """The configuration that `save_config` wrote.

    Raises:
      FileNotFoundError: there is no run in `workdir`.
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


def _check_fits(step: int, saved: Any, template: Any) -> None:
    """Compares what is saved with what is asked for before orbax reads any of it; the first difference is the error."""
    there, here = _array_types(saved), _array_types(template)
    for name in sorted(there | here, key=lambda name: (not name.startswith("params/"), name)):
        if there.get(name) != here.get(name):
            raise ValueError(
                f"the checkpoint of step {step} is of another run: {name} is {there.get(name, 'absent')} "
                f"there and {here.get(name, 'absent')} here; keep the run's settings or choose another --workdir"
            )


def _array_types(tree: Any) -> dict[str, str]:
    """Types like "float32[3, 4]" by path. Orbax saves tuples with named fields as dicts, so all keys become text."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): f"{np.dtype(leaf.dtype).name}{list(leaf.shape)}"
        for path, leaf in leaves
    }


def _saved(state: Any) -> dict[str, Any]:
    """All arrays; what a state does not have is left out, so that checkpoints of simple runs stay simple."""
    parts = {name: getattr(state, name) for name in ("step", "params", "opt_state", "batch_stats", "samples")}
    samples = parts["samples"]
    parts["samples"] = None if samples is None else {k: v for k, v in samples._asdict().items() if v is not None}
    return {name: part for name, part in parts.items() if part is not None}
