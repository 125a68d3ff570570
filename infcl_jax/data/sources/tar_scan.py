"""Fast scan of the headers of tar files.

Only the standard library is imported: the file is also a script that scans shards in processes of their own.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

BLOCK = 512  # bytes; headers and contents start at multiples of it
LOCAL_WINDOW = 8192  # bytes per read; covers the headers of small members, skips the contents of images
ENTRY = struct.Struct("<IIIIB")  # image block, image bytes, caption block, caption bytes, caption member
IMAGES = frozenset(("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "avif", "jp2", "ppm"))

_END = bytes(BLOCK)
_FILES = (b"0", b"\0", b"7")  # type flags of regular files
_EMPTY = (b"1", b"2", b"3", b"4", b"5", b"6")  # type flags of links, devices, folders: no contents
_LONG_NAME, _PAX = b"L", b"x"
_LONG_LINK, _PAX_GLOBAL = b"K", b"g"
_RECORD = 20 * BLOCK  # bytes; tar pads files to multiples of it
_FORMAT, _FORMAT_OFFSET = b"ustar", 257  # of ustar, GNU and PAX headers
_SEARCH_WINDOW = 2**20  # bytes per read in the search for a header
_LARGEST = 2**32 - 1
_LONGEST_NAME = 2**16  # bytes of an extended header; a larger one is damaged
_MAX_RECORDS = 1024  # of a PAX header; a few are usual


class DamagedTarError(Exception):
    """Error for a tar file that ends early or has a damaged header."""


class DamagedHeaderError(DamagedTarError):
    """Error for a header with a wrong checksum."""


class ShardScan(NamedTuple):
    """Samples of one tar file.

    Attributes:
      entries: one `ENTRY` per sample, in the order of their first members.
      dropped: number of members or samples that are left out, by reason.
      problem: damage of the file, with the bytes, or None.
    """

    entries: bytes
    dropped: dict[str, int]
    problem: str | None


Read = Callable[[int, int], bytes]  # (offset, size) -> at most `size` bytes


def members(read: Read, end: int, window: int, problems: list[str]) -> Iterator[tuple[str, int, int]]:
    """List the regular files of a tar file in ustar, GNU or PAX format.

    A member with a damaged header is left out. The listing continues at the next intact header.

    Args:
      read: reader of byte ranges.
      end: size of the tar file, in bytes.
      window: bytes per read.
      problems: list that receives one line for each damaged header.

    Yields:
      (name, offset of the contents, size of the contents), in bytes.

    Raises:
      DamagedTarError: the file is truncated, or no intact header follows a damaged one; the message has the byte.
    """
    offset, start, buffer = 0, 0, b""
    name: str | None = None  # from the extended header before the member
    size: int | None = None
    while offset < end:
        if not start <= offset <= start + len(buffer) - BLOCK:
            start, buffer = offset, read(offset, window)
        header = buffer[offset - start : offset - start + BLOCK]
        if header == _END:
            return _check_end(read, offset)
        try:
            kind, own_name, own_size = _parse(header, offset)
        except DamagedHeaderError as error:
            following = _next_header(read, offset + BLOCK, end)
            if following is None:
                raise
            problems.append(f"{error}, continued at byte {following}")
            offset, name, size = following, None, None
            continue
        contents = offset + BLOCK
        if kind not in _FILES or size is None:
            size = 0 if kind in _EMPTY else own_size
        if contents + size > end:
            raise DamagedTarError(f"truncated: the member at byte {offset} ends at byte {contents + size} of {end}")
        offset = contents + -(-size // BLOCK) * BLOCK
        if kind in (_LONG_NAME, _PAX):
            if size > _LONGEST_NAME:
                raise DamagedTarError(f"damaged: extended header of {size} bytes at byte {contents - BLOCK}")
            text = read(contents, size)
            long_name, size = _pax(text) if kind == _PAX else (_text(text), None)
            name = long_name or name
        elif kind not in (_LONG_LINK, _PAX_GLOBAL):
            if kind in _FILES:
                yield name or own_name, contents, size
            name = size = None
        else:
            size = None
    raise DamagedTarError(f"truncated: no end-of-archive marker at byte {end}")


def _check_end(read: Read, offset: int) -> None:
    """Check that only padding follows the end-of-archive marker, and not further members."""
    if any(read(offset, _RECORD)):
        raise DamagedTarError(f"damaged: data follows the end-of-archive marker at byte {offset}")


def _next_header(read: Read, offset: int, end: int) -> int | None:
    """Return the byte of the first intact header from `offset` on, or None."""
    for start in range(offset, min(end, offset + _LARGEST), _SEARCH_WINDOW):  # no member that is read is larger
        data = read(start, _SEARCH_WINDOW)
        position = data.find(_FORMAT)
        while position >= 0:
            header = position - _FORMAT_OFFSET
            if header >= 0 and header % BLOCK == 0:
                with contextlib.suppress(DamagedTarError):
                    _parse(data[header : header + BLOCK], start + header)
                    return start + header
            position = data.find(_FORMAT, position + 1)
    return None


def split_name(name: str) -> tuple[str, str]:
    """Split a member's name at the first dot of its last component.

    Returns:
      (key, lower-case extension).
    """
    folder, slash, file = name.rpartition("/")
    stem, _, extension = file.partition(".")
    return folder + slash + stem, extension.lower()


def _parse(header: bytes, offset: int) -> tuple[bytes, str, int]:
    if len(header) < BLOCK:
        raise DamagedTarError(f"truncated: the header at byte {offset} has {len(header)} of {BLOCK} bytes")
    try:
        checksum = int(header[148:156].strip(b" \0") or b"0", 8)
        size = int(header[124:136].strip(b" \0") or b"0", 8) if header[124] < 128 else _binary(header[124:136])
    except ValueError:
        checksum = size = -1
    if size < 0 or checksum != sum(header) - sum(header[148:156]) + 8 * ord(" "):
        raise DamagedHeaderError(f"damaged: the checksum of the header at byte {offset} differs")
    name = _text(header[:100])
    if header[257:263] == b"ustar\0" and header[345]:
        name = f"{_text(header[345:500])}/{name}"
    return header[156:157], name, size


def _binary(field: bytes) -> int:
    """Decode the base-256 number of a GNU header."""
    return int.from_bytes(field[1:], "big") if field[0] == 128 else -1


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode("utf-8", "replace")


def _pax(records: bytes) -> tuple[str | None, int | None]:
    """Parse name and size of a PAX header, "LENGTH KEY=VALUE" records."""
    values, start = {}, 0
    for _ in range(_MAX_RECORDS):
        length, space, _ = records[start : start + 10].partition(b" ")
        if not space or not length.isdigit() or not len(length) < int(length) <= len(records) - start:
            break
        key, _, value = records[start + len(length) + 1 : start + int(length) - 1].partition(b"=")
        values[key] = value
        start += int(length)
    size = values.get(b"size", b"")
    return _text(values.get(b"path", b"")) or None, int(size) if size.isdigit() and len(size) < 20 else None


def scan(read: Read, end: int, window: int, captions: Sequence[str]) -> ShardScan:
    """Group the members of a tar file into samples.

    Members whose names are equal up to the first dot of the last component belong to one sample, in any order.

    Args:
      read: reader of byte ranges.
      end: size of the tar file, in bytes.
      window: bytes per read.
      captions: extensions of caption members, in order of preference; empty: captions are not needed.

    Returns:
      The samples with an image and a caption. A truncated file gives those before its end, a file with damaged headers
      those of all other members.
    """
    fields = dict.fromkeys(IMAGES, 0) | {extension: 2 + 2 * i for i, extension in enumerate(captions)}
    samples: dict[str, list[int]] = {}
    dropped: dict[str, int] = {}
    problems: list[str] = []
    try:
        for name, offset, size in members(read, end, window, problems):
            key, extension = split_name(name)
            field = fields.get(extension)
            if field is None or not key or not 0 < size <= _LARGEST or offset // BLOCK > _LARGEST:
                continue  # an entry has 32 bits for each
            sample = samples.setdefault(key, [0] * (2 + 2 * len(captions)))
            if sample[field + 1]:
                dropped["duplicate member"] = dropped.get("duplicate member", 0) + 1
            else:
                sample[field : field + 2] = offset // BLOCK, size
    except DamagedTarError as error:
        problems.append(f"{error}, the rest of the file is left out")
    except OSError as error:
        problems.append(f"cannot be read: {error}")
    entries = bytearray()
    for sample in samples.values():
        member = next((i for i in range(len(captions)) if sample[3 + 2 * i]), None)
        if sample[1] and not captions:
            entries += ENTRY.pack(*sample, 0, 0, 0)
        elif not sample[1] or member is None:
            reason = "no image" if not sample[1] else "no caption"
            dropped[reason] = dropped.get(reason, 0) + 1
        else:
            entries += ENTRY.pack(*sample[:2], *sample[2 + 2 * member : 4 + 2 * member], member)
    more = [f"{len(problems) - 2} more"] if len(problems) > 2 else []
    return ShardScan(bytes(entries), dropped, "; ".join([*problems[:2], *more]) or None)


def scan_file(path: str, captions: Sequence[str]) -> ShardScan:
    """Scan a local tar file; see `scan`."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        return ShardScan(b"", {}, f"cannot be read: {error}")
    try:
        size = os.fstat(descriptor).st_size
        return scan(lambda offset, count: os.pread(descriptor, count, offset), size, LOCAL_WINDOW, captions)
    finally:
        os.close(descriptor)


if __name__ == "__main__":  # stdin: pickled (paths, captions); stdout: pickled tuples of `ShardScan`
    shards, extensions = pickle.load(sys.stdin.buffer)
    pickle.dump([tuple(scan_file(shard, extensions)) for shard in shards], sys.stdout.buffer)
