"""Files of datasets: patterns, and reads of byte ranges that survive pickling and forking."""

import functools
import glob
import os
import re
import stat
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from infcl_jax.runtime.file_io import open_regular, parse_json

LARGEST_IMAGE = 2**30  # bytes of an image file: the default of max_image_pixels at 8 bytes a pixel, and a quarter more
LARGEST_TEXT = 2**28  # bytes of a file of class names, templates or JSON
_MAX_FILES = 2**20  # of a pattern with braces
_MAX_CHARACTERS = 2**28  # of these files together
_MAX_PATTERN, _MAX_BRACES = 4096, 16  # characters and braces of a pattern
_MAX_OPEN = 64  # files per `Files`; a process has 1024 file descriptors by default
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d{1,20})\.\.(\d{1,20})")
_COMPRESSED_TAR = re.compile(r"\.(?:tar\.(gz|bz2|xz|zstd?|lz4|z)|t(gz|bz2?|xz|zst))$", re.IGNORECASE)
_COMPRESSIONS = {"gz": "gzip", "bz": "bzip2", "bz2": "bzip2", "xz": "xz", "zst": "zstd", "z": "compress"}


class FileStamp(NamedTuple):
    """Size in bytes and modification time of a file, to detect changes."""

    size: int
    modified: str


def is_remote(path: str) -> bool:
    """Tell if a path has a URL scheme, such as "gs://" or "s3://"."""
    return "://" in path


def has_pattern(path: str) -> bool:
    """Tell if a path has braces, wildcards or a list of files."""
    return "::" in path or any(character in path for character in "{*?[")


def expand(path: str) -> list[str]:
    """List the files of a path.

    Args:
      path: one file; several of them separated by "::"; braces such as "{00000..00041}" or "{a,b}" in the given order;
        wildcards such as "*.tar", in the order of the names.

    Returns:
      Paths, at least one. Paths without wildcards are not checked.

    Raises:
      FileNotFoundError: no file matches a wildcard.
    """
    files: list[str] = []
    for pattern in map(os.path.expanduser, path.split("::")):
        for name in [pattern] if not is_remote(pattern) and os.path.exists(pattern) else expand_braces(pattern):
            if not any(character in name for character in "*?[") or (not is_remote(name) and os.path.exists(name)):
                files.append(name)
                continue
            matches = _glob(name)
            if not matches:
                raise FileNotFoundError(f"no file matches {name}; check the path and the pattern")
            files += matches
    return files


def expand_braces(path: str) -> list[str]:
    """List the paths that braces stand for, at most 2^20; raise `ValueError` for damaged or too many braces."""
    if "{" in path and (len(path) > _MAX_PATTERN or path.count("{") > _MAX_BRACES):
        raise ValueError(
            f"expected at most {_MAX_PATTERN} characters and {_MAX_BRACES} braces in a pattern, got {path[:100]}"
        )
    match = _BRACES.search(path)
    if match is None:
        return [path]
    span = _RANGE.fullmatch(match[1])
    if span is None and "," not in match[1]:
        raise ValueError(f"expected braces such as {{000..041}} or {{a,b}}, got {match[0][:100]} in {path[:100]}")
    if span is not None:
        low, high = int(span[1]), int(span[2])
        if high < low:
            raise ValueError(f"expected an ascending range in braces, got {match[0]} in {path[:100]}")
        if high - low >= _MAX_FILES:
            raise ValueError(f"expected at most {_MAX_FILES} files in braces, got {match[0][:100]}")
        width = max(map(len, span.groups())) if any(text[0] == "0" for text in span.groups()) else 0
    tails = expand_braces(path[match.end() :])
    count = len(tails) * (high - low + 1 if span is not None else match[1].count(",") + 1)
    if count > _MAX_FILES or count * len(path) > _MAX_CHARACTERS:
        raise ValueError(
            f"expected at most {_MAX_FILES} files in braces and {_MAX_CHARACTERS} characters, got more in {path[:100]}"
        )
    names = match[1].split(",") if span is None else [f"{number:0{width}d}" for number in range(low, high + 1)]
    return [path[: match.start()] + name + tail for name in names for tail in tails]


def _glob(pattern: str) -> list[str]:
    if is_remote(pattern):
        system, local = _file_system(pattern)
        return sorted(str(system.unstrip_protocol(path)) for path in system.glob(local))
    return sorted(glob.glob(pattern, recursive=True))


def _file_system(path: str) -> tuple[Any, str]:
    try:
        import fsspec
    except ImportError as error:
        raise ImportError(f"reading {path} needs fsspec: pip install fsspec") from error
    return fsspec.core.url_to_fs(path)


def stamp(path: str) -> FileStamp:
    """Get size and modification time of a regular file; see `open_file`."""
    if is_remote(path):
        system, name = _file_system(path)
        info = system.info(name)
        modified = next(
            (info[key] for key in ("mtime", "LastModified", "updated", "ETag", "created") if key in info), ""
        )
        return FileStamp(int(info["size"]), str(modified))
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        open_regular(path).close()  # raises
    return FileStamp(status.st_size, str(status.st_mtime_ns))


