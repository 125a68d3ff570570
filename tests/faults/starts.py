"""Start runs on ports in use, with wrong addresses and platforms, and with processes that end while they start.

python -m tests.faults.starts [--count=N]

Each row shows the exit status and the last line of every process. A row is wrong if a status differs from the expected
one, a process prints more than one line on stderr, or the run that had the port first is disturbed.
"""

import argparse
import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests import runs
from tests.faults.lost_process import latest_step

RESUME = 75  # the documented status, not that of the code
IN_USE = "the coordinator's port is in use by another run or program: "
LIMIT = 400  # seconds for one row, on a busy machine


@dataclasses.dataclass(frozen=True)
class End:
    """End of a process."""

    status: int  # negative for a signal
    lines: list[str]  # on stderr


def start(workdir: Path, port: int | str, ranks: Sequence[int], *, steps: int = 20, count: int = 2, **changes):
    """Start processes of a training run."""
    environ = {name: changes.pop(name) for name in list(changes) if name.isupper()}
    address = port if isinstance(port, str) else f"localhost:{port}"
    settings = runs.flags(
        runs.config(**{"total_steps": steps, "start_timeout": 180, "lost_process_timeout": 10} | changes)
    )
    cluster = {"COORDINATOR_ADDRESS": address, "NUM_PROCESSES": str(count)} | environ
    arguments = ["experiments.train", f"--workdir={workdir}", *settings]
    return [runs.start(*arguments, PROCESS_ID=str(rank), **cluster) for rank in ranks]


def end(processes: Sequence[subprocess.Popen]) -> list[End]:
    """Wait for processes."""
    return [End(done.returncode, done.stderr.splitlines()) for done in runs.finish(*processes, seconds=LIMIT)]


@contextlib.contextmanager
def running(workdir: Path, port: int, ranks: Sequence[int] = (0, 1)) -> Iterator[list[subprocess.Popen]]:
    """Run a job that goes on until it is asked to stop, training or, with some ranks only, waiting for the others."""
    job = start(workdir, port, ranks, steps=1_000_000, log_every=100)
    try:
        ready = workdir / "metrics.jsonl" if len(ranks) == 2 else None
        wait_for(lambda: ready.exists() if ready else listens(port), job)
        yield job
    finally:
        for process in job:
            process.kill()
            process.communicate()


def wait_for(condition: Callable[[], bool], processes: Sequence[subprocess.Popen]) -> None:
    """Wait for a condition while processes run."""
    deadline = time.monotonic() + LIMIT
    while not condition():
        ended = [process.communicate() for process in processes if process.poll() is not None]
        assert not ended and time.monotonic() < deadline, ended
        time.sleep(0.05)


def listens(port: int) -> bool:
    """Return whether a program listens on a port."""
    with contextlib.suppress(OSError), socket.create_connection(("localhost", port), 1):
        return True
    return False


def newcomer(folder: Path, first: str, order: Sequence[int], same: bool = False) -> list[End]:
    """Start a second job on the port of a first one, and finish the first.

    Args:
      folder: folder of both runs.
      first: "training", or "waiting" for its process 1.
      order: ranks of the second job, in the order of their starts.
      same: whether both jobs have the same work directory.

    Returns:
      Ends of the processes of the second job, then of the first, which SIGTERM stops.
    """
    port = runs.free_port()
    with running(folder / "a", port, (0, 1) if first == "training" else (0,)) as job:
        second = []
        for rank in order:
            second += start(folder / ("a" if same else "b"), port, [rank])
            time.sleep(2.0)
        ends = end(second)
        if first == "waiting":
            job += start(folder / "a", port, [1], steps=1_000_000, log_every=100)
            wait_for((folder / "a" / "metrics.jsonl").exists, job)
        job[1].terminate()
        return ends + end(job)


def taken_over(folder: Path) -> list[End]:
    """Start a job again while it runs, stop the first start, and the second once it trains."""
    port = runs.free_port()
    with running(folder, port) as job, contextlib.ExitStack() as stack:
        second = start(folder, port, (0, 1), steps=1_000_000, log_every=100)
        stack.callback(lambda: [process.kill() for process in second])
        time.sleep(12.0)  # the imports take some
        job[1].terminate()
        ends, size = end(job), (folder / "metrics.jsonl").stat().st_size
        wait_for(lambda: (folder / "metrics.jsonl").stat().st_size > size, second)
        second[1].terminate()
        return end(second) + ends


def program(folder: Path, ranks: Sequence[int] = (0, 1)) -> list[End]:
    """Start a job on the port of a program that listens and never answers."""
    with socket.create_server(("", 0)) as listener:
        return end(start(folder, listener.getsockname()[1], ranks))


def restart(folder: Path) -> list[End]:
    """Kill a job and start it again at once on the same port."""
    port = runs.free_port()
    with running(folder, port) as job:
        for process in job:
            process.kill()
    return end(start(folder, port, (1, 0), steps=latest_step(folder) + 20))


def replaced(folder: Path) -> list[End]:
    """Kill process 1 of a job, and start it again while process 0 still runs, which then starts again too."""
    port = runs.free_port()
    with running(folder, port) as job:
        job[1].kill()
        again = start(folder, port, [1], steps=20)
        ends = end(job[:1])
    return ends + end([*again, *start(folder, port, [0], steps=20)])


def signaled(folder: Path, number: signal.Signals, seconds: float, ranks: Sequence[int] = (0,)) -> list[End]:
    """Send a signal to the last process of a job while it imports its packages."""
    processes = start(folder, runs.free_port(), ranks, start_timeout=20)
    time.sleep(seconds)
    processes[-1].send_signal(number)
    return end(processes)


