"""Preempt a run of two processes repeatedly, and compare it with an undisturbed one.

python -m tests.faults.preemptions --folder=FOLDER --steps=200 [--every=60] [--seconds=480] [--seed=0] \
        [--config.NAME=VALUE ...]

Each process has the GPU of its rank, if there are GPUs. The undisturbed run starts first and fills the compilation
cache in the folder, so that both runs compute with the same programs. They share the devices. After a random time of
`--every` seconds on average, SIGTERM goes to both processes or to a random one. The run starts again until it has
taken all steps, undisturbed after `--seconds`. Prints a row for each start.
"""

import argparse
import math
import random
import signal
import sys
import time

from tests.faults.lost_process import latest_step
from tests.faults.two_processes import LIMIT, RESUME, Run, differences, finish, losses, read_arguments, start


def preempt(run: Run, seconds: float, ranks: list[int]) -> tuple[list[int], float]:
    """Send SIGTERM to some processes of a run after a time, unless it ends before.

    Returns:
      The statuses of the processes, and the seconds from the signal until all have ended; 0 without a signal.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(process.poll() is None for process in run.processes):
        time.sleep(0.05)
    sent = time.monotonic()
    for rank in ranks:
        run.processes[rank].send_signal(signal.SIGTERM)  # does nothing to a process that has ended
    statuses = finish(run)
    return statuses, time.monotonic() - sent if RESUME in statuses else 0.0


def main() -> int:
    """Print the table, and return 1 unless the runs end with the same losses."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=float, default=60.0)
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--seed", type=int, default=0)
    given, flags = read_arguments(parser, checkpoint_every=0)
    folder = given.folder
    rng, wrong, begin = random.Random(given.seed), 0, time.monotonic()

    undisturbed = start(folder / "undisturbed", 2, flags)
    while not losses(undisturbed.workdir):
        assert time.monotonic() - begin < LIMIT and undisturbed.processes[0].poll() is None, undisturbed.errors(0)
        time.sleep(0.1)
    begin = time.monotonic()
    print("| SIGTERM to | after | both out after | statuses | checkpoint |")
    print("| --- | --- | --- | --- | --- |")
    statuses = [RESUME]
    while RESUME in statuses:
        run, ranks = start(folder / "preempted", 2, flags), rng.choice(([0], [1], [0, 1]))
        seconds = given.every * rng.uniform(0.5, 1.5)
        if time.monotonic() + seconds > begin + given.seconds:
            seconds, ranks = math.inf, []
        statuses, out = preempt(run, seconds, ranks)
        print(f"| {ranks} | {seconds:.0f} s | {out:.1f} s | {statuses} | {latest_step(run.workdir)} |", flush=True)
        wrong += statuses not in ([RESUME] * 2, [0, 0])
    print(f"preempted run: {time.monotonic() - begin:.0f} s")
    wrong += finish(undisturbed) != [0, 0]
    bits, rounding = differences(run.workdir, losses(undisturbed.workdir), 1)
    print(f"{bits} of {given.steps} losses differ from the undisturbed run, by {rounding:.1e} at most")
    return int(bool(wrong or bits))


if __name__ == "__main__":
    sys.exit(main())
