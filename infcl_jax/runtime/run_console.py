"""Console of a run: timestamped lines, a live line, and the log file."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from infcl_jax.runtime.console import LiveLine, live_line
from infcl_jax.runtime.outputs import AppendFile, Outputs, printers, write_stdout
from infcl_jax.runtime.printable import printable

LOG_FILE = "run.log"

_LIVE_SECONDS = 0.2  # least time between two updates of the live line, which a terminal over SSH can follow
_TICK_SECONDS = 1.0  # of the seconds on the live line
_LONG_SECONDS = 10.0  # after which a plain log says what the run does


@dataclasses.dataclass
class _Reminder:
    """Line about what takes long, due again each time its seconds have doubled."""

    since: float  # clock at the start, in seconds
    after: float  # seconds until the line is due
    line: Callable[[float], str]  # from the seconds since the start

    def due(self, now: float) -> str | None:
        """Return the line if it is due."""
        if (seconds := now - self.since) < self.after:
            return None
        self.after *= 2
        return self.line(seconds)


class RunConsole:
    """Timestamped lines on stdout and in `workdir/run.log`.

    Inside the context, it prints the lines of `infcl_jax.runtime.outputs.print_line`. In a terminal and in a notebook
    the last line is live: `progress` replaces it. Elsewhere `progress` prints a line only if it is due. The log file
    has the due lines in every case, and the warnings of the package's loggers, which go to stderr. What takes more than
    ten seconds, such as the start on a large dataset, is named in a line of its own.

    Examples:
      >>> with RunConsole() as console:
      ...     with console.busy("compiling the training step"):
      ...         compiled = jax.jit(clip_loss).lower(image, text, 14.3).compile()

    Attributes:
      start: Unix time at which the console was created, in seconds.

    Args:
      lead: whether this process shows its progress and has a log file; all processes print lines.
      live: live line; None: the one of the terminal or notebook, if there is one.
      clock: monotonic clock, in seconds.
    """

    def __init__(
        self, *, lead: bool = True, live: LiveLine | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.start = time.time()
        self._lead, self._clock = lead, clock
        self._live = (live or live_line()) if lead else None
        self._lock = threading.RLock()  # watchdogs print from their threads
        self._log: AppendFile | None = None
        self._early: list[bytes] = []  # lines before the log file is open
        self._text = ""  # of the live line
        self._busy: Callable[[], str] | None = None  # text of the live line, instead of the progress
        self._updated = -float("inf")
        self._doing: _Reminder | None = None  # of what the run does
        self._reminders: list[_Reminder] = []
        self._contexts = contextlib.ExitStack()

    @property
    def seconds(self) -> float:
        """Seconds since the console was created."""
        return time.time() - self.start

    def open_log(self, workdir: str | os.PathLike[str], outputs: Outputs) -> None:
        """Append all lines to `workdir/run.log`, with those printed so far; once open, this does nothing.

        Args:
          workdir: directory of the run, whose lock this process holds.
          outputs: handling of write errors.
        """
        if not self._lead or self._log is not None:
            return
        with self._lock:
            early = [
                _log_record(f"started on {socket.gethostname()}, process {os.getpid()}", when=self.start),
                *self._early,
            ]
            self._log = AppendFile(Path(workdir, LOG_FILE), outputs)
            self._log.write(b"".join(early))
            self._early = []

    def print(self, *lines: str) -> None:
        """Print lines, with escaped control characters."""
        with self._lock:
            self._show(*lines)
            self._write(*lines)

    def progress(self, fields: Sequence[str], *, due: bool) -> None:
        """Show the progress.

        Args:
          fields: parts of the line, the most important first; the live line leaves out those that do not fit.
          due: whether a plain log gets the line.
        """
        if not self._lead:
            return
        line = "  ".join(fields)
        with self._lock:
            if due:
                self._write(line)
            if self._live is None:
                if due:
                    self._show(line)
            elif due or self._clock() - self._updated >= _LIVE_SECONDS:
                self._replace(self._live.fit([f"{_time_of_day()}  {fields[0]}", *fields[1:]]))

    def doing(self, what: str | None) -> None:
        """Name what the run does from now on, for a line if it takes long.

        Args:
          what: phrase such as "reading the dataset"; None: train.
        """
        self._doing = None
        if what is not None:
            self._doing = _Reminder(self._clock(), _LONG_SECONDS, lambda s: f"{what} ... {s:.0f} s so far")

    @contextlib.contextmanager
    def reminder(self, after: float, line: Callable[[float], str]) -> Iterator[None]:
        """Print a line while the body takes long, and again each time its seconds have doubled.

        Args:
          after: seconds until the first line.
          line: function from the seconds of the body to the line, called in a thread.
        """
        reminder = _Reminder(self._clock(), after, line)
        self._reminders.append(reminder)
        try:
            yield
        finally:
            self._reminders.remove(reminder)

    def tick(self) -> None:
        """Update the live line, and print the lines about what takes long that are due."""
        now, doing = self._clock(), self._doing
        if self._lead and doing is not None and (line := doing.due(now)):
            with self._lock:
                self._write(line)
                if not self._text:  # the live line has the seconds
                    self._show(line)
        for reminder in tuple(self._reminders):
            if line := reminder.due(now):
                self.print(line)
        self._show_busy()

    def keep(self) -> None:
        """Keep the live line as it is; the next one starts below."""
        with self._lock:
            if self._live is not None and self._text:
                self._live.end()
                self._text = ""

    @contextlib.contextmanager
    def busy(self, what: str, *, announced: bool = False) -> Iterator[None]:
        """Show what the run does, with its seconds on the live line.

        Args:
          what: phrase such as "compiling the training step".
          announced: whether a plain log gets a line at the start and one at the end.
        """
        start, before = self._clock(), self._doing
        self.doing(what)

        def text() -> str:
            return f"{what} ... {self._clock() - start:.0f} s"

        if announced:
            self.progress([f"{what} ..."], due=True)
        else:
            self.keep()
        self._busy = text
        self._show_busy()  # in this thread, to which a notebook assigns the output
        try:
            yield
        finally:
            with self._lock:
                self._busy = None
                if self._live is not None:
                    self._replace("")
            self._doing = before
        if announced:
            self.progress([text()], due=True)
            self.keep()

    def _show_busy(self) -> None:
        """Show what the run does on the live line."""
        with self._lock:
            if self._live is not None and self._busy is not None:
                self._replace(self._live.fit([f"{_time_of_day()}  {self._busy()}"]))

    def __enter__(self) -> Self:
        """Print the lines of `print_line`, and log the warnings of the package's loggers."""
        printers.append(self.print)
        self._contexts.callback(printers.remove, self.print)
        handler = _Warnings(self)
        logger = logging.getLogger("infcl_jax")
        logger.addHandler(handler)
        self._contexts.callback(logger.removeHandler, handler)
        stopped = threading.Event()

        def tick() -> None:
            while not stopped.wait(_TICK_SECONDS):
                self.tick()

        threading.Thread(target=tick, name="console", daemon=True).start()
        self._contexts.callback(stopped.set)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Log the error, which the caller prints, and close the log file."""
        self._contexts.close()
        self.keep()
        with self._lock:
            if error is not None:
                self._write(" ".join(f"{type(error).__name__}: {error}".split()))
            if self._log is not None:
                self._log.close()
                self._log = None

    def log(self, line: str) -> None:
        """Log a line that is about to be printed on stderr."""
        with self._lock:
            self.keep()
            self._write(line)

    def _show(self, *lines: str) -> None:
        """Print lines above the live line."""
        first, *rest = map(printable, lines)
        text = "\n".join([f"{_time_of_day()}  {first}", *(f"{'':10}{row}" for row in rest)])
        if self._live is None:
            write_stdout(f"{text}\n")
        else:
            self._live.above(text, self._text)

    def _replace(self, text: str) -> None:
        """Replace the live line."""
        self._text, self._updated = text, self._clock()
        self._live.replace(text)

    def _write(self, *lines: str) -> None:
        """Append lines to the log file."""
        if self._log is not None:
            self._log.write(_log_record(*lines))
        elif self._lead:
            self._early.append(_log_record(*lines))


class _Warnings(logging.Handler):
    """Log the warnings of the package's loggers, which other handlers print on stderr."""

    def __init__(self, console: RunConsole) -> None:
        super().__init__(logging.WARNING)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        """Log a warning."""
        try:
            self._console.log(f"{record.levelname.lower()}: {record.getMessage()}")
        except Exception:
            self.handleError(record)
        if not logging.root.handlers and logging.lastResort is not None:  # which a logger with a handler never reaches
            logging.lastResort.handle(record)


def _time_of_day() -> str:
    return time.strftime("%H:%M:%S")


def _log_record(*lines: str, when: float | None = None) -> bytes:
    """Format lines of the log file, with date and offset from UTC."""
    stamp = time.strftime("%Y-%m-%d %H:%M:%S%z", time.localtime(when))
    first, *rest = map(printable, lines)
    return "\n".join([f"{stamp}  {first}", *(f"{'':26}{row}" for row in rest), ""]).encode()
