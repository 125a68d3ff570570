"""Lost, failed and missing processes: one line and an exit status from each of the others."""

import os
import signal
import subprocess
import sys
import time

import pytest
import runs
from coordination import Service

from infcl_jax.runtime import process_watch
from infcl_jax.runtime.exit_codes import RESUME
from infcl_jax.runtime.process_watch import ProcessWatch, failures
from tests.faults import lost_process

FATAL = "F1123 client.h:86] Terminating process because the JAX distributed service detected fatal errors. This most "
LOST = "absl::Status: UNAVAILABLE: The following tasks are unhealthy (stopped sending heartbeats):\n{}\nThe tasks have "
CLOSED = "RPC: /xla.coordination.CoordinationService/PollForError:\n:UNAVAILABLE:Stream removed (Socket closed)"
REGISTER = (
    "absl::Status: DEADLINE_EXCEEDED: Deadline Exceeded\n\nRPC: /xla.coordination.CoordinationService/RegisterTask"
)


@pytest.fixture
def watch(tmp_path):
    """The watch of process 1 of 4, without its effects on this process."""
    watch = ProcessWatch.__new__(ProcessWatch)
    watch.folder, watch._rank, watch._count = tmp_path, 1, 4
    watch.log, watch._channel, watch._lead = tmp_path / "process-1.err", None, None
    watch._start_timeout = watch._lost_process_timeout = 120
    watch._hosts, watch._failing, watch._started = {0: "a", 1: "a", 2: "b"}, False, time.time()
    return watch


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (LOST.format("2") + "crashed.", "lost process 2 on b"),
        (
            LOST.format("/job:jax_worker/replica:0/task:2\n3") + "crashed.",
            "process 2 on b, process 3 on an unknown host",
        ),
        (CLOSED, "lost process 0 on a"),
        ("absl::Status: DEADLINE_EXCEEDED\n\nRPC: /xla.coordination.CoordinationService/Heartbeat", "process 0 on a"),
    ],
)
def test_the_log_tells_which_process_is_lost(watch, status, reason):
    assert watch._reason(f"E1123 other\n{FATAL}{status}").endswith(reason)


def test_other_aborts_are_not_of_a_lost_process(watch):
    assert watch._reason("free(): invalid pointer") is None


def test_the_line_of_an_abort_leaves_out_the_stack():
    log = "W1123 other\nF1123 reason\n*** Check failure ***\n    @ 0x7f main\n\n"
    assert process_watch._last_line(log) == "F1123 reason"


def test_processes_that_never_start_are_those_without_a_fresh_log(watch, tmp_path):
    """Process 0 has started; of process 2 there is an old log, and process 3 left before this start."""
    starts = {0: f"{watch._started - 5:.0f}", 1: f"{watch._started:.0f}", 2: "1000", 3: f"{watch._started - 50:.0f}"}
    for rank, seconds in starts.items():
        (tmp_path / f"process-{rank}.err").write_text(f"process {rank} of 4 on a started at {seconds}\nW1123 warning\n")
    with (tmp_path / "process-3.err").open("a") as file:
        file.write("process 3 left: lost process 2 on b\n")
    assert watch._reason(FATAL + REGISTER).endswith(f"got fewer; without a start in {tmp_path}: process 2, 3")


@pytest.mark.parametrize("rank", [0, 2])
def test_a_failure_of_a_missing_process_is_named(watch, tmp_path, rank):
    for other in range(4):
        start = f"process {other} of 4 on a started at {watch._started:.0f}\n"
        (tmp_path / f"process-{other}.err").write_text(start + f"process {rank} left: failed: why\n" * (other == rank))
    assert watch._incomplete().endswith(f"within 120 s, got fewer; process {rank} left: failed: why")
    assert process_watch._is_failure(watch._incomplete())
    assert watch.lead_may_run() == (rank != 0)


@pytest.mark.parametrize("target", ["link", "fifo"])
def test_a_planted_log_is_not_written(tmp_path, target):
    log, victim = tmp_path / "process-0.err", tmp_path / "victim"
    victim.write_text("kept")
    if target == "link":
        log.symlink_to(victim)
    else:
        os.mkfifo(log)
    with pytest.raises(OSError, match=r"process-0\.err"):
        process_watch._redirect_stderr(log)
    assert victim.read_text() == "kept"


def test_a_failure_before_joining_is_noted(watch, monkeypatch):
    monkeypatch.setattr(process_watch, "_watch", watch)
    monkeypatch.setattr(process_watch.threading, "Timer", lambda *arguments: Timer())
    with pytest.raises(ValueError, match="two"), failures():
        raise ValueError("two\nlines \x1b[2J")
    assert watch.log.read_text() == "process 1 left: failed: two lines \\x1b[2J\n"


