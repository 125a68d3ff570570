"""Steps at which data workers were killed, kept over restarts."""

from __future__ import annotations

import contextlib
import functools
import json
import os
from pathlib import Path

from infcl_jax.data.workers import WorkerLost
from infcl_jax.runtime.exit_codes import Interrupted
from infcl_jax.runtime.file_io import read_json, replacing
from infcl_jax.runtime.outputs import Outputs

LOST_WORKERS_FILE = "lost_workers.json"


class LostWorkers:
    """Steps that lost a data worker, in a file of the work directory.

    A loss has a range of steps, because a worker reads ahead: its first step waits for data in vain, and its last one
    is the latest whose data the worker may have read. Two losses with a common step are the same fault. The ranges of
    all processes are in one file, since a step needs the same data on every number of processes.

    Examples:
      >>> lost = LostWorkers()  # without a file
      >>> print(lost.end(WorkerLost("data worker 1 of 2 was killed", killed=True), 3, 5))
      data worker 1 of 2 was killed; lost at step 3, the same command resumes the run
    """

    def __init__(self, workdir: str | os.PathLike[str] | None = None, outputs: Outputs | None = None) -> None:
        """Read the file.

        Args:
          workdir: directory of the run; None: without a file.
          outputs: handling of a file that cannot be written.
        """
        self._path = None if workdir is None else Path(workdir, LOST_WORKERS_FILE)
        self._outputs = outputs or Outputs()
        self._ranges: list[tuple[int, int]] = []
        if self._path is not None:
            with contextlib.suppress(OSError, ValueError, TypeError):  # absent or damaged
                self._ranges = [(int(first), int(last)) for first, last in read_json(self._path, list)]

    def passed(self, step: int) -> None:
        """Forget the losses up to a step that has finished."""
        if any(last <= step for _, last in self._ranges):
            self._ranges = [(first, last) for first, last in self._ranges if last > step]
            self._write()

    def end(self, error: WorkerLost, first: int, last: int) -> WorkerLost | Interrupted:
        """Record a lost worker, and return the exception that ends the run.

        Args:
          error: loss of a worker.
          first: step that waits for its data.
          last: latest step whose data the workers may have read.

        Returns:
          `Interrupted`; an error if another start would meet it again.
        """
        if not error.killed:
            return error
        if any(first <= other_last and other_first <= last for other_first, other_last in self._ranges):
            again = f"{error}; lost at step {first} again, so another start would lose it too"
            return type(error)(again, killed=False)
        self._ranges.append((first, last))
        self._write()
        return Interrupted(f"{error}; lost at step {first}, the same command resumes the run")

    def _write(self) -> None:
        if self._path is not None:
            self._outputs.attempt(self._path, functools.partial(_write, self._path, self._ranges))


def _write(path: Path, ranges: list[tuple[int, int]]) -> None:
    """Write the ranges; without any, remove the file."""
    if ranges:
        with replacing(path) as temporary:
            temporary.write_text(json.dumps(ranges), encoding="utf-8")
    else:
        path.unlink(missing_ok=True)
