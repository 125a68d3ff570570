"""Work directory of a run: requirements, saved configuration and lock."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import fcntl
import json
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from infcl_jax.runtime.exit_codes import RESUME, Interrupted
from infcl_jax.runtime.file_io import make_writable, open_regular, open_writable, read_json, replace_text
from infcl_jax.runtime.printable import write_last_line
from infcl_jax.runtime.processes import is_lead

CONFIG_FILE = "config.json"
LOCK_FILE = ".lock"
BEAT = 5.0  # seconds between two heartbeats
STALE = 60.0  # seconds without heartbeat after which a process of another host counts as dead
_POLL = 0.5  # seconds between two attempts


def prepare_workdir(workdir: str | os.PathLike[str]) -> Path:
    """Create the directory of the run and check that it is writable.

    Examples:
      >>> prepare_workdir("runs/new").is_dir()
      True

    Raises:
      ValueError: the directory is not writable; the message gives the reason.
    """
    try:
        return make_writable(Path(workdir))
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ValueError(f"cannot write to workdir {workdir} ({reason}); choose another --workdir") from error


def save_config(workdir: Path, config: dict[str, Any]) -> None:
    """Write the configuration of a run to `workdir/config.json`.

    An atomic rename replaces an earlier file. `experiments.evaluate` reads the configuration from there.

    Examples:
      >>> save_config(prepare_workdir("runs/saved"), {"dataset": "digits"})
      >>> load_config("runs/saved")
      {'dataset': 'digits'}
    """
    replace_text(workdir / CONFIG_FILE, json.dumps(config, indent=2, sort_keys=True) + "\n")


def load_config(workdir: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the configuration that `save_config` wrote.

    Examples:
      >>> load_config("runs/digits")["model"]
      'tiny'

    Raises:
      FileNotFoundError: `workdir` contains no run.
      ValueError: the file is damaged.
    """
    try:
        return read_json(Path(workdir, CONFIG_FILE))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(
            f"no run in {workdir} ({CONFIG_FILE} is missing); train one with this --workdir first"
        ) from error
    except ValueError as error:
        raise ValueError(f"expected the configuration of a run in {workdir}: {error}; train again") from error


@dataclasses.dataclass(frozen=True)
class Holder:
    """Process that holds a lock."""

    host: str  # name
    boot: str  # ID of the boot of its host, which also tells hosts of the same name apart
    pid: int
    start: int  # in clock ticks since the boot; tells reused process IDs apart
    since: float  # Unix time at which it took the lock, in seconds
    job: str | None  # SLURM job ID

    @classmethod
    def own(cls) -> Holder:
        """Describe this process."""
        pid, job = os.getpid(), os.environ.get("SLURM_JOB_ID")
        return cls(socket.gethostname(), _boot_id(), pid, _start_time(pid), time.time(), job)

    def __str__(self) -> str:
        since = datetime.datetime.fromtimestamp(self.since, datetime.UTC)
        job = f" (SLURM job {self.job})" if self.job else ""
        return f"process {self.pid} on host {self.host}{job} since {since:%Y-%m-%d %H:%M:%S} UTC"


