"""Kill data workers of small runs, and run scripts that workers cannot import.

python -m tests.faults.workers [--kills=N] [--seed=N]

A row has the fault, the exit status, the seconds until the run has ended and its lines on stderr. The command exits
with status 1 if a status or a number of lines is not as expected, or if shared memory of workers is left. No other run
may have workers meanwhile.
"""

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from infcl_jax.run.batches import LOST_WORKERS_FILE
from infcl_jax.runtime.exit_codes import RESUME
from tests import runs

SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS)
LIMIT = 300  # seconds for one run, on a busy machine
SCRIPT = "import infcl_jax\ninfcl_jax.train({settings}, {workdir!r})\n"
GUARDED = "import infcl_jax\nif __name__ == '__main__':\n    infcl_jax.train({settings}, {workdir!r})\n"


def workers(process: subprocess.Popen) -> list[int]:
    """Process ids of the data workers of a run that have started to read."""
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            name, status = (folder / "comm").read_text(), (folder / "status").read_text()
        except OSError:  # ended meanwhile
            continue
        if name.startswith("data worker") and f"PPid:\t{process.pid}\n" in status:
            pids.append(int(folder.name))
    return pids


def kill(workdir: Path, number: signal.Signals, delay: float) -> tuple[int, float, list[str]]:
    """Start or continue a run, send a signal to one of its workers, and wait for its end."""
    config = runs.config(total_steps=1_000_000, checkpoint_every=200, num_workers=2, log_every=100)
    process = runs.start("experiments.train", f"--workdir={workdir}", *runs.flags(config))
    try:
        while not (started := workers(process)):
            assert process.poll() is None, process.communicate()
            time.sleep(0.1)
        time.sleep(delay)
        os.kill(random.choice(started), number)
        start = time.monotonic()
        _, errors = process.communicate(timeout=LIMIT)
    finally:
        process.kill()
    return process.returncode, time.monotonic() - start, errors.splitlines()


def run_script(text: str, folder: Path, by: str) -> tuple[int, float, list[str]]:
    """Run a script by its path, from standard input, with `-c` or with `-m`."""
    settings = runs.SMALL | {"total_steps": 4, "num_workers": 2}
    text = text.format(settings=settings, workdir=str(folder / "run"))
    (folder / "script.py").write_text(text)
    arguments = {"path": ["script.py"], "stdin": ["-"], "-c": ["-c", text], "-m": ["-m", "script"]}[by]
    environment = os.environ | {"PYTHONPATH": str(runs.ROOT)}
    start = time.monotonic()
    end = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        input=text,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        env=environment,
    )
    return end.returncode, time.monotonic() - start, end.stderr.splitlines()


def main() -> None:
    """Print a row for each fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=8, help="number of killed workers at random times")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    random.seed(arguments.seed)
    wrong = 0

    def row(fault: str, expected: int, status: int, seconds: float, lines: list[str]) -> None:
        nonlocal wrong
        right = status == expected and len(lines) == (status != 0)
        wrong += not right
        print(f"| {fault} | {status} | {seconds:.1f} s | {' / '.join(lines)} |{'' if right else ' WRONG'}", flush=True)

    print("| fault | status | after | lines on stderr |\n| --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as name:
        workdir = Path(name, "kills")
        for _ in range(arguments.kills):
            number, delay = random.choice(SIGNALS), random.uniform(0, 8)
            status, seconds, lines = kill(workdir, number, delay)
            row(f"{number.name} to a worker after {delay:.1f} s", RESUME, status, seconds, lines)
        # Every start from here on would lose a worker before it passes the recorded steps.
        (workdir / LOST_WORKERS_FILE).write_text("[[0, 1000000]]")
        status, seconds, lines = kill(workdir, signal.SIGKILL, 1)
        row("SIGKILL at the same step", 1, status, seconds, lines)
        for by, text, expected in (
            ("path", SCRIPT, 1),
            ("-m", SCRIPT, 1),
            ("stdin", SCRIPT, 1),
            ("stdin", GUARDED, 1),
            ("path", GUARDED, 0),
            ("-m", GUARDED, 0),
            ("-c", SCRIPT, 0),
        ):
            folder = Path(name, f"{by}{text == GUARDED}")
            folder.mkdir()
            fault = f"script by {by}, {'with' if text == GUARDED else 'without'} guard"
            row(fault, expected, *run_script(text, folder, by))
    left = [path.name for path in Path("/dev/shm").iterdir() if re.fullmatch(r"i[0-9a-f]{12}", path.name)]
    print(f"shared memory left: {len(left)}")
    sys.exit(bool(wrong or left))


if __name__ == "__main__":
    main()
