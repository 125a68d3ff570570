"""Lose or stop one of two training processes, and compare the resumed runs.

python -m tests.faults.two_processes --folder=FOLDER [--compare=rates,faults] [--steps=40] [--batch_size=64] \
        [--config.NAME=VALUE ...]

Each process has the GPU of its rank, if there are GPUs, or that of `CUDA_VISIBLE_DEVICES`. An undisturbed run fills the
compilation cache in the folder, so that all runs compute with the same programs. "rates" compares it with a run on the
two-level mesh, and with runs of half the batch on one process, one on each GPU, which may differ in speed. "faults"
disturbs runs, which share the devices, and then resumes copies of their work directories on two processes and on one.
Prints a row for each fault.
"""

import argparse
import dataclasses
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from infcl_jax.training import METRICS_FILE, read_metrics
from tests import runs
from tests.faults.lost_process import latest_step

EVERY = 5  # steps between checkpoints
FAULT_STEP = 12  # least step at which a fault happens: some steps after a checkpoint
LIMIT = 600  # seconds for one phase
RESUME = 75  # the documented status, not that of the code
COMPARISONS = ("rates", "faults")
FAULTS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGSTOP)
DEFAULTS = {
    "dataset": "digits",
    "model": "tiny",
    "log_every": 1,
    "checkpoint_every": EVERY,
    "eval_every": 0,
    "optimizer.warmup_steps": 0,
    "evaluation.retrieval_dataset": None,
    "evaluation.zero_shot_dataset": None,
    "lost_process_timeout": 20,
}


@dataclasses.dataclass
class Run:
    """Processes of a run, by rank."""

    workdir: Path
    processes: list[subprocess.Popen]

    def errors(self, rank: int) -> list[str]:
        """Return the lines of a process on stderr, without those of libraries."""
        lines = self.workdir.with_suffix(f".{rank}").read_text().splitlines()
        return [line for line in lines if line.strip() and not re.match(r"[IWEF]\d{4} ", line)]


def start(workdir: Path, processes: int, flags: Sequence[str], first: int = 0) -> Run:
    """Start a run, a device for each process, from the device of number `first` on."""
    gpus = (os.environ.get("CUDA_VISIBLE_DEVICES") or "0,1").split(",")[first:]
    cluster = {"COORDINATOR_ADDRESS": f"127.0.0.1:{runs.free_port()}", "NUM_PROCESSES": str(processes)}
    started = []
    for rank in range(processes):
        environ = os.environ | cluster | {"PROCESS_ID": str(rank), "CUDA_VISIBLE_DEVICES": gpus[rank]}
        command = [sys.executable, "-m", "experiments.train", f"--workdir={workdir}", *flags]
        with workdir.with_suffix(f".{rank}").open("a") as errors:
            started.append(
                subprocess.Popen(command, cwd=runs.ROOT, env=environ, stdout=subprocess.DEVNULL, stderr=errors)
            )
    return Run(workdir, started)


def losses(workdir: Path) -> dict[int, float]:
    """Return the loss of each step that a run has logged."""
    if not (workdir / METRICS_FILE).is_file():
        return {}
    return {line["step"]: line["loss"] for line in runs.history(workdir)[0]}


