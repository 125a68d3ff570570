"""Kill or stop one of several training processes, and measure how the others end and whether the run resumes.

python -m tests.faults.lost_process [--count=N] [--timeout=SECONDS]

Each try prints a row: the rank and its signal, the seconds until all others have ended, their exit statuses and lines
on stderr, and the exit status of the resumed run on half of the processes.
"""

import argparse
import dataclasses
import random
import signal
import tempfile
import time
from pathlib import Path

from tests import runs

PROCESSES = 4
EVERY = 5  # steps between checkpoints
LIMIT = 600  # seconds for one phase, on a busy machine


@dataclasses.dataclass(frozen=True)
class Outcome:
    """End of the other processes after one was lost."""

    seconds: float  # from the signal to the end of the last process
    statuses: list[int]
    lines: list[list[str]]  # of each process on stderr
    step: int  # of the last checkpoint
    resumed: list[int]  # exit statuses of the resumed run


def start(workdir: Path, processes: int, steps: int, **changes):
    """Start a run as several processes of one device each."""
    config = runs.config(total_steps=steps, checkpoint_every=EVERY, log_every=EVERY, **changes)
    return runs.start_cluster(processes, "experiments.train", f"--workdir={workdir}", *runs.flags(config))


def lose(workdir: Path, rank: int, by: signal.Signals, *, timeout: int, processes: int = PROCESSES) -> Outcome:
    """Send a signal to one process of a run after its first checkpoint, and resume the run on half of them."""
    started = start(workdir, processes, 1_000_000, lost_process_timeout=timeout)
    try:
        while not latest_step(workdir):
            assert all(process.poll() is None for process in started), started[rank].communicate()
            time.sleep(0.1)
        time.sleep(random.uniform(0, 2))
        signaled = time.monotonic()
        started[rank].send_signal(by)
        others = [process for process in started if process is not started[rank]]
        errors = [process.communicate(timeout=LIMIT)[1].splitlines() for process in others]
        seconds = time.monotonic() - signaled
    finally:
        for process in started:
            process.kill()
        started[rank].communicate()  # closes its pipes
    step = latest_step(workdir)
    resumed = runs.finish(*start(workdir, processes // 2, step + EVERY), seconds=LIMIT)
    assert latest_step(workdir) == step + EVERY
    statuses = [process.returncode for process in others]
    return Outcome(seconds, statuses, errors, step, [end.returncode for end in resumed])


def latest_step(workdir: Path) -> int:
    """Return the step of the latest checkpoint, 0 without one."""
    return max((int(path.name) for path in (workdir / "checkpoints").glob("*") if path.name.isdecimal()), default=0)


def main() -> None:
    """Print a table of the tries: every rank in turn, killed or stopped."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=2 * PROCESSES)
    parser.add_argument("--timeout", type=int, default=30, help="seconds of lost_process_timeout")
    flags = parser.parse_args()
    print("| process | signal | others ended after | statuses | lines | step | resumed on 2 |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for number in range(flags.count):
        rank, by = number % PROCESSES, (signal.SIGKILL, signal.SIGSTOP)[number // PROCESSES % 2]
        with tempfile.TemporaryDirectory() as folder:
            outcome = lose(Path(folder), rank, by, timeout=flags.timeout)
        lines, statuses = [len(errors) for errors in outcome.lines], set(outcome.statuses)
        print(
            f"| {rank} | {by.name} | {outcome.seconds:.1f} s | {statuses} | {lines} | {outcome.step} | "
            f"{set(outcome.resumed)} |",
            flush=True,
        )
        for line in {line for errors in outcome.lines for line in errors}:
            print(f"  {line}", flush=True)


if __name__ == "__main__":
    main()
