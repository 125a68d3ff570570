"""One-line reports of lost and failed processes, for runs of several processes.

The coordination service of JAX detects a lost process by its missing heartbeats. A native thread of every other process
then logs the reason and raises SIGABRT. A handler of that signal prints the reason as one line and exits with `RESUME`.
If a collective aborts before that report, the handler waits for it.
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
from typing import Any, NoReturn

import jax

from infcl_jax.exit_codes import RESUME

LOGS = "logs"  # folder of the native logs, in the work directory

_FATAL = "JAX distributed service detected fatal errors"  # of xla/pjrt/distributed/client.h
_LOST = re.compile(r"unhealthy \(stopped sending heartbeats\):\s*\n(.*?)\nThe tasks have crashed", re.DOTALL)
_COLLECTIVE = re.compile(r"\b(Gloo|NCCL)\b")  # libraries of the collectives of CPUs and GPUs
_STARTED, _LEFT = "started at", "left"  # lines of a log
_FOLDER = "infcl_jax/process_watch"
_HOST, _FAILURE = f"{_FOLDER}/host", f"{_FOLDER}/failure"  # keys in the store of the coordination service
_POLL = 1.0  # seconds between two reads of `_FAILURE`
_GRACE = 2.0  # seconds in which a process that fails with the same error as another prints its own
_LEAD_LINGER = 3.0  # seconds for which process 0 outlives the others, which abort when its service ends
_SHUTDOWN = 10.0  # seconds that a failed process may take to close its files; it cannot synchronize with the others
_DETECTION = 15.0  # seconds after `lost_process_timeout` within which the coordination service reports a lost process

_watch: "ProcessWatch | None" = None  # of this process


class ProcessWatch:
    """Report processes of the run that are lost, fail or never start.

    File descriptor 2, to which native code writes, becomes the log. `sys.stderr` keeps the terminal.
    """

    def __init__(self, folder: Path, rank: int, count: int, *, start_timeout: int, lost_process_timeout: int) -> None:
        """Redirect native logs and install the SIGABRT handler.

        Args:
          folder: folder of the logs `process-RANK.err` of all processes, created if missing.
          rank: index of this process.
          count: number of processes.
          start_timeout: seconds until all processes must have started.
          lost_process_timeout: seconds without a heartbeat after which a process is lost.
        """
        self._folder, self._rank, self._count = folder, rank, count
        self._start_timeout, self._lost_process_timeout = start_timeout, lost_process_timeout
        self._hosts: dict[int, str] = {}
        self._failing = False
        self._leaving = threading.Lock()
        folder.mkdir(parents=True, exist_ok=True)
        self.log = _log_path(folder, rank)
        self._started = time.time()
        self._log_start = self.log.stat().st_size if self.log.exists() else 0
        self._terminal = _redirect_stderr(self.log)
        self._note(f"process {rank} of {count} on {socket.gethostname()} {_STARTED} {self._started:.0f}")
        self._handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(self._on_abort)  # ctypes keeps no reference
        ctypes.CDLL(None).signal(signal.SIGABRT, self._handler)

    def joined(self, client: Any) -> None:
        """Exchange host names and start to watch for failures, once `jax.distributed` is initialized.

        Args:
          client: client of the coordination service.
        """
        self._client = client
        self._client.key_value_set(f"{_HOST}/{self._rank}", socket.gethostname())
        self._client.wait_at_barrier(_HOST, self._start_timeout * 1000)
        pairs = self._client.key_value_dir_get(f"{_HOST}/")
        self._hosts = {int(key.rsplit("/", 1)[1]): host for key, host in pairs}
        threading.Thread(target=self._watch_failures, daemon=True).start()

    def fail(self, error: Exception) -> None:
        """Tell the other processes that this one fails, and end it after `_SHUTDOWN` seconds.

        An error of JAX can be a collective that failed because a process is lost. Then this waits for the coordination
        service to report it, which ends this process.
        """
        if self._failing:
            return
        if _is_collective(error):
            self._await_report()
        self._failing = True
        message = " ".join(str(error).split())[:1000] or type(error).__name__
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # another process has failed too
            self._client.key_value_set(_FAILURE, f"{self._rank} {message}")
        timer = threading.Timer(_SHUTDOWN, os._exit, (1,))
        timer.daemon = True
        timer.start()

    def _watch_failures(self) -> None:
        while True:
            time.sleep(_POLL)
            try:
                rank, _, message = self._client.key_value_try_get(_FAILURE).partition(" ")
            except jax.errors.JaxRuntimeError:  # no failure, or no service, whose loss aborts the process
                continue
            time.sleep(_GRACE)
            if self._failing:
                return
            self._leave(f"{self._named([int(rank)])} failed: {message}", status=1)

    def _on_abort(self, signum: int) -> None:
        """Report the reason of an abort and exit. A return lets the abort continue."""
        if self._failing:  # the others have left
            os._exit(1)
        log = self._native_log()
        if (reason := self._reason(log)) is not None:
            self._leave(f"{reason}; the same command resumes the run; native logs: {self.log}", RESUME)
        with self.log.open("a") as file:
            faulthandler.dump_traceback(file)
        if self._hosts:  # all processes have joined, so a lost one may be the cause
            self._await_report()
        with self._leaving:
            self._say(f"native code aborted: {_last_line(log)}; native log: {self.log}")

    def _await_report(self) -> None:
        """Wait as long as the coordination service may take to report a lost process, which ends this process."""
        time.sleep(self._lost_process_timeout + _DETECTION)

    def _native_log(self) -> str:
        """Return what this process has written to its log."""
        with self.log.open(errors="replace") as file:
            file.seek(self._log_start)
            return file.read()

    def _reason(self, log: str) -> str | None:
        """Return why the coordination service aborts this process; None for other aborts."""
        if _FATAL not in log:
            return None
        status = log[log.index(_FATAL) :]
        if "RegisterTask" in status:
            late = [rank for rank in range(self._count) if not self._has_started(rank)]
            missing = f"without a start in {self._folder}: {_ranks(late)}" if late else "see the other processes"
            return f"expected {self._count} processes within {self._start_timeout} s, got fewer; {missing}"
        match = _LOST.search(status)
        # Every error but a report of the service means that the service, which is in process 0, does not answer.
        lost = [int(rank) for rank in re.findall(r"(\d+)\s*$", match[1], re.MULTILINE)] if match else [0]
        return f"lost {self._named(lost)}"

    def _has_started(self, rank: int) -> bool:
        """Return whether a process has joined this start of the run."""
        try:
            lines = _log_path(self._folder, rank).read_text(errors="replace").splitlines()
        except OSError:
            return False
        notes = [line for line in lines if line.startswith(f"process {rank} ")]
        if not notes or _STARTED not in notes[-1]:
            return False
        return float(notes[-1].rsplit(" ", 1)[1]) >= self._started - self._start_timeout

    def _named(self, ranks: list[int]) -> str:
        """Name processes with their hosts."""
        return ", ".join(f"process {rank} on {self._hosts.get(rank, 'an unknown host')}" for rank in ranks)

    def _leave(self, reason: str, status: int) -> NoReturn:
        with self._leaving:
            self._exit(reason, status)

    def _exit(self, reason: str, status: int) -> NoReturn:
        """Print the reason and exit without synchronizing with other processes."""
        self._say(f"{reason}; exit status {status}")
        self._note(f"process {self._rank} {_LEFT}: {reason}")
        if self._rank == 0:
            time.sleep(_LEAD_LINGER)
        os._exit(status)

    def _say(self, line: str) -> None:
        """Print a line in one write, which other processes cannot interrupt."""
        os.write(self._terminal, f"process {self._rank}: {line}\n".encode())

    def _note(self, line: str) -> None:
        with contextlib.suppress(OSError), self.log.open("a") as file:
            file.write(f"{line}\n")


def start(folder: Path, rank: int, count: int, **timeouts: int) -> ProcessWatch:
    """Create the watch of this process, see `ProcessWatch`."""
    global _watch
    _watch = ProcessWatch(folder, rank, count, **timeouts)
    return _watch


@contextlib.contextmanager
def failures() -> Iterator[None]:
    """Report errors of the body to the other processes, which then exit.

    Without a watch this does nothing.
    """
    try:
        yield
    except Exception as error:
        if _watch is not None:
            _watch.fail(error)
        raise


def _is_collective(error: BaseException | None) -> bool:
    """Return whether an error or a cause of it can come from a collective.

    JAX raises some of them as `ValueError`.
    """
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
    with log.open("a") as file:
        os.dup2(file.fileno(), 2)
    sys.stderr = os.fdopen(terminal, "w", buffering=1, errors="backslashreplace", closefd=False)
    for handler in logging.getLogger().handlers:
        for target in (handler, getattr(handler, "python_handler", None)):  # absl wraps the handler that writes
            if isinstance(target, logging.StreamHandler) and target.stream is former:
                target.setStream(sys.stderr)
    return terminal


def _last_line(log: str) -> str:
    """Return the last line that is not of a stack, its first 1,000 characters."""
    lines = [line.strip() for line in log.splitlines()]
    return next(line[:1000] for line in reversed(lines) if line and not line.startswith(("@", "***")))


def _log_path(folder: Path, rank: int) -> Path:
    return folder / f"process-{rank}.err"


def _ranks(ranks: list[int]) -> str:
    """Name processes, at most ten of them."""
    more = f" and {len(ranks) - 10} more" if len(ranks) > 10 else ""
    return f"process {', '.join(map(str, ranks[:10]))}{more}"
