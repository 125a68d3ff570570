"""Run a command that notes its phase in `FOLDER/phase-RANK`, which outlives SIGKILL.

python -m tests.faults.phases FOLDER MODULE [FLAG ...]
"""

import functools
import os
import runpy
import sys
from pathlib import Path

START_UP, INDEXING, RESTORE, COMPILATION, STEPS, CHECKPOINT, EVALUATION, END = PHASES = (
    "start-up",
    "data indexing",
    "restore",
    "first step",
    "steps",
    "checkpoint",
    "evaluation",
    "end",
)
_LONGEST = max(map(len, PHASES))


def phase_file(folder: str | Path, rank: int) -> Path:
    return Path(folder) / f"phase-{rank}"


def read_phase(folder: str | Path, rank: int) -> str:
    """Read the last noted phase of a process; start-up before the first."""
    path = phase_file(folder, rank)
    return (path.read_text().strip() if path.exists() else "") or START_UP


class Notes:
    """Notes of the current phase in one file, and hooks that change it."""

    def __init__(self, path: Path):
        self._file, self._phase = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), START_UP

    def write(self, phase: str) -> str:
        """Note a phase; return the previous one."""
        previous, self._phase = self._phase, phase
        os.pwrite(self._file, phase.ljust(_LONGEST).encode(), 0)
        return previous

    def during(self, owner, name: str, phase: str) -> None:
        """Note a phase while a function runs."""
        function = getattr(owner, name)

        @functools.wraps(function)
        def noted(*args, **kwargs):
            previous = self.write(phase)
            try:
                return function(*args, **kwargs)
            finally:
                self.write(previous)

        setattr(owner, name, noted)

    def after(self, owner, name: str, phase: str) -> None:
        """Note a phase from the end of a function on."""
        function = getattr(owner, name)

        @functools.wraps(function)
        def noted(*args, **kwargs):
            result = function(*args, **kwargs)
            self.write(phase)
            return result

        setattr(owner, name, noted)


def main(folder: str, module: str, *arguments: str) -> None:
    from infcl_jax import evaluation, training
    from infcl_jax.data.sources import tar_index

    notes = Notes(phase_file(folder, int(os.environ.get("PROCESS_ID", "0"))))
    notes.during(tar_index, "_build", INDEXING)
    notes.during(training.Checkpointer, "restore_latest", RESTORE)
    notes.during(training.Checkpointer, "position", RESTORE)
    notes.during(training.Checkpointer, "save", CHECKPOINT)
    notes.during(evaluation.Suite, "__call__", EVALUATION)
    notes.after(training.DataWait, "__enter__", COMPILATION)
    notes.after(training.DataWait, "step", STEPS)
    notes.after(training.MetricWriter, "close", END)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
