"""One-line reports of lost and failed processes, for runs of several processes.

The coordination service of JAX detects a lost process by its missing heartbeats. A native thread of every other process
then logs the reason and raises SIGABRT. A handler of that signal prints the reason as one line and exits with `RESUME`.
If a collective aborts before that report, the handler waits for it. It also names other crashes of native code.
JAX accepts a Python callback for this event, but calls it with a type that Python cannot convert, which aborts too.
"""

import contextlib
import ctypes
import faulthandler
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn, TextIO

import jax

from infcl_jax.runtime.exit_codes import RESUME, Interrupted
from infcl_jax.runtime.file_io import open_regular, open_writable
from infcl_jax.runtime.printable import one_line, printable, write_last_line
from infcl_jax.runtime.processes import Channel

LOGS = "logs"  # folder of the native logs, in the work directory

_FATAL = "JAX distributed service detected fatal errors"  # of xla/pjrt/distributed/client.h
_LOST = re.compile(r"unhealthy \(stopped sending heartbeats\):\s*\n(.*?)\nThe tasks have crashed", re.DOTALL)
_COLLECTIVE = re.compile(r"\b(Gloo|NCCL)\b")  # libraries of the collectives of CPUs and GPUs
_STARTED, _LEFT, _FAILED, _CRASHED = "started at", "left", "failed", "crashed"  # words of the lines of a log
_CRASHES = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
_FAILURE = "failure"  # topic of the channel
_POLL = 1.0  # seconds between two looks for failures
_GRACE = 2.0  # seconds in which a process that fails with the same error as another prints its own
_LEAD_LINGER = 3.0  # seconds for which process 0 outlives the others, which abort when its service ends
_SHUTDOWN = 10.0  # seconds that a failed process may take to close its files; it cannot synchronize with the others
DETECTION = 15.0  # seconds after `lost_process_timeout` within which the coordination service reports a lost process

_watch: "ProcessWatch | None" = None  # of this process