def rate(workdir: Path) -> float:
    """Return the images per second of a run, the median of the second half of its steps."""
    lines = [line for line in read_metrics(workdir / METRICS_FILE) if "examples_per_second" in line]
    return statistics.median(line["examples_per_second"] for line in lines[len(lines) // 2 :])


def finish(run: Run) -> list[int]:
    """Wait for all processes, and return their statuses."""
    try:
        return [process.wait(LIMIT) for process in run.processes]
    finally:
        for process in run.processes:
            process.kill()


def disturb(run: Run, by: signal.Signals, rank: int) -> tuple[float, list[int]]:
    """Send a signal to one process during the steps, and wait for the others.

    Returns:
      Seconds until the last other process has ended, and the statuses of the others. A process that survives the signal
      is killed.
    """
    deadline = time.monotonic() + LIMIT
    while max(losses(run.workdir), default=0) < FAULT_STEP:
        assert time.monotonic() < deadline and all(process.poll() is None for process in run.processes), run
        time.sleep(0.02)
    sent = time.monotonic()
    run.processes[rank].send_signal(by)
    others = [process for process in run.processes if process is not run.processes[rank]]
    if by in (signal.SIGTERM, signal.SIGINT):  # the process saves and leaves like the others
        others = run.processes
    statuses = [process.wait(LIMIT) for process in others]
    seconds = time.monotonic() - sent
    run.processes[rank].kill()
    run.processes[rank].wait()
    return seconds, statuses


def differences(workdir: Path, reference: dict[int, float], first: int) -> tuple[int, float]:
    """Compare the losses from a step on: how many differ in a bit, and the largest relative difference."""
    theirs = losses(workdir)
    assert theirs.keys() == reference.keys(), (sorted(theirs), sorted(reference))
    pairs = [(theirs[step], loss) for step, loss in reference.items() if step >= first]
    return sum(a != b for a, b in pairs), max(abs(a - b) / abs(b) for a, b in pairs)


def read_arguments(
    parser: argparse.ArgumentParser, steps: int | None = None, **settings: Any
) -> tuple[argparse.Namespace, list[str]]:
    """Parse the arguments of this process, and make the folder of the runs.

    Args:
      parser: parser, to which the arguments of a run are added.
      steps: default number of steps; None: none.
      **settings: changes of `DEFAULTS`.

    Returns:
      The arguments, and the flags of the runs.
    """
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=steps, required=steps is None)
    parser.add_argument("--batch_size", type=int, default=64)
    given, changes = parser.parse_known_args()
    # Jobs in the background of a shell ignore it, and so would the processes that they start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    given.folder.mkdir(parents=True)
    sizes = {"total_steps": given.steps, "batch_size": given.batch_size}
    defaults = DEFAULTS | settings | sizes | {"compilation_cache": given.folder / "cache"}
    flags = ["--config=configs/base.py", *(f"--config.{name}={value}" for name, value in defaults.items()), *changes]
    return given, flags


def compare_rates(undisturbed: Run, batch_size: int, flags: Sequence[str]) -> None:
    """Print the rates on both meshes, and on one process with half the batch."""
    folder, reference = undisturbed.workdir.parent, losses(undisturbed.workdir)
    two_levels = start(folder / "two_levels", 2, [*flags, "--config.mesh=hosts"])
    assert finish(two_levels) == [0, 0], two_levels.errors(0)
    alone = []
    for device in range(2):
        run = start(folder / f"alone_{device}", 1, [*flags, f"--config.batch_size={batch_size // 2}"], device)
        assert finish(run) == [0], run.errors(0)
        alone.append(rate(run.workdir))
    flat, hosts = rate(undisturbed.workdir), rate(two_levels.workdir)
    print(f"flat {flat:.1f} images/s; two levels {hosts:.1f}, {hosts / flat:.3f} of flat")
    print(f"one process, half the batch: {alone[0]:.1f} and {alone[1]:.1f} images/s; ", end="")
    print(f"weak scaling {flat / sum(alone):.3f}, {flat / min(alone) / 2:.3f} of the slower")
    print(f"losses of two levels: by {differences(two_levels.workdir, reference, 1)[1]:.1e} at most from flat")


def compare_faults(undisturbed: Run, flags: Sequence[str]) -> int:
    """Print a row for each fault, and return how many runs did not leave or resume as documented."""
    folder, reference, wrong = undisturbed.workdir.parent, losses(undisturbed.workdir), 0
    again = start(folder / "again", 2, flags)
    disturbed = {by: start(folder / by.name, 2, flags) for by in FAULTS}
    with ThreadPoolExecutor() as threads:
        ranks = [index % 2 for index in range(len(FAULTS))]
        rows = dict(zip(FAULTS, threads.map(disturb, disturbed.values(), FAULTS, ranks), strict=True))
    finish(again)
    steps = {by: latest_step(run.workdir) for by, run in disturbed.items()}
    if ended := [by.name for by, step in steps.items() if step == max(reference)]:
        raise ValueError(f"expected runs that last until their signal, got the end before {ended}; use more --steps")
    print(f"undisturbed again: {differences(again.workdir, reference, 1)[0]} of {len(reference)} losses differ")
    print("| signal to rank | others out after | statuses | lines | checkpoint | resumed on 2 | resumed on 1 |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    resumed = {}
    for by, run in disturbed.items():
        for processes in (2, 1):
            copy = folder / f"{by.name}-{processes}"
            shutil.copytree(run.workdir, copy)
            resumed[by, processes] = start(copy, processes, flags)
    finished = {key: finish(run) for key, run in resumed.items()}
    for index, (by, run) in enumerate(disturbed.items()):
        (seconds, statuses), rank, step = rows[by], index % 2, steps[by]
        lines = [len(run.errors(r)) for r in range(2)]
        bits, _ = differences(resumed[by, 2].workdir, reference, step + 1)
        _, rounding = differences(resumed[by, 1].workdir, reference, step + 1)
        ends = (finished[by, 2], finished[by, 1])
        print(f"| {by.name} to {rank} | {seconds:.1f} s | {statuses} | {lines} | {step} ", end="")
        print(f"| {ends[0]}, {bits} losses differ | {ends[1]}, by {rounding:.1e} at most |")
        for line in run.errors(1 - rank):
            print(f"    {line}")
        wrong += bool(bits or set(statuses) != {RESUME} or ends != ([0, 0], [0]))
    return wrong


def comparisons(text: str) -> list[str]:
    """Parse the value of `--compare`."""
    names = text.split(",")
    if unknown := set(names) - set(COMPARISONS):
        expected = ", ".join(COMPARISONS)
        raise argparse.ArgumentTypeError(f"expected some of {expected}, got {', '.join(sorted(unknown))}")
    return names


def main() -> int:
    """Print the comparisons, and return 1 unless every run left and resumed as documented."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compare", type=comparisons, default=COMPARISONS)
    given, flags = read_arguments(parser, steps=40)
    undisturbed = start(given.folder / "undisturbed", 2, flags)
    assert finish(undisturbed) == [0, 0], undisturbed.errors(0)
    if "rates" in given.compare:
        compare_rates(undisturbed, given.batch_size, flags)
    return int("faults" in given.compare and compare_faults(undisturbed, flags) > 0)


if __name__ == "__main__":
    sys.exit(main())
