"""Asynchronous checkpoints of the train state and the data position."""

import contextlib
import dataclasses
import os
import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Protocol

import jax
import orbax.checkpoint as ocp
from etils import epath

from infcl_jax.runtime.console import process_prefix, say
from infcl_jax.runtime.outputs import print_line
from infcl_jax.runtime.processes import is_lead, union
from infcl_jax.training.checkpoint_folder import (
    ANNOUNCEMENT,
    CHECKPOINTS,
    LATEST,
    CheckpointFolder,
    Retention,
    add_results,
    split_checkpoint,
    write_manifest,
)
from infcl_jax.training.nonfinite import first_nonfinite_norm
from infcl_jax.training.restore import array_fields, check_array_types, failure_reason, orbax_fixes, readable

# Seconds until processes give up waiting for the write of another one, such as one whose disk is full.
_SAVE_SECONDS = 600


class DataIterator(Protocol):
    """Checkpointable data iterator, whose state is JSON-serializable and the same on every process."""

    def get_state(self) -> dict[str, Any]:
        """Return the position after the last batch."""

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from a position that `get_state` returned."""


@dataclasses.dataclass
class _Save:
    """Save in progress, or its failure on this process."""

    step: int
    thread: threading.Thread | None = None  # waits for the write
    error: str | None = None
    fixes: contextlib.ExitStack = dataclasses.field(default_factory=contextlib.ExitStack)  # left at the end of the save

    def join(self) -> None:
        """Wait for the end of the save."""
        if self.thread is not None:
            self.thread.join()
        self.fixes.close()


class Checkpointer:
    """Save and restore a run in `workdir/checkpoints` with orbax.

    Checkpoints are written in the background. The manifest of a checkpoint, with the checksums of its files, is written
    last. A run killed during a write restores the previous checkpoint, as does a run whose latest one is damaged. A
    failed save is reported, and the next one tries again. All processes must call every method together.

    Examples:
      >>> with Checkpointer("runs/digits") as checkpoints:
      ...     print(checkpoints.latest_step())
      1
    """

    def __init__(
        self,
        workdir: str | os.PathLike[str],
        *,
        keep: int = 2,
        keep_every: int = 0,
        keep_best: str | None = None,
        resume: str = LATEST,
        max_failed_saves: int = 3,
        say: Callable[[str], None] = say,
    ):
        """Open the checkpoint directory, which the first save creates.

        Args:
          workdir: directory of the run, as a local path or an address of `etils.epath`, such as `gs://bucket/run`.
          keep: number of latest checkpoints to keep.
          keep_every: also keep checkpoints whose step is a multiple of this number; 0: none.
          keep_best: metric whose best checkpoint to keep too, such as "zero_shot/top1"; None: none.
          resume: checkpoint to restore. "latest": the newest intact one. A step: that one; the first save sets newer
            ones aside. A path: that run or checkpoint, until this run has a checkpoint of its own.
          max_failed_saves: number of failed saves in a row that stops the run.
          say: printer of one line about a checkpoint.
        """
        self._say = say
        self._own = CheckpointFolder(epath.Path(workdir) / CHECKPOINTS, self._say)
        self._retention = Retention(keep, keep_every, keep_best)
        self._resume, self._max_failed_saves = resume, max_failed_saves
        self._source: tuple[CheckpointFolder, int] | None = None  # checkpoint to restore
        self._chosen = self._prepared = False
        self._saving: _Save | None = None
        self._complete: tuple[int, epath.Path] | None = None  # see `take_complete`
        self._failures = 0  # in a row
        self.failed_saves = 0
        self._checkpointer = self._make_checkpointer()

    def latest_step(self) -> int | None:
        """Return the step of the checkpoint to restore, or None.

        The first call verifies the files. Prints a line for each damaged checkpoint.

        Raises:
          ValueError: all checkpoints are damaged, or `resume` names none.
        """
        source = self._find_source()
        return None if source is None else source[1]

    def origin(self) -> epath.Path | None:
        """Return the work directory of the checkpoint to restore, or None."""
        source = self._find_source()
        return None if source is None else source[0].path.parent

    def check_finite(self, step: int, state: Any) -> None:
        """Check that the norms of the parameters, running statistics and moving averages are finite.

        Args:
          step: step of the state, for the error message.
          state: train state.

        Raises:
          FloatingPointError: a norm is not finite; the message names the array and the newest good checkpoint.
        """
        array = first_nonfinite_norm({name: getattr(state, name) for name in ("params", "batch_stats", "ema")})
        if array is not None:
            self._settle()  # the newest good checkpoint may still be in progress
            good = self.latest_step()
            newest = "there is no good checkpoint" if good is None else f"the newest good checkpoint is step {good}"
            raise FloatingPointError(
                f"step {step}: the norm of {array} is NaN or infinite, so the state was not saved; {newest}; resume "
                "with a lower learning rate, a longer warm-up or a smaller clip_norm"
            )

    def save(self, step: int, state: Any, data: DataIterator) -> None:
        """Start to save `state` and the position of `data`.

        Does nothing if the latest checkpoint already has this step.

        Args:
          step: step under which the checkpoint is saved.
          state: train state.
          data: data iterator.

        Raises:
          FloatingPointError: the norm of an array of the state is not finite.
          OSError: `max_failed_saves` saves in a row failed.
        """
        self._settle()
        if step == self.latest_step():
            return
        self.check_finite(step, state)
        save = self._saving = _Save(step)
        if is_lead():
            self._prepare(save)
        if union([] if save.error is None else [0]):
            self._settle()
            return
        items = {"state": ocp.args.StandardSave(array_fields(state)), "data": ocp.args.JsonSave(data.get_state())}
        folder = self._own.path / str(step)
        save.fixes.enter_context(orbax_fixes())
        try:
            # Overwrites what another failed save of this step left.
            self._checkpointer.save(folder, ocp.args.Composite(**items), force=True, custom_metadata=ANNOUNCEMENT)
        except Exception as error:  # orbax and TensorStore raise any exception
            if jax.process_count() > 1:
                raise  # other processes wait in a collective of orbax
            self._fail(save, error)
            return
        save.thread = threading.Thread(target=self._finish, args=(save, folder))
        save.thread.start()

    def record(self, step: int, results: Mapping[str, float]) -> None:
        """Add results to the checkpoint of their step, for `keep_best`.

        Waits until the checkpoint is on disk. Without a checkpoint of the step in this work directory it does nothing.

        Args:
          step: step of the evaluated state.
          results: results by name.

        Raises:
          OSError: `max_failed_saves` saves in a row failed.
          ValueError: `results` lacks the metric of `keep_best`.
        """
        best = self._retention.best
        if best is not None and best not in results:
            raise ValueError(f"expected keep_best to be one of {', '.join(sorted(results))}, got {best!r}")
        if self._find_source() != (self._own, step):
            return
        newest = self._own.steps()[-1] == step  # others are an abandoned future until the first save
        if is_lead():
            try:
                add_results(self._own.path / str(step), results)
                if newest:
                    self._own.delete_old(self._retention)
            except (OSError, ValueError) as error:
                self._say(f"cannot record the results of checkpoint {step}: {failure_reason(error)}")

    def restore_latest(self, state: Any, data: DataIterator | None = None) -> Any:
        """Restore the checkpoint that `resume` names, or return `state` if there is none.

        Args:
          state: train state with the structure, shapes, dtypes and shardings to restore.
          data: iterator to move to the saved position; None restores the state alone, for evaluation.

        Returns:
          The saved state with the shardings of `state`.

        Raises:
          ValueError: an array of the checkpoint differs from `state` in shape or dtype, or `data` rejects the position.
            Also if orbax cannot read the checkpoint, or all checkpoints are damaged.
        """
        source = self._find_source()
        if source is None:
            return state
        path = source[0].path / str(source[1])
        template = jax.tree.map(ocp.utils.to_shape_dtype_struct, array_fields(state))
        # Checked before the restore, so that orbax reads no array of another run.
        with readable(path):
            saved = self._checkpointer.metadata(path).item_metadata["state"].tree
        check_array_types(source[1], saved, template)
        args = ocp.args.Composite(state=ocp.args.StandardRestore(template))
        with readable(path):
            fields = self._checkpointer.restore(path, args)["state"]
        if data is not None and (position := self.position()) is not None:
            data.set_state(position)
        if state.samples is not None:
            fields["samples"] = state.samples._replace(**fields["samples"])
        return state.replace(**fields)

    def position(self) -> dict[str, Any] | None:
        """Return the position in the data that the checkpoint to restore has, or None without a checkpoint.

        Raises:
          ValueError: orbax cannot read the checkpoint.
        """
        if (source := self._find_source()) is None:
            return None
        args, path = ocp.args.Composite(data=ocp.args.JsonRestore()), source[0].path / str(source[1])
        with readable(path):
            return self._checkpointer.restore(path, args)["data"]

    def wait(self) -> None:
        """Wait until all checkpoints are on disk.

        Raises:
          OSError: the last save failed.
        """
        self._settle()
        if self._failures:
            raise OSError(f"the last checkpoint was not saved; {self._advice()}")

    def take_complete(self) -> tuple[int, epath.Path] | None:
        """Return step and folder of the latest save, once it is on disk.

        Waits for the save in progress. None if it failed, or if an earlier call returned it.

        Raises:
          OSError: `max_failed_saves` saves in a row failed.
        """
        self._settle()
        complete, self._complete = self._complete, None
        return complete

    def __enter__(self) -> "Checkpointer":
        """Return the checkpointer."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Wait for the last write and close.

        Raises:
          OSError: the body raised nothing, and the last save failed.
        """
        try:
            if error is None:
                self.wait()
            elif self._saving is not None:
                self._saving.join()  # without other processes, which may have raised nothing
        finally:
            self._checkpointer.close()

    def _find_source(self) -> tuple[CheckpointFolder, int] | None:
        """Choose the checkpoint to restore, on the first call."""
        self._settle()
        if not self._chosen:
            self._source, self._chosen = self._choose(), True
        return self._source

    def _choose(self) -> tuple[CheckpointFolder, int] | None:
        """Choose the checkpoint that `resume` names."""
        folder, step = self._own, None
        if self._resume.isdecimal():
            step = int(self._resume)
        elif self._resume != LATEST and not self._own.steps():
            path, step = split_checkpoint(self._resume)
            folder = CheckpointFolder(path, self._say)
        steps = folder.steps()
        if (folder is not self._own and not steps) or (step is not None and step not in steps):
            raise ValueError(
                f"expected resume to be {LATEST!r}, a step ({', '.join(map(str, steps)) or 'none yet'}) or the path of "
                f"another run, got {self._resume!r}"
            )
        chosen = folder.intact_step(step)
        return None if chosen is None else (folder, chosen)

    def _prepare(self, save: _Save) -> None:
        """Check that the folder is writable, and set aside what the first save replaces."""
        probe = self._own.path / ".writable"
        try:
            self._own.path.mkdir(parents=True, exist_ok=True)
            if not self._prepared:
                self._own.prepare(self._source[1] if self._source and self._source[0] is self._own else None)
                self._prepared = True
            probe.unlink(missing_ok=True)  # a link would be followed
            probe.write_text("x" * 4096)
            probe.unlink()
        except OSError as error:
            self._fail(save, error)

    def _finish(self, save: _Save, folder: epath.Path) -> None:
        """Wait for the write, add the manifest and delete old checkpoints, in a thread."""
        try:
            self._checkpointer.wait_until_finished()
            if is_lead():
                write_manifest(folder, {})
        except Exception as error:  # orbax and TensorStore raise any exception
            self._fail(save, error)
            return
        if is_lead():
            try:
                self._own.delete_old(self._retention)
            except OSError as error:
                self._say(f"cannot delete old checkpoints: {failure_reason(error)}")

    def _fail(self, save: _Save, error: Exception) -> None:
        """Record a failure of this process and report it at once."""
        save.error = failure_reason(error)
        print_line(f"{process_prefix()}checkpoint of step {save.step} was NOT saved: {save.error}")

    def _settle(self) -> None:
        """Wait for the save in progress, so that all processes agree on its success."""
        save, self._saving = self._saving, None
        if save is None:
            return
        save.join()
        failed = union([] if save.error is None else [jax.process_index()])
        if not failed:
            self._own.trust(save.step)
            self._source, self._chosen, self._failures = (self._own, save.step), True, 0
            self._complete = save.step, self._own.path / str(save.step)
            return
        self._failures += 1
        self.failed_saves += 1
        # A new object, since barriers of the old one may still have waiting processes.
        with contextlib.suppress(Exception):
            self._checkpointer.close()
        self._checkpointer = self._make_checkpointer()
        if is_lead():
            with contextlib.suppress(OSError):  # the cause of the failure
                self._own.delete_failed(save.step)
        if self._failures >= self._max_failed_saves:
            raise OSError(f"{self._failures} checkpoint(s) in a row were not saved; {self._advice()}")

    def _advice(self) -> str:
        """Say what to do after failed saves."""
        step = "the start" if self._source is None else f"step {self._source[1]}"
        return f"make {self._own.path} writable, then the same command continues from {step}"

    def _make_checkpointer(self) -> ocp.AsyncCheckpointer:
        """Create the writer of orbax, with barriers of its own."""
        return ocp.AsyncCheckpointer(
            ocp.CompositeCheckpointHandler(state=ocp.StandardCheckpointHandler(), data=ocp.JsonCheckpointHandler()),
            async_options=ocp.AsyncOptions(timeout_secs=_SAVE_SECONDS),
            multiprocessing_options=ocp.options.MultiprocessingOptions(
                barrier_sync_key_prefix=f"saves{self.failed_saves}"
            ),
        )