class ProcessWatch:
    """Report processes of the run that are lost, fail or never start.

    File descriptor 2, to which native code writes, becomes the log. `sys.stderr` keeps the terminal.
    """

    def __init__(self, folder: Path, rank: int, count: int, *, start_timeout: int, lost_process_timeout: int) -> None:
        self.folder, self._rank, self._count = folder, rank, count
        self._start_timeout, self._lost_process_timeout = start_timeout, lost_process_timeout
        self._channel: Channel | None = None  # once all processes have joined
        self._hosts: dict[int, str] = {}
        self._failing, self._status = False, 1
        self._leaving = threading.Lock()
        folder.mkdir(parents=True, exist_ok=True)
        self.log = self._log_of(rank)
        self._started = time.time()
        self._log_start = self.log.stat().st_size if self.log.exists() else 0
        self._terminal = _redirect_stderr(self.log)
        self._lead = self._notes(0) if rank == 0 else None  # of the former process 0 in this folder
        self._note(f"process {rank} of {count} on {socket.gethostname()} {_STARTED} {self._started:.0f}")
        self._handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(self._on_crash)  # ctypes keeps no reference
        self._libc = ctypes.CDLL(None)
        for number in _CRASHES:
            self._libc.signal(number, self._handler)

    def joined(self, channel: Channel) -> None:
        """Exchange host names and start to watch for failures, once `jax.distributed` is initialized."""
        self._channel = channel
        self._hosts = dict(enumerate(channel.gather(socket.gethostname(), self._start_timeout)))
        threading.Thread(target=self._watch_failures, args=(channel,), daemon=True).start()

    def fail(self, error: Exception | Interrupted) -> None:
        """Tell the other processes that this one fails, and end it after `_SHUTDOWN` seconds.

        All end with status 1, or with the status of `Interrupted`. An error of JAX can be a collective that failed
        because a process is lost. Then this waits for the coordination service to report it, which ends this process.
        """
        if self._failing:
            return
        if self._channel is not None and _is_collective(error):
            self._await_report()
        self._failing, self._status = True, RESUME if isinstance(error, Interrupted) else 1
        message = one_line(error)[:1000] or type(error).__name__
        if self._status != RESUME:  # a run that is to be resumed may start while this process still uses the port
            self._note(f"process {self._rank} {_LEFT}: {_FAILED}: {message}")
        if self._channel is not None:
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # process 0 has left
                if not self._channel.received(_FAILURE):  # the first failure is the cause of the others
                    self._channel.send(_FAILURE, f"{self._status} {message}")
        timer = threading.Timer(_SHUTDOWN, os._exit, (self._status,))
        timer.daemon = True
        timer.start()

    def _watch_failures(self, channel: Channel) -> None:
        failures: dict[int, str] = {}
        while not failures:
            time.sleep(_POLL)
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # no service, whose loss aborts the process
                failures = channel.received(_FAILURE)
        time.sleep(_GRACE)
        if not self._failing:
            rank, text = next(iter(failures.items()))
            status, message = text.split(" ", 1)
            self._leave(f"{self._named([rank])} failed: {message}", int(status))

    def lead_may_run(self) -> bool:
        """Return whether the log of process 0 lacks its end."""
        notes = self._notes(0) if self._lead is None else self._lead
        return bool(notes) and _STARTED in notes[-1]

    def leave_incomplete(self) -> NoReturn:
        """End this process because other processes are missing."""
        self._leave_for(self._incomplete())

    def _on_crash(self, signum: int) -> None:
        """Report a crash, or the reason of the coordination service for SIGABRT."""
        if self._failing:  # the others have left
            os._exit(self._status)
        if signum != signal.SIGABRT:  # a fault in this handler ends the process
            self._libc.signal(signum, None)
        with open_regular(self.log) as file:
            file.seek(self._log_start)  # of this process
            log = file.read().decode(errors="replace")
        if signum == signal.SIGABRT and (reason := self._reason(log)) is not None:
            self._leave_for(reason)
        with contextlib.suppress(OSError), self._open_log() as file:
            faulthandler.dump_traceback(file)
        if signum == signal.SIGABRT and self._hosts:  # all processes have joined, so a lost one may be the cause
            self._await_report()
        with self._leaving:
            cause = f"{_CRASHED} ({signal.Signals(signum).name})"
            line = _last_line(log)
            self._say(f"native code {cause}: {line}; native log: {self.log}")
            self._note(f"process {self._rank} {_LEFT}: {cause}: {line}")
            self._libc.signal(signum, None)
            os.kill(os.getpid(), signum)  # the status says which signal

    def _await_report(self) -> None:
        """Wait as long as the coordination service may take to report a lost process, which ends this process."""
        time.sleep(self._lost_process_timeout + DETECTION)

    def _reason(self, log: str) -> str | None:
        """Return why the coordination service aborts this process; None for other aborts."""
        if _FATAL not in log:
            return None
        status = log[log.index(_FATAL) :]
        if "RegisterTask" in status:
            return self._incomplete()
        match = _LOST.search(status)
        # Every error but a report of the service means that the service, which is in process 0, does not answer.
        lost = [int(rank) for rank in re.findall(r"(\d+)\s*$", match[1], re.MULTILINE)] if match else [0]
        return f"lost {self._named(lost)}"

    def _incomplete(self) -> str:
        """Name the processes that have not started, and those that have failed since."""
        late, failed = [], []
        for rank in range(self._count):
            notes = self._notes(rank)
            starts = re.findall(rf"{_STARTED} (\d{{1,12}})$", "\n".join(notes), re.MULTILINE)
            fresh = bool(starts) and int(starts[-1]) >= self._started - self._start_timeout
            if fresh and _is_failure(notes[-1]):
                failed.append(notes[-1])
            elif not fresh or _STARTED not in notes[-1]:
                late.append(str(rank))
        more = f" and {len(late) - 10} more" if len(late) > 10 else ""
        missing = [f"without a start in {self.folder}: process {', '.join(late[:10])}{more}"] if late else []
        reasons = "; ".join(missing + failed[:3]) or "see the other processes"
        return f"expected {self._count} processes within {self._start_timeout} s, got fewer; {reasons}"

    def _notes(self, rank: int) -> list[str]:
        """Return the lines of the watch in the log of a process."""
        try:
            with open_regular(self._log_of(rank)) as file:
                lines = file.read().decode(errors="replace").splitlines()
        except (OSError, ValueError):
            return []
        return [line for line in lines if line.startswith(f"process {rank} ")]

    def _log_of(self, rank: int) -> Path:
        return self.folder / f"process-{rank}.err"

    def _named(self, ranks: list[int]) -> str:
        """Name processes with their hosts."""
        return ", ".join(f"process {rank} on {self._hosts.get(rank, 'an unknown host')}" for rank in ranks)

    def _leave_for(self, reason: str) -> NoReturn:
        """End this process because others are lost or missing."""
        if _is_failure(reason):
            self._leave(reason, status=1)
        self._leave(f"{reason}; the same command resumes the run; native logs: {self.log}", RESUME)

    def _leave(self, reason: str, status: int) -> NoReturn:
        """Print the reason and exit without synchronizing with other processes."""
        with self._leaving:
            self._say(f"{reason}; exit status {status}")
            if self._rank == 0:
                time.sleep(_LEAD_LINGER)
            # Last, since its absence says that the port is in use.
            self._note(f"process {self._rank} {_LEFT}: {reason}")
            os._exit(status)

    def _say(self, line: str) -> None:
        """Print a line in one write, which other processes cannot interrupt."""
        write_last_line(f"process {self._rank}: {line}", self._terminal)

    def _note(self, line: str) -> None:
        with contextlib.suppress(OSError), self._open_log() as file:
            file.write(f"{printable(line)}\n")

    def _open_log(self) -> TextIO:
        return open(open_writable(self.log, os.O_WRONLY | os.O_APPEND), "a")