def crash(folder: Path, number: signal.Signals, *, joined: bool) -> list[End]:
    """Send the signal of a crash to process 1 of a job, before or after the processes have joined."""
    port = runs.free_port()
    if joined:
        with running(folder, port) as job:
            job[1].send_signal(number)
            return end(job[1:])
    (process,) = start(folder, port, [1])
    wait_for((folder / "logs" / "process-1.err").exists, [process])
    time.sleep(0.5)
    process.send_signal(number)
    return end([process])


def judge(ends: Sequence[End], statuses: Sequence[int], *texts: str) -> str:
    """Return what is wrong: other statuses, other than one line, or lines without a text; empty if nothing is."""
    if [e.status for e in ends] != list(statuses):
        return f"expected {list(statuses)}"
    for e, text in zip(ends, texts, strict=False):
        if len(e.lines) != 1 or text not in e.lines[0]:
            return f"expected one line with {text!r}"
    return ""


Case = tuple[Callable[[Path], list[End]], list[int], list[str]]


def cases() -> dict[str, Case]:
    """Return the rows by name: their start, the expected statuses, and a text of each line."""
    rows: dict[str, Case] = {}

    def add(name: str, statuses: list[int], texts: list[str], function: Callable, *arguments: Any, **changes: Any):
        rows[name] = (lambda folder: function(folder, *arguments, **changes)), statuses, texts

    def whole(folder: Path, address: int | str, ranks: Sequence[int], **changes: Any) -> list[End]:
        return end(start(folder, address, ranks, **changes))

    stopped = [1, 1, RESUME, RESUME]
    for first in ("training", "waiting"):
        for order in ((0, 1), (1, 0)):
            add(f"second job, ranks {order}, first {first}", stopped, [IN_USE] * 2, newcomer, first, order)
        add(f"rank 1 of a second job, first {first}", stopped[1:], [IN_USE], newcomer, first, [1])
    add("same command twice", stopped, [IN_USE] * 2, newcomer, "training", (0, 1), same=True)
    add("same command twice, the first stopped", [RESUME] * 4, [], taken_over)
    add("port of a program", [1, 1], [IN_USE] * 2, program)
    add("killed and started again", [0, 0], [], restart)
    add("process 1 replaced", [RESUME, 0, 0], ["lost process 1"], replaced)
    wrong = "expected COORDINATOR_ADDRESS as HOST:PORT or [IPV6]:PORT with a port from 1 to 65535, got "
    for address in ("localhost", "localhost:0", "localhost:70000", "localhost:abc", "::1:1234", ":1234"):
        add(f"address {address}", [1], [f"{wrong}'{address}'"], whole, address, [0])
    host = "no.such.host.invalid:1234"
    unknown = f"expected a host that has an address in COORDINATOR_ADDRESS={host}: "
    add("unknown host", [1], [unknown], whole, host, [1], start_timeout=5)
    add("IPv6 address", [0, 0], [], lambda folder: whole(folder, f"[::1]:{runs.free_port()}", (0, 1)))
    for platform in ("gpuu", "cuda", "cpu,gpuu"):
        name = f"JAX_PLATFORMS={platform}"
        text = f"expected JAX_PLATFORMS to name a platform of this machine, got '{platform}': "
        add(name, [1], [text], whole, 1234, [0], count=1, JAX_PLATFORMS=platform)
    asked = "asked to stop: no new step to save"
    for number, seconds in ((signal.SIGTERM, 0.3), (signal.SIGTERM, 1.5), (signal.SIGUSR1, 0.7), (signal.SIGINT, 1.0)):
        add(f"{number.name} {seconds} s after the start", [RESUME], [asked], signaled, number, seconds)
    missing = "process 0: expected 2 processes within 20 s, got fewer; without a start in "
    texts = [missing, asked]
    add("SIGTERM to process 1 while it imports", [RESUME] * 2, texts, signaled, signal.SIGTERM, 0.3, (0, 1))
    for number in (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE):
        line = f"process 1: native code crashed ({number.name}): "
        add(f"{number.name} before joining", [-number], [line], crash, number, joined=False)
        if number != signal.SIGABRT:  # waits for a report of the coordination service
            add(f"{number.name} after joining", [-number], [line], crash, number, joined=True)
    return rows


def main() -> int:
    """Print a table of the rows, and return 1 if any is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=1, help="tries of each row")
    parser.add_argument("--only", default="", help="text in the names of the rows")
    given = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGHUP):  # jobs in the background of a shell ignore it
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    wrong = 0
    os.environ.update(JAX_COMPILATION_CACHE_DIR=tempfile.mkdtemp(), JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0")
    print("| start | seconds | exit statuses | lines | wrong |\n| --- | --- | --- | --- | --- |")
    for name, (run, statuses, texts) in cases().items():
        for _ in range(given.count if given.only in name else 0):
            with tempfile.TemporaryDirectory() as folder:
                begun = time.monotonic()
                ends = run(Path(folder, "run"))
            fault = judge(ends, statuses, *texts)
            wrong += bool(fault)
            seconds, lines = time.monotonic() - begun, [len(e.lines) for e in ends]
            print(f"| {name} | {seconds:.0f} | {[e.status for e in ends]} | {lines} | {fault} |", flush=True)
            for line in dict.fromkeys(line for e in ends for line in e.lines[-1:]):
                print(f"    {line[:300]}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
