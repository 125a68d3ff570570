"""Train for an hour and measure the growth of memory, file descriptors and threads.

    python -m tests.faults.soak --minutes=60 [--output=runs/soak.csv]

A tiny run on the digits saves every 20 steps and evaluates every 1000. Every two seconds, resident memory, file
descriptors and threads of the process and its data worker go to a CSV file. The first fifth is warm-up. After it, the
memory must grow by less than `--most` MiB a minute (Theil-Sen slope). Descriptors and threads vary with the saves in
progress. The lower bound of their growth over the run must be below one.
"""

import argparse
import csv
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy import stats

from tests import runs

CHECKPOINT_EVERY, EVAL_EVERY = 20, 1000
INTERVAL = 2.0  # seconds between samples
WARM_UP = 0.2  # fraction of the samples: compilation, allocator pools, first evaluation
KIB_PER_MIB = 1024


class Sample(NamedTuple):
    """Usage of a process and its descendants at one time; memory in KiB."""

    seconds: float
    step: int
    rss: int
    worker_rss: int
    descriptors: int
    threads: int
    processes: int


class Usage(NamedTuple):
    """Resident memory in KiB, file descriptors and threads of one process."""

    rss: int
    descriptors: int
    threads: int


def usage(pid: int) -> Usage:
    process = Path("/proc", str(pid))
    lines = (process / "smaps_rollup").read_text().splitlines()
    (rss,) = [int(line.split()[1]) for line in lines if line.startswith("Rss:")]
    return Usage(rss, len(os.listdir(process / "fd")), len(os.listdir(process / "task")))


def descendants(pid: int) -> list[int]:
    children = []
    for task in Path("/proc", str(pid), "task").iterdir():
        children += map(int, (task / "children").read_text().split())
    return children + [inner for child in children for inner in descendants(child)]


def sample(pid: int, started: float, workdir: Path) -> Sample:
    steps = [int(path.name) for path in (workdir / "checkpoints").glob("*") if path.name.isdigit()]
    own, workers = usage(pid), [usage(child) for child in descendants(pid)]
    descriptors, threads = (sum(getattr(u, name) for u in [own, *workers]) for name in ("descriptors", "threads"))
    rss = own.rss, sum(worker.rss for worker in workers)
    return Sample(time.monotonic() - started, max(steps, default=0), *rss, descriptors, threads, 1 + len(workers))


def soak(minutes: float, workdir: Path, output: Path) -> list[Sample]:
    """Sample a run of some minutes, then ask it to stop.

    Raises:
      RuntimeError: the run ended by itself or did not save when asked to stop.
    """
    settings = {"total_steps": 10**8, "checkpoint_every": CHECKPOINT_EVERY, "eval_every": EVAL_EVERY, "log_every": 100}
    config = runs.config(**settings | {"optimizer.learning_rate": 1e-5, "num_workers": 1})
    process = runs.start("experiments.train", f"--workdir={workdir}", *runs.flags(config))
    printed: list[str] = []
    reader = threading.Thread(target=lambda: printed.extend(process.communicate()))  # pipes must not fill up
    reader.start()
    samples, started = [], time.monotonic()
    try:
        with output.open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(Sample._fields)
            while process.poll() is None and time.monotonic() - started < 60 * minutes:
                try:
                    samples.append(sample(process.pid, started, workdir))
                except (FileNotFoundError, ProcessLookupError):  # a process or folder ended meanwhile
                    continue
                rows.writerow(samples[-1])
                file.flush()
                time.sleep(INTERVAL)
        ended_early = process.poll() is not None
        process.send_signal(signal.SIGTERM)
        reader.join(timeout=120)
    finally:
        process.kill()
        reader.join()
    if ended_early or "saved step" not in "".join(printed):
        raise RuntimeError(f"the run ended with status {process.returncode}: {printed}")
    return samples


def report(samples: list[Sample], most: float) -> list[str]:
    """Print slopes and counts; return what grows."""
    columns = Sample(*np.array(samples).T)
    steady = columns.step >= CHECKPOINT_EVERY  # the run has started
    steady &= columns.seconds >= columns.seconds[-1] * WARM_UP
    columns = Sample(*(column[steady] for column in columns))
    minutes = columns.seconds / 60
    saves = (columns.step[-1] - columns.step[0]) / CHECKPOINT_EVERY
    growing = []
    print(f"{len(minutes)} samples, {minutes[-1] - minutes[0]:.1f} minutes, {saves:.0f} saves")
    for name, memory in (("process", columns.rss), ("workers", columns.worker_rss)):
        slope, _, low, high = stats.theilslopes(memory / KIB_PER_MIB, minutes)
        per_save = slope * KIB_PER_MIB * (minutes[-1] - minutes[0]) / saves
        print(f"{name}: {slope:.2f} MiB/min (95 %: {low:.2f} to {high:.2f}), {per_save:.1f} KiB per save, ", end="")
        print(f"resident {memory[0] / KIB_PER_MIB:.0f} to {memory[-1] / KIB_PER_MIB:.0f} MiB")
        growing += [f"the memory of {name} grows by {slope:.2f} MiB/min"] * bool(slope >= most)
    for name in ("descriptors", "threads", "processes"):
        counts = getattr(columns, name)
        _, _, low, high = (bound * (minutes[-1] - minutes[0]) for bound in stats.theilslopes(counts, minutes))
        print(f"{name}: {counts.min():.0f} to {counts.max():.0f}, growth {low:.1f} to {high:.1f} (95 %)")
        growing += [f"{name} grow by at least {low:.1f}"] * bool(low >= 1)
    return growing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="length of the run")
    parser.add_argument("--most", type=float, default=1.0, help="most growth in MiB a minute")
    parser.add_argument("--output", type=Path, default=Path("runs/soak.csv"), help="file of the samples")
    arguments = parser.parse_args()
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = f"{folder}/compiled"  # not the user's
        growing = report(soak(arguments.minutes, Path(folder, "run"), arguments.output), arguments.most)
    sys.exit("\n".join(growing) if growing else 0)


if __name__ == "__main__":
    main()
