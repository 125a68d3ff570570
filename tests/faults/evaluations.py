"""Evaluations and callbacks that fail: no step is trained twice, and the end is that of an undisturbed run.

python -m tests.faults.evaluations

Each run trains eight steps on the digits, evaluates after steps 4 and 8 on photos of two classes, and saves steps 3, 6
and 8, with `keep_best` each evaluated step too. The first start fails, the second one ends. Prints a table.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax
from etils import epath

import infcl_jax
from infcl_jax.evaluation import Suite
from infcl_jax.run.batches import Batches
from infcl_jax.training import Checkpointer, MetricWriter
from infcl_jax.training.checkpoint_folder import read_results
from tests import captioned, runs

STEPS, EVAL_EVERY, CHECKPOINT_EVERY = 8, 4, 3
WAIT = 60  # seconds until a checkpoint is complete
METRIC = "photos/top1"


class Run:
    """Settings of a run and its evaluation data in a folder."""

    def __init__(self, folder: Path, keep_best: bool):
        self.folder, self.workdir = folder, folder / "run"
        self.photos, self.task = folder / "photos", folder / "photos.py"
        names = [f"kind {'ab'[i % 2]}/{i}" for i in range(8)]
        captioned.write_folder(self.photos, [(name, {"jpg": captioned.jpeg(i)}) for i, name in enumerate(names)])
        self.task.write_text(self.code())
        self.settings = runs.SMALL | {
            "total_steps": STEPS,
            "log_every": 1,
            "eval_every": EVAL_EVERY,
            "checkpoint_every": CHECKPOINT_EVERY,
            "keep_checkpoints": 1,
            "keep_best": METRIC if keep_best else None,
            "max_bad_records": 0,
            "evaluation.batch_size": 8,
            "evaluations": (str(self.task),),
        }

    def code(self, fields: str = "") -> str:
        """Return a Python file with the evaluation."""
        task = f"Task(name='photos', dataset={str(self.photos)!r}, split='train', {fields})"
        return f"from infcl_jax.evaluation import Task\n\n\ndef get_task():\n    return {task}\n"

    def train(self, callback: infcl_jax.Callback) -> None:
        infcl_jax.train(self.settings, self.workdir, [callback])

    def outcome(self) -> tuple:
        """Return metrics, checkpoints and their results."""
        folders = sorted((self.workdir / "checkpoints").iterdir())
        return runs.history(self.workdir), {path.name: read_results(epath.Path(path)) for path in folders}


class Hook(infcl_jax.Callback):
    """Callback that calls a function at a step, and notes where the run started."""

    def __init__(self, event: str = "", step: int = 0, function: Callable[[], object] = lambda: None):
        self.event, self.step, self.function, self.started = event, step, function, -1

    def on_start(self, config, workdir, step):
        self.started = step

    def on_step(self, step, metrics):
        if (self.event, self.step) == ("step", step):
            self.function()

    def on_evaluation(self, step, results):
        if (self.event, self.step) == ("evaluation", step):
            self.function()

    def on_checkpoint(self, step, path):
        if (self.event, self.step) == ("checkpoint", step):
            self.function()


def fail():
    raise KeyError("an error of the callback")


@contextlib.contextmanager
def content(path: Path, new: str | bytes, *when) -> Iterator[Hook]:
    """Replace a file, at a step if there is one."""
    old = path.read_bytes()
    write = lambda: path.write_bytes(new if isinstance(new, bytes) else new.encode())  # noqa: E731
    if not when:
        write()
    yield Hook(*when, write)
    path.write_bytes(old)


@contextlib.contextmanager
def removed(folder: Path) -> Iterator[Hook]:
    """Remove a folder after the first step."""
    away = folder.with_name("away")
    yield Hook("step", 1, lambda: folder.rename(away))
    away.rename(folder)


@contextlib.contextmanager
def out_of_memory(number: int) -> Iterator[Hook]:
    """Let an evaluation fail, counted from 1."""
    evaluate, left = Suite.__call__, iter(range(1, number))

    def raising(self, *arguments):
        if next(left, None) is None:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory allocating 1 GiB")
        return evaluate(self, *arguments)

    Suite.__call__ = raising
    try:
        yield Hook()
    finally:
        Suite.__call__ = evaluate


class Fault(NamedTuple):
    """Fault of the first start."""

    trained: int  # steps that the first start trains
    message: str  # part of its error
    inject: Callable[[Run], contextlib.AbstractContextManager[Hook]]


def photo(run: Run) -> Path:
    return run.photos / "kind a" / "0.jpg"


def raising(trained: int, event: str, step: int) -> Fault:
    """Fail in a callback."""
    message = f"failed after step {trained}, which is saved"
    return Fault(trained, message, lambda run: contextlib.nullcontext(Hook(event, step, fail)))


SAVED = "evaluation failed after step {}, which is saved: "
FAULTS = {
    "template": Fault(0, 'expected "{c}"', lambda run: content(run.task, run.code("templates=('a {0}',)"))),
    "class names": Fault(0, "at least 2 class names", lambda run: content(run.task, run.code("class_names=('a',)"))),
    "damaged image": Fault(4, SAVED.format(4) + "bad record 0 of", lambda run: content(photo(run), b"no image")),
    "damaged image at the end": Fault(
        8, SAVED.format(8) + "bad record 0 of", lambda run: content(photo(run), b"no image", "step", 7)
    ),
    "data removed": Fault(4, SAVED.format(4) + "bad record 0 of", lambda run: removed(run.photos)),
    "out of memory": Fault(4, SAVED.format(4) + "the device ran out of memory", lambda run: out_of_memory(1)),
    "out of memory at the end": Fault(8, SAVED.format(8) + "the device", lambda run: out_of_memory(2)),
    "on_evaluation": raising(4, "evaluation", 4),
    "on_step": raising(6, "step", 5),
    "on_step of a saved step": raising(6, "step", 6),
    "on_checkpoint": raising(8, "checkpoint", 6),
    "on_checkpoint at the end": raising(8, "checkpoint", 8),
}
KILLS = {
    "killed in the evaluation": (Suite, "__call__"),
    "killed after the results": (Checkpointer, "record"),
    "killed after the metrics": (MetricWriter, "write"),
}


def undisturbed(folder: Path, keep_best: bool) -> tuple:
    """Return the outcome of a run without a fault."""
    run = Run(folder, keep_best)
    run.train(Hook())
    return run.outcome()


def check(name: str, folder: Path, keep_best: bool, reference: tuple) -> list[str]:
    """Run with a fault, then again; return what is wrong."""
    run = Run(folder, keep_best)
    trained, error = (start_killed if name in KILLS else start)(run, name)
    wrong = [] if error is None else [error]
    expected = STEPS if name in KILLS else FAULTS[name].trained
    if trained != expected:
        wrong.append(f"trained {trained} steps, not {expected}")
    again, batches = Hook(), count_batches()
    with batches as steps:
        run.train(again)
    if (again.started, len(steps)) != (expected, STEPS - expected):
        wrong.append(f"started again from {again.started} instead of {expected}, trained {len(steps)} steps")
    wrong += [
        f"another {part}" for part, a, b in zip(("metrics", "best"), run.outcome(), reference, strict=True) if a != b
    ]
    return wrong


def start(run: Run, name: str) -> tuple[int, str | None]:
    """Start a run that a fault ends; return the trained steps and what is wrong."""
    fault = FAULTS[name]
    with fault.inject(run) as hook, count_batches() as steps:
        try:
            run.train(hook)
        except Exception as error:
            text = "\n".join([str(error), *getattr(error, "__notes__", ())])
            print(f"{name}: {type(error).__name__}: {text}")
            return len(steps), None if fault.message in text else f"another message: {text}"
    return len(steps), "no error"


def start_killed(run: Run, name: str) -> tuple[int, str | None]:
    """Start a run that kills itself around the last evaluation."""
    command = [sys.executable, "-m", "tests.faults.evaluations", f"--folder={run.folder}", f"--kill={name}"]
    killed = subprocess.run(command, cwd=runs.ROOT, env=os.environ, capture_output=True, text=True)
    lines = runs.history(run.workdir)[0]
    return len(lines), None if killed.returncode == -signal.SIGKILL else f"not killed: {killed.stderr[-500:]}"


@contextlib.contextmanager
def count_batches() -> Iterator[list[int]]:
    """Count the batches of the training loop."""
    following, steps = Batches.next, []

    def counted(self):
        steps.append(1)
        return following(self)

    Batches.next = counted
    try:
        yield steps
    finally:
        Batches.next = following


def kill_at(name: str, workdir: Path) -> None:
    """Let this process kill itself around the evaluation of the last step."""
    owner, method = KILLS[name]
    function, complete = getattr(owner, method), workdir / "checkpoints" / str(STEPS) / "manifest.json"

    def killing(self, *arguments):
        last = METRIC in runs.history(workdir)[1][-1] if owner is Suite and runs.history(workdir)[1] else False
        if last:  # the evaluation of step 4 is done
            deadline = time.monotonic() + WAIT
            while not complete.exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        result = function(self, *arguments)
        if owner is not Suite and arguments[0] == STEPS and METRIC in arguments[1]:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, method, killing)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kill", choices=KILLS, help="kill this process around the last evaluation")
    parser.add_argument("--folder", type=Path, help="folder of the run that is killed")
    arguments = parser.parse_args()
    if arguments.kill:
        run = Run(arguments.folder, keep_best=True)
        kill_at(arguments.kill, run.workdir)
        run.train(Hook())
        return
    table, failures = ["| fault | keep_best | trained | again | wrong |", "| --- | --- | --- | --- | --- |"], 0
    with tempfile.TemporaryDirectory() as folder:
        for keep_best in (False, True):
            reference = undisturbed(Path(folder, f"undisturbed-{keep_best}"), keep_best)
            for number, name in enumerate([*FAULTS, *KILLS] if keep_best else FAULTS):
                wrong = check(name, Path(folder, f"{keep_best}-{number}"), keep_best, reference)
                trained = STEPS if name in KILLS else FAULTS[name].trained
                table.append(f"| {name} | {keep_best} | {trained} | {STEPS - trained} | {'; '.join(wrong)} |")
                failures += bool(wrong)
    print("\n".join(table))
    sys.exit(failures)


if __name__ == "__main__":
    main()
