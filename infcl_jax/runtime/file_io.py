"""Safe access to local files that strangers may have written."""

import contextlib
import errno
import json
import os
import stat
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}
_LINK = "it is a symbolic link, through which nothing is written"
_JSON_NAMES: dict[Any, str] = {dict: "object", list: "array"}
CONFIG_BYTES = 16 * 2**20  # limit of a model's configuration; Python objects take up to 30 times their JSON
JSON_BYTES = 256 * 2**20  # no configuration, index or vocabulary is larger
LINES_BYTES = 2**30  # limit of a file of lines, some 3 million lines of metrics


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file for reading; links are followed.

    Raises:
      OSError: the file cannot be opened.
      ValueError: the path names something else, such as a FIFO or a device, whose reads may never end.
    """
    kind = stat.S_IFMT(os.stat(path).st_mode)  # before the file is opened, which has effects on devices
    if kind != stat.S_IFREG:
        raise ValueError(f"expected a regular file, got {_KINDS.get(kind, 'something else')} at {os.fspath(path)}")
    return open(path, "rb")


def read_regular(path: str | os.PathLike[str], limit: int, content: str = "data", *, tail: bool = False) -> bytes:
    """Read a regular file whose size is checked first.

    Args:
      path: local path; links are followed.
      limit: largest number of bytes.
      content: kind of content, for messages.
      tail: whether to read the last bytes of a larger file.

    Raises:
      OSError: the file cannot be read.
      ValueError: the path names something else than a regular file, or a file above the limit.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit and not tail:
            raise ValueError(f"expected at most {limit >> 20} MiB of {content} in {os.fspath(path)}, got more")
        file.seek(max(0, size - limit))
        return file.read(min(size, limit))


def open_writable(path: str | os.PathLike[str], flags: int, mode: int = 0o666) -> int:
    """Open a regular file for writing, and create it if missing.

    Folders on the way may be links. A link in place of the file is an `OSError`, as is a FIFO or a device. `flags` and
    `mode` are as in `os.open`.
    """
    flags |= os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a blocking open waits for a FIFO's reader
    try:
        descriptor = os.open(path, flags, mode)
    except OSError as error:
        if error.errno == errno.ELOOP and os.path.islink(path):
            raise OSError(errno.ELOOP, _LINK, os.fspath(path)) from error
        raise
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "it is no regular file", os.fspath(path))


def read_json(path: str | os.PathLike[str], kind: type = dict, limit: int = JSON_BYTES) -> Any:
    """Read a JSON file.

    Args:
      path: local path of a regular file.
      kind: Python type of the content.
      limit: largest size in bytes.

    Raises:
      OSError: the file cannot be read.
      ValueError: see `parse_json`.
    """
    return parse_json(read_regular(path, limit, "JSON"), path, kind)


def parse_json(text: bytes | str, name: str | os.PathLike[str], kind: type = dict) -> Any:
    """Parse JSON in UTF-8, with or without a byte order mark.

    Args:
      text: the JSON.
      name: its origin, for messages.
      kind: Python type of the content.

    Raises:
      ValueError: the text is damaged, nested too deeply, above 256 MiB, or of another type.
    """
    name = os.fspath(name)
    if len(text) > JSON_BYTES:
        raise ValueError(f"expected at most {JSON_BYTES >> 20} MiB of JSON in {name}, got more")
    try:
        content = json.loads(text.decode("utf-8-sig") if isinstance(text, bytes) else text)
    except RecursionError as error:
        raise ValueError(f"expected JSON in {name}, got one that is nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"expected JSON in {name}, got {error}") from error
    if not isinstance(content, kind):
        raise ValueError(f"expected a JSON {_JSON_NAMES[kind]} in {name}, got {type(content).__name__}")
    return content


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str], folder: str | os.PathLike[str] | None = None) -> Iterator[Path]:
    """Replace a file atomically.

    Yields the path of a new empty file with the same suffix. If the body succeeds, the new file gets the name `path`;
    otherwise it is removed. A link at `path` is replaced, not followed. `remove_unfinished` removes what a killed
    process leaves.

    Examples:
      >>> with replacing("runs/notes.txt") as temporary:
      ...     temporary.write_text("one line")
      8

    Args:
      path: file to replace.
      folder: folder of the new file, on the same file system; by default the folder of `path`.
    """
    path = Path(path)
    temporary = Path(path.parent if folder is None else folder, f".{path.stem}.{uuid.uuid4().hex}{path.suffix}")
    os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666))
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def replace_text(path: str | os.PathLike[str], text: str) -> None:
    """Replace a file atomically by text in UTF-8, see `replacing`."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def remove_unfinished(path: Path) -> None:
    """Remove the files that killed processes left in `replacing` of a path, whose stem may be a pattern of `glob`."""
    for file in path.parent.glob(f".{path.stem}.{'[0-9a-f]' * 32}{path.suffix}"):
        file.unlink(missing_ok=True)


def make_writable(folder: Path) -> Path:
    """Create a folder, and raise `OSError` unless files can be written to it."""
    folder.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=folder).close()
    return folder


def user_cache() -> Path:
    """Return the library's folder in `XDG_CACHE_HOME`, or else in `~/.cache`.

    A relative `XDG_CACHE_HOME` is ignored, as the XDG Base Directory Specification demands. The `~` is not expanded,
    since a user without a home directory has none.
    """
    caches = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (caches if caches.is_absolute() else Path("~/.cache")) / "infcl_jax"