def test_failures_are_published_once(watch, monkeypatch):
    _, watch._channel, other, _ = Service(4).channels()
    monkeypatch.setattr(process_watch, "_watch", watch)
    monkeypatch.setattr(process_watch.threading, "Timer", lambda *arguments: Timer())
    with pytest.raises(ValueError, match="two"), failures(), failures():
        raise ValueError("two\nlines")
    assert other.received("failure") == {1: "1 two lines"}


class Timer:
    """A timer that never fires."""

    def start(self):
        assert self.daemon


def start(folder, count, *ranks, arguments=()):
    cluster = {"COORDINATOR_ADDRESS": f"127.0.0.1:{runs.free_port()}", "NUM_PROCESSES": str(count)}
    flags = [str(folder), *arguments]
    return [runs.start("tests.faults.collectives", *flags, PROCESS_ID=str(rank), **cluster) for rank in ranks]


def end(processes):
    """Wait for the processes; return their exit statuses and stderr."""
    try:
        errors = [process.communicate(timeout=240)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [process.returncode for process in processes], errors


@pytest.mark.parametrize(
    ("rank", "by", "collectives"),
    [
        pytest.param(0, signal.SIGKILL, [], marks=pytest.mark.slow),
        pytest.param(1, signal.SIGKILL, [], marks=pytest.mark.full),
        pytest.param(1, signal.SIGKILL, ["abort"], marks=pytest.mark.full),
        pytest.param(0, signal.SIGSTOP, [], marks=pytest.mark.slow),
    ],
)
def test_the_others_of_a_lost_process_ask_to_be_resumed(tmp_path, rank, by, collectives):
    processes = start(tmp_path, 3, 0, 1, 2, arguments=["15", *collectives])
    lost = processes.pop(rank)
    try:
        for process in (*processes, lost):
            assert "running\n" in process.stdout  # after lines of Gloo
        lost.send_signal(by)
        statuses, errors = end(processes)
    finally:
        lost.kill()
        lost.communicate()
    assert statuses == [RESUME, RESUME], errors
    for text in errors:
        assert text.count("\n") == 1 and f"lost process {rank} on " in text


@pytest.mark.full  # of both halves: tests of the processes above, and of a stopped run on fewer processes
def test_a_run_resumes_on_fewer_processes(tmp_path):
    outcome = lost_process.lose(tmp_path, 1, signal.SIGKILL, timeout=15)
    assert (outcome.statuses, outcome.resumed) == ([RESUME] * 3, [0, 0]), outcome.lines
    assert [len(lines) for lines in outcome.lines] == [1, 1, 1]


@pytest.mark.slow
def test_a_failure_ends_the_others(tmp_path):
    statuses, errors = end(start(tmp_path, 2, 0, 1, arguments=["60", "1"]))
    assert statuses == [1, 1]
    assert errors[1].endswith("ValueError: expected a test, got an error\n")
    assert errors[0].count("\n") == 1 and errors[0].startswith("process 0: process 1 on ")


CRASH = "import os, sys, threading, ctypes; from pathlib import Path; from infcl_jax.runtime import process_watch; "
CRASH += "process_watch.start(Path(sys.argv[1]), 1, 2, start_timeout=9, lost_process_timeout=9); "
CRASH += "os.write(2, b'native \\x1b[2J\\n@ 0x7f main\\n'); "


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("SIGSEGV", "t = threading.Thread(target=ctypes.CDLL(None).strlen, args=(None,)); t.start(); t.join()"),
        ("SIGBUS", f"os.kill(os.getpid(), {signal.SIGBUS})"),
        ("SIGABRT", "os.abort()"),
    ],
)
def test_a_crash_is_named(tmp_path, name, code):
    done = subprocess.run([sys.executable, "-c", CRASH + code, tmp_path], capture_output=True, text=True, cwd=runs.ROOT)
    log = tmp_path / "process-1.err"
    assert done.returncode == -getattr(signal, name)
    assert done.stderr == f"process 1: native code crashed ({name}): native \\x1b[2J; native log: {log}\n"
    assert "most recent call first" in log.read_text()  # the stack of Python


@pytest.mark.slow
def test_a_process_that_never_starts_is_named(tmp_path):
    (status,), (error,) = end(start(tmp_path, 2, 0, arguments=["3"]))
    assert status == RESUME
    assert error.startswith(f"process 0: expected 2 processes within 3 s, got fewer; without a start in {tmp_path}: ")
    assert error.count("\n") == 1 and ": process 1;" in error


def test_the_terminal_keeps_standard_error(tmp_path):
    code = (
        "import os, sys; from pathlib import Path; from infcl_jax.runtime.process_watch import _redirect_stderr as f; "
    )
    code = f"import logging; logging.basicConfig(format='%(message)s'); {code}"
    code += f"f(Path({str(tmp_path / 'log')!r})); os.write(2, b'native\\n'); print('python', file=sys.stderr); "
    code += "logging.warning('logged')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=runs.ROOT, check=True)
    assert (done.stderr, (tmp_path / "log").read_text()) == ("python\nlogged\n", "native\n")