def open_file(path: str, remote_block: int | None = None) -> BinaryIO:
    """Open a local regular file, or a remote file with blocks of `remote_block` bytes, for reading.

    Raises:
      FileNotFoundError: the file does not exist.
      ValueError: it is a folder, FIFO, socket or device.
    """
    if is_remote(path):
        system, name = _file_system(path)
        return system.open(name, "rb", block_size=remote_block)
    return open_regular(path)


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Tell if a directory entry is a folder or a link to one."""
    try:
        return entry.is_dir()
    except OSError:  # such as a link to itself
        return False


def is_compressed_tar(name: str) -> bool:
    """Return whether a compressed tar file has this name, such as "a.tar.gz"."""
    return _COMPRESSED_TAR.search(name) is not None


def check_uncompressed(paths: Iterable[str]) -> None:
    """Check that no name belongs to a compressed tar file, such as "a.tar.gz"."""
    for path in paths:
        if match := _COMPRESSED_TAR.search(path):
            extension = (match[1] or match[2]).lower()
            raise ValueError(compressed(path, _COMPRESSIONS.get(extension, extension)))


def compressed(path: str, compression: str) -> str:
    """Return the error message of a compressed tar file."""
    tool = {"gzip": "gunzip", "bzip2": "bunzip2", "xz": "unxz", "zstd": "unzstd", "zip": "unzip"}.get(compression)
    return (
        f"expected plain tar files, which have random access, got {path}, which is compressed with {compression};"
        f" decompress it{f' ({tool})' if tool else ''}"
    )


def absolute(path: str) -> str:
    """Return the absolute path of a local file; URLs stay."""
    return path if is_remote(path) else os.path.abspath(path)


def is_file(path: str) -> bool:
    """Tell if a local or remote file exists."""
    if is_remote(path):
        system, name = _file_system(path)
        return bool(system.isfile(name))
    return os.path.isfile(path)


def read_file(path: str, limit: int = LARGEST_TEXT) -> bytes:
    """Read a whole regular file of at most `limit` bytes; raise `ValueError` for a larger one, see `open_file`."""
    with open_file(path) as file:
        if not is_remote(path):
            size = os.fstat(file.fileno()).st_size  # 0 for files of /proc, which may never end
            check_size(size, limit, path)
            return file.read(size)
        data = file.read(limit + 1)
    check_size(len(data), limit, path)
    return data


def read_json(path: str, kind: type = dict) -> Any:
    """Read a local or remote JSON file, see `infcl_jax.runtime.file_io.parse_json`."""
    return parse_json(read_file(path), path, kind)


def check_size(size: int, limit: int, name: str) -> None:
    """Check a size in bytes before it is read."""
    if size > limit:
        raise ValueError(f"expected at most {limit} bytes in {name}, got {size}")


def name_of(path: str) -> str:
    """Return the last component of a path."""
    return Path(path).name


class _Descriptor:
    """File descriptor that closes with its last reference, so never during a read."""

    def __init__(self, path: str):
        with open_regular(path) as file:
            self.number = os.dup(file.fileno())
        weakref.finalize(self, os.close, self.number).atexit = False


class Files:
    """Byte ranges of a list of files.

    Threads and forked processes can read at the same time, because no file position is used. Files are opened on
    demand, and again after pickling. Paths are local, or URLs that fsspec reads.
    """

    def __init__(self, paths: Sequence[str]):
        self.paths = list(paths)
        self._open = functools.lru_cache(_MAX_OPEN)(_Descriptor)

    def __reduce__(self) -> tuple[type["Files"], tuple[list[str]]]:
        return Files, (self.paths,)

    def read(self, file: int, offset: int, size: int, limit: int = LARGEST_IMAGE) -> bytes:
        """Read `size` bytes at the byte `offset` of a file, an index into `paths`.

        Raises:
          OSError: the file cannot be read, or it ends before the range does.
          ValueError: the range is larger than the limit.
        """
        path = self.paths[file]
        check_size(size, limit, f"a part of {path}")
        if is_remote(path):
            system, name = _file_system(path)
            data = system.cat_file(name, start=offset, end=offset + size)
        else:
            data = self._pread(path, offset, size)
        if len(data) != size:
            raise OSError(f"expected {size} bytes at byte {offset} of {path}, got {len(data)}; the file is truncated")
        return data

    def _pread(self, path: str, offset: int, size: int) -> bytes:
        descriptor = self._open(path)
        data = os.pread(descriptor.number, size, offset)
        while 0 < len(data) < size:  # Linux reads at most 2 GiB at once, network file systems less
            more = os.pread(descriptor.number, size - len(data), offset + len(data))
            if not more:
                break
            data += more
        return data
