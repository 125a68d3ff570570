"""Output files of a run that survive faults of the disk."""

from __future__ import annotations

import collections
import contextlib
import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path

from infcl_jax.runtime.file_io import LINES_BYTES, open_writable, read_regular
from infcl_jax.runtime.printable import printable

# Bytes of lines that wait in memory, some 50,000 lines of metrics.
_WAITING_BYTES = 16 * 2**20

_REASONS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is exceeded",
    errno.EFBIG: "the file size limit is exceeded",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "permission denied",
    errno.EPERM: "permission denied",
    errno.ENOENT: "the folder was removed",
    errno.ESTALE: "the folder was removed",
}

printers: list[Callable[..., None]] = []  # the last one prints the lines of `print_line`, in any thread


def reason(error: OSError) -> str:
    """Name the cause of a write error in a few words."""
    return _REASONS.get(error.errno or 0) or error.strerror or " ".join(str(error).split()) or type(error).__name__


def print_line(*lines: str) -> None:
    """Print lines on the console of the run, or else on stdout.

    Control characters are escaped, so that no name of a file or dataset moves the cursor or forges a line.
    """
    if printers:
        printers[-1](*lines)
    else:
        write_stdout("".join(f"{printable(line)}\n" for line in lines))


def write_stdout(text: str) -> None:
    """Write and flush text.

    An unwritable stdout is no error. A job's stdout is often a file on the disk of the work directory. Python retries
    what it could not flush.
    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError:
        if sys.stdout.closed:
            raise


class Outputs:
    """Writes that are repeated when they fail.

    A failed write prints one line for each file and reason. It is repeated by `retry`, and replaced by the next write
    of the same file.

    Examples:
      >>> outputs = Outputs(say=lambda line: None)
      >>> outputs.attempt("missing/notes.txt", lambda: open("missing/notes.txt", "w"))  # whether it succeeded
      False
      >>> outputs.retry()
      >>> sum(outputs.failures.values())
      2

    Attributes:
      failures: number of failed attempts by file.

    Args:
      say: function that prints a line.
    """

    def __init__(self, say: Callable[[str], None] = print_line) -> None:
        self.failures: collections.Counter[str] = collections.Counter()
        self.say = say
        self._said: set[tuple[str, str]] = set()
        self._waiting: dict[str, tuple[Callable[[], object], str]] = {}  # write and reason by file

    def attempt(self, path: str | os.PathLike[str], write: Callable[[], object]) -> bool:
        """Call `write()`, and again in `retry` if it fails.

        Args:
          path: file that it writes.
          write: function that raises `OSError` if it fails, and can be repeated.

        Returns:
          Whether it succeeded.
        """
        name = os.fspath(path)
        try:
            write()
        except OSError as error:
            why = reason(error)
            self.failures[name] += 1
            self._waiting[name] = write, why
            if (name, why) not in self._said:
                self._said.add((name, why))
                self.say(f"warning: cannot write {name}: {why}; the run continues and tries again")
            return False
        if self._waiting.pop(name, None):
            self.say(f"{name}: written after {self.failures[name]} failed attempts")
        return True

    def retry(self) -> None:
        """Repeat the failed writes."""
        for name, (write, _) in list(self._waiting.items()):
            self.attempt(name, write)

    def summary(self) -> str:
        """Name the files that are not written, in one line; "" if all are."""
        files = ", ".join(f"{name} ({why})" for name, (_, why) in self._waiting.items())
        return files and f"not written: {files}"


class AppendFile:
    """File to which records are appended whole.

    Records that cannot be written wait in memory, at most 16 MiB of them, and are written before the next one. The
    oldest are dropped beyond that. A removed folder is created again. A link in place of the file is not followed.

    Attributes:
      dropped: number of dropped records.

    Args:
      path: file, created with its folder if missing.
      outputs: handling of errors.
      keep: bytes of an existing file to keep; None: all.
      header: first bytes of a new file.
    """

    def __init__(
        self, path: str | os.PathLike[str], outputs: Outputs, *, keep: int | None = None, header: bytes = b""
    ) -> None:
        self.dropped = 0
        self._path, self._outputs, self._header = Path(path), outputs, header
        self._records: collections.deque[bytes] = collections.deque()
        self._bytes = 0  # of the records in memory
        self._size = sys.maxsize if keep is None else keep  # bytes of whole records in the file
        self._inode: tuple[int, int] | None = None  # device and inode of the file with that size
        self._torn = False  # the file may end with a part of a record
        self._recreated = False  # the file was removed and is new
        self._flush()

    def write(self, record: bytes) -> None:
        """Append a record, after those that wait in memory."""
        self._records.append(record)
        self._bytes += len(record)
        while self._bytes > _WAITING_BYTES and len(self._records) > 1:
            self._bytes -= len(self._records.popleft())
            self.dropped += 1
        self._flush()

    def close(self) -> None:
        """Write the records in memory."""
        if self._records:
            self._flush()
        if self.dropped:
            self._outputs.say(
                f"warning: {self._path}: dropped the {self.dropped} oldest records, which did not fit memory"
            )
            self.dropped = 0

    def _flush(self) -> None:
        self._outputs.attempt(self._path, self._append)
        if self._recreated:  # said after the write, because the line may be a record of this very file
            self._recreated = False
            self._outputs.say(f"warning: {self._path} was removed; it is created again, without old records")

    def _append(self) -> None:
        """Write the records in memory, whole or not at all."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = open_writable(self._path, os.O_WRONLY | os.O_APPEND)
        try:
            status = os.fstat(descriptor)
            self._size = self._whole_size(status)
            self._inode, self._torn = (status.st_dev, status.st_ino), True
            if self._size < status.st_size:
                os.ftruncate(descriptor, self._size)
            data = memoryview(b"".join(([] if self._size else [self._header]) + [*self._records]))
            written = 0
            try:
                while written < len(data):  # on a nearly full disk, `os.write` may write fewer bytes
                    written += os.write(descriptor, data[written:])
            except OSError:
                with contextlib.suppress(OSError):  # else the next attempt cuts it
                    os.ftruncate(descriptor, self._size)
                raise
        finally:
            os.close(descriptor)  # network file systems report a full disk here
        self._size, self._torn = self._size + len(data), False
        self._records.clear()
        self._bytes = 0

    def _whole_size(self, status: os.stat_result) -> int:
        """Return the bytes of the file without a record that failed."""
        if self._inode is None:
            return min(self._size, status.st_size)
        # Another file, or back after its disk was away. A new file can have the inode of a removed one.
        if self._inode != (status.st_dev, status.st_ino) or status.st_size < self._size:
            self._recreated = status.st_size == 0
            return status.st_size
        return self._size if self._torn else status.st_size


def lines_until(path: Path, step: int | None, step_of: Callable[[bytes], int]) -> list[bytes]:
    """Read the whole lines of a file up to a step, which a resumed run keeps.

    A missing file has none. With `step` None, all are kept. `step_of` returns the step of a line; an error that it
    raises for a damaged line ends the lines.
    """
    lines = []
    for line in read_regular(path, LINES_BYTES).splitlines(keepends=True) if path.is_file() else ():
        try:
            number = step_of(line)
        except (ValueError, KeyError, TypeError, RecursionError):
            break
        if not line.endswith(b"\n") or (step is not None and number > step):
            break
        lines.append(line)
    return lines