def start(folder: Path, rank: int, count: int, **timeouts: int) -> ProcessWatch:
    """Create the watch of this process."""
    global _watch
    _watch = ProcessWatch(folder, rank, count, **timeouts)
    return _watch


@contextlib.contextmanager
def failures() -> Iterator[None]:
    """Report errors of the body to the other processes, which then exit."""
    try:
        yield
    except Exception as error:
        fail(error)
        raise


def fail(error: Exception | Interrupted) -> None:
    """Report an error to the other processes, which then exit, see `ProcessWatch.fail`."""
    if _watch is not None:
        _watch.fail(error)


def _is_collective(error: BaseException | None) -> bool:
    """Return whether an error or a cause of it can come from a collective; JAX raises some as `ValueError`."""
    while error is not None:
        if isinstance(error, jax.errors.JaxRuntimeError) or _COLLECTIVE.search(str(error)):
            return "RESOURCE_EXHAUSTED" not in str(error)
        error = error.__cause__ or error.__context__
    return False


def _redirect_stderr(log: Path) -> int:
    """Redirect file descriptor 2 to a log.

    `sys.stderr` and the handlers of the root logger then write to a copy of the old descriptor, which is returned.
    """
    former = sys.stderr
    former.flush()
    terminal = os.dup(2)
    descriptor = open_writable(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stderr = os.fdopen(terminal, "w", buffering=1, errors="backslashreplace", closefd=False)
    for handler in logging.getLogger().handlers:
        for target in (handler, getattr(handler, "python_handler", None)):  # absl wraps the handler that writes
            if isinstance(target, logging.StreamHandler) and target.stream is former:
                target.setStream(sys.stderr)
    return terminal


def _last_line(log: str) -> str:
    """Return the last native line outside of stacks, at most 1,000 characters."""
    lines = [line.strip() for line in log.splitlines()]
    native = (line[:1000] for line in reversed(lines) if line and not re.match(r"@|\*\*\*|process \d+ ", line))
    return next(native, "no native message")


def _is_failure(reason: str) -> bool:
    """Return whether a line names a process that failed or crashed."""
    return re.search(rf"\b{_LEFT}: ({_FAILED}|{_CRASHED})\b", reason) is not None