class WorkdirLock:
    """Exclusive lock of a work directory, held by the leading process.

    The file `.lock` names the holder, which locks it with `flock` and touches it every `BEAT` seconds. On the holder's
    host, `flock` decides, or the process ID on file systems without `flock`. For other hosts, whose `flock` may not
    reach this one, the heartbeat decides. A lock of a dead process is taken over.

    Examples:
      >>> with WorkdirLock(prepare_workdir("runs/locked")):
      ...     pass  # train

    Args:
      workdir: existing directory of the run.
      say: function that prints a line.
      wait: seconds to wait for another holder to end.
    """

    def __init__(
        self, workdir: str | os.PathLike[str], say: Callable[[str], None] = print, *, wait: float = STALE
    ) -> None:
        self._workdir, self._say, self._wait = Path(workdir), say, wait
        self._path = self._workdir / LOCK_FILE
        self._text = ""
        self._file = -1
        self._released = threading.Event()

    def __enter__(self) -> WorkdirLock:
        """Take the lock on the leading process; the others do nothing.

        Raises:
          Interrupted: another process holds the lock.
          PermissionError: the lock file belongs to another user.
        """
        if not is_lead():
            return self
        deadline, said = time.monotonic() + self._wait, False
        while (used := self._take()) is not None:
            line = f"workdir {self._workdir} is in use by {used}"
            if time.monotonic() >= deadline:
                raise Interrupted(f"{line}; wait for that run, end it, or choose another --workdir")
            if not said:
                self._say(f"{line}; waiting up to {self._wait:g} s")
                said = True
            time.sleep(_POLL)
        self._thread = threading.Thread(target=self._beat, name="workdir lock", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Release the lock.

        The empty file stays, because another process may be waiting for its `flock`.
        """
        if self._file < 0:
            return
        self._released.set()
        self._thread.join()
        try:
            if self._read() == self._text:
                os.ftruncate(self._file, 0)
        finally:
            os.close(self._file)
            self._file = -1

    def _take(self) -> str | None:
        """Take the lock, or return its holder and the age of its heartbeat."""
        try:
            file = open_writable(self._path, os.O_RDWR, 0o600)
        except PermissionError as error:
            try:
                owner = self._path.owner()
            except KeyError:  # the user has no name
                owner = f"user {self._path.stat().st_uid}"
            raise PermissionError(
                f"cannot lock workdir {self._workdir}: {self._path} belongs to {owner}; if that run has ended, delete "
                "the file, otherwise choose another --workdir"
            ) from error
        try:
            flocked = _flock(file)
            holder, age = _parse(_read(file)), self._age(file)
            if flocked is False or (holder is not None and _alive(holder, age, flocked)):
                return f"{holder or 'a process that is starting'}, heartbeat {age:.0f} s ago"
            if holder is not None:
                self._say(f"workdir {self._workdir}: released the lock of {holder}, which has ended")
            self._text = json.dumps(dataclasses.asdict(Holder.own())) + "\n"
            os.ftruncate(file, 0)
            os.pwrite(file, self._text.encode(), 0)
            os.fsync(file)
            self._file, file = file, -1
            return None
        finally:
            if file >= 0:
                os.close(file)

    def _age(self, file: int) -> float:
        """Return the seconds since the last heartbeat by the clock of the file system."""
        with tempfile.TemporaryFile(dir=self._workdir) as probe:
            probe.write(b"0")
            probe.flush()
            return max(0.0, os.fstat(probe.fileno()).st_mtime - os.fstat(file).st_mtime)

    def _read(self) -> str | None:
        """Return the content of the lock file; None if it cannot be read."""
        with contextlib.suppress(OSError, ValueError), open_regular(self._path) as file:
            return _read(file.fileno())
        return None

    def _beat(self) -> None:
        """Touch the file until the release.

        Ends this process if another one has taken the lock, because both would write the same files. A suspended
        process loses its lock, and two hosts may take a free one at once without a common `flock`.
        """
        while not self._released.wait(BEAT):
            text = self._read()
            if text is not None and text != self._text:
                taker = _parse(text) or "another process"
                write_last_line(f"workdir {self._workdir} was taken over by {taker}; ended this run")
                os._exit(RESUME)
            with contextlib.suppress(OSError):  # a file system that fails now may work at the next beat
                os.utime(self._file)


def _flock(file: int) -> bool | None:
    """Lock a file without waiting; None if the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if isinstance(error, BlockingIOError) else None
    return True


def _alive(holder: Holder, age: float, flocked: bool | None) -> bool:
    """Return whether a holder is alive, `age` seconds after its heartbeat, whose file is not locked by another."""
    if holder.boot != _boot_id():
        return age < STALE
    return flocked is None and _start_time(holder.pid) == holder.start


def _parse(text: str) -> Holder | None:
    """Read the holder from a lock file; None if it is empty or damaged."""
    try:
        values: Any = json.loads(text)
        holder = Holder(**values)
        str(holder)  # the time may be no time
    except (ValueError, TypeError, OverflowError, OSError, RecursionError):
        return None
    return holder if isinstance(holder.pid, int) else None


def _read(file: int) -> str:
    return os.pread(file, 1 << 16, 0).decode(errors="replace")


def _boot_id() -> str:
    """Return an ID of this boot of the host; the host's name outside Linux."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def _start_time(pid: int) -> int:
    """Return the start time of a process in clock ticks since the boot; -1 without it and outside Linux."""
    try:
        # Field 22 of proc_pid_stat(5); the name of the program before it may contain spaces.
        return int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19])
    except OSError:
        return -1
