"""Send stop signals to runs at random moments.

All processes must leave in time, with status 75 and the same saved step.

python -m tests.faults.signals --count=50

The tries cycle through four signals, runs of 1, 2 and 4 processes, and every rank, in random order. A third of the
signals arrive before the first step, the others during steps and evaluations.
"""

import argparse
import collections
import dataclasses
import itertools
import json
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

from tests import runs
from tests.faults.lost_process import latest_step

RESUME = 75  # the documented status, not that of the code
LIMIT = 10.0  # seconds from the signal to the end of the last process
START = 600.0  # seconds for the start of all processes, on a busy machine
HANG = 120.0  # seconds from the signal after which a process is killed
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
RANKS = [(processes, rank) for processes in (1, 2, 4) for rank in range(processes)]


@dataclasses.dataclass(frozen=True)
class Case:
    """One try: a signal to a rank of a run."""

    number: signal.Signals
    processes: int
    rank: int
    started: bool  # whether the signal waits for the first step
    delay: float  # seconds between the signal handlers or the first step and the signal


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Result of one try."""

    case: Case
    seconds: float  # from the signal to the end of the last process
    saved: int | None  # step of the checkpoint
    fault: str  # what is wrong, empty if nothing is


def cases(count: int, seed: int) -> list[Case]:
    """Draw the tries."""
    rng = random.Random(seed)
    kinds = [(number, *rank) for number, rank in itertools.product(SIGNALS, RANKS)]
    rng.shuffle(kinds)
    drawn = []
    for (number, processes, rank), index in zip(itertools.cycle(kinds), range(count), strict=False):
        started = index % 3 > 0
        drawn.append(Case(number, processes, rank, started, rng.uniform(0, 3.0 if started else 5.0)))
    return drawn


def run_case(case: Case, workdir: Path) -> Outcome:
    """Start a run, send the signal, and judge how its processes end."""
    settings = runs.config(total_steps=100_000, eval_every=20, log_every=1_000, stop_timeout=int(HANG))
    processes = runs.start_cluster(case.processes, "experiments.train", f"--workdir={workdir}", *runs.flags(settings))
    try:
        deadline = time.monotonic() + START
        while not all(map(_handles_signals, processes)) or (case.started and not (workdir / "config.json").exists()):
            if time.monotonic() > deadline or any(process.poll() is not None for process in processes):
                return Outcome(case, 0.0, None, f"did not start: {[process.poll() for process in processes]}")
            time.sleep(0.02)
        time.sleep(case.delay)
        processes[case.rank].send_signal(case.number)
        sent = time.monotonic()
        while any(process.poll() is None for process in processes) and time.monotonic() < sent + HANG:
            time.sleep(0.02)
        seconds = time.monotonic() - sent
        hung = [rank for rank, process in enumerate(processes) if process.poll() is None]
    finally:
        for process in processes:
            process.kill()
        errors = [process.communicate()[1] for process in processes]
    lines = {line for text in errors for line in text.splitlines() if line.startswith("asked to stop")}
    saved = latest_step(workdir) or None
    expected = f"saved step {saved};" if saved else "no new step to save;"
    fault = ""
    if hung:
        fault = f"ranks {hung} hung"
    elif any(process.returncode != RESUME for process in processes):
        fault = f"statuses {[process.returncode for process in processes]}: {errors}"
    elif len(lines) != 1 or expected not in next(iter(lines)):
        fault = f"expected {expected} got {sorted(lines)}"
    return Outcome(case, seconds, saved, fault)


def _handles_signals(process) -> bool:
    """Return whether the run of a process has installed its handlers; only these catch SIGQUIT."""
    try:
        status = Path(f"/proc/{process.pid}/status").read_text()
    except OSError:
        return False
    caught = int(next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), 16)
    return bool(caught >> (signal.SIGQUIT - 1) & 1)


def run(count: int, seed: int = 0) -> list[Outcome]:
    """Run all tries and print each."""
    # Processes inherit ignored signals, and a shell's background jobs ignore SIGINT and SIGQUIT.
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    outcomes = []
    for number, case in enumerate(cases(count, seed), 1):
        with tempfile.TemporaryDirectory() as folder:
            outcomes.append(run_case(case, Path(folder, "run")))
        last = outcomes[-1]
        moment = f"{case.delay:.1f} s after the {'first step' if case.started else 'start'}"
        print(
            f"{number:>3}/{count} {case.number.name} to rank {case.rank} of {case.processes}, {moment}: out after "
            f"{last.seconds:.1f} s, saved step {last.saved}{'  FAULT ' + last.fault if last.fault else ''}",
            flush=True,
        )
    return outcomes


def table(outcomes: list[Outcome]) -> str:
    """Format the counts by signal and number of processes as Markdown."""
    rows = collections.defaultdict(list)
    for outcome in outcomes:
        rows[outcome.case.number.name, outcome.case.processes].append(outcome)
    lines = ["| signal | processes | tries | saved | nothing to save | faults | slowest (s) |", "|" + " --- |" * 7]
    for (name, processes), tries in sorted(rows.items()):
        saved, faults = sum(o.saved is not None for o in tries), sum(bool(o.fault) for o in tries)
        slowest = max(o.seconds for o in tries)
        lines.append(
            f"| {name} | {processes} | {len(tries)} | {saved} | {len(tries) - saved} | {faults} | {slowest:.1f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Run the tries of the command line; the status is 1 after a fault."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    outcomes = run(arguments.count, arguments.seed)
    print(table(outcomes))
    slow = sum(outcome.seconds >= LIMIT for outcome in outcomes)
    faults = sum(bool(outcome.fault) for outcome in outcomes)
    print(json.dumps({"tries": len(outcomes), "faults": faults, f"over {LIMIT:g} s": slow}))
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
