"""Fast scan of the headers of tar files.

Only the standard library is imported: the file is also a script that scans shards in processes of their own.
"""

import contextlib
import functools
import json
import os
import pickle
import re
import struct
import sys
from collections.abc import Iterator, Sequence
from typing import BinaryIO, NamedTuple

BLOCK = 512  # bytes; headers and contents start at multiples of it
LOCAL_WINDOW = 8192  # bytes per read; covers headers and captions of small members, skips the contents of images
ENTRY = struct.Struct("<IIIIBB")  # image block, image bytes, caption block, caption bytes, caption member, name blocks
IMAGES = frozenset(("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "avif", "jp2", "ppm"))
COMPRESSED = "compressed with"  # start of the problem of a compressed tar file
HIDDEN = "in a hidden folder"  # reason of members such as __MACOSX/a.jpg
DOTTED = "dotted name"  # reason of members such as a.0.jpg: the key is a, and 0.jpg is no known extension

_COMPRESSION = re.compile(  # first bytes
    rb"(?P<gzip>\x1f\x8b\x08)|(?P<bzip2>BZh[1-9]1AY&SY)|(?P<xz>\xfd7zXZ\0)|(?P<zstd>\x28\xb5\x2f\xfd)"
    rb"|(?P<lz4>\x04\x22\x4d\x18)|(?P<zip>PK\x03\x04)"
)
_SYSTEM_FOLDERS = ("@eaDir", "#recycle", "__MACOSX", "$RECYCLE.BIN", "System Volume Information", "lost+found")
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
_VISIBLE = re.compile(rb"[!-z]")
_LARGEST_CAPTION = 2**23  # bytes of a member that is checked for a caption, see `captions.LARGEST_JSON`
_MOST_NAME_BLOCKS = 255  # that an entry holds; more than a name of `_LONGEST_NAME` takes


class DamagedTarError(Exception):
    """Error for a tar file that ends early or has a damaged header."""


class DamagedHeaderError(DamagedTarError):
    """Error for a header with a wrong checksum."""


class Layout(NamedTuple):
    """Members that make a sample. Captions and fields are in order of preference."""

    captions: tuple[str, ...] = ()  # extensions of caption or label members; empty: captions are not needed
    fields: tuple[str, ...] = ()  # fields of the caption in a json member; empty: the members need no caption
    image: str | None = None  # extension of the image; None: one of `IMAGES`


class ShardScan(NamedTuple):
    """Samples of one tar file."""

    entries: bytes  # one `ENTRY` per sample, in the order of their first members
    dropped: dict[str, int]  # number of members or samples that are left out, by reason
    dotted: str | None  # name of the first `DOTTED` member
    problem: str | None  # damage of the file, with the bytes


def _read(file: BinaryIO, offset: int, size: int) -> bytes:
    file.seek(offset)
    return file.read(size)


def members(file: BinaryIO, end: int, problems: list[str]) -> Iterator[tuple[str, int, int, int]]:
    """List the regular files of a tar file in ustar, GNU or PAX format.

    A member with a damaged header is left out. The listing continues at the next intact header. The list `problems`
    receives one line for each damaged header.

    Yields:
      (name, offset of the contents, size of the contents, blocks of the extended headers before the header).
      Offset and size are in bytes, as is `end`, the size of the tar file.

    Raises:
      DamagedTarError: the file is truncated, or no intact header follows a damaged one; the message has the byte.
    """
    offset = first = 0  # first: header of the member, or its first extended header
    name: str | None = None  # from the extended header before the member
    size: int | None = None
    while offset < end:
        header = _read(file, offset, BLOCK)
        if header == _END:
            if any(_read(file, offset, _RECORD)):  # more than padding
                raise DamagedTarError(f"damaged: data follows the end-of-archive marker at byte {offset}")
            return
        try:
            kind, own_name, own_size = _parse(header, offset)
        except DamagedHeaderError as error:
            following = _next_header(file, offset + BLOCK, end)
            if following is None:
                raise
            problems.append(f"{error}, continued at byte {following}")
            offset, first, name, size = following, following, None, None
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
            text = _read(file, contents, size)
            long_name, size = _pax(text) if kind == _PAX else (_text(text), None)
            name = long_name or name
        elif kind not in (_LONG_LINK, _PAX_GLOBAL):
            if kind in _FILES:
                yield name or own_name, contents, size, (contents - first) // BLOCK - 1
            name, size, first = None, None, offset
        else:
            size = None
    raise DamagedTarError(f"truncated: no end-of-archive marker at byte {end}")


def _next_header(file: BinaryIO, offset: int, end: int) -> int | None:
    """Return the byte of the first intact header from `offset` on, or None."""
    for start in range(offset, min(end, offset + _LARGEST), _SEARCH_WINDOW):  # no member that is read is larger
        data = _read(file, start, _SEARCH_WINDOW)
        position = data.find(_FORMAT)
        while position >= 0:
            header = position - _FORMAT_OFFSET
            if header >= 0 and header % BLOCK == 0:
                with contextlib.suppress(DamagedTarError):
                    _parse(data[header : header + BLOCK], start + header)
                    return start + header
            position = data.find(_FORMAT, position + 1)
    return None


def compression_of(head: bytes) -> str | None:
    """Name the compression of a file by its first ten bytes."""
    match = _COMPRESSION.match(head)
    return match.lastgroup if match else None


def is_hidden(name: str) -> bool:
    """Tell if a file or folder is hidden or an operating system's, such as "@eaDir"."""
    return (name.startswith(".") and name not in (".", "..")) or name in _SYSTEM_FOLDERS


@functools.lru_cache(1024)  # consecutive members share a folder
def _is_hidden_path(folder: str) -> bool:
    return any(map(is_hidden, folder.split("/")))


def split_name(name: str) -> tuple[str, str]:
    """Split a member's name at the first dot of its last component into key and extension, which is in lower case.

    The key of a hidden file is empty.
    """
    folder, slash, file = name.rpartition("/")
    stem, _, extension = file.partition(".")
    return stem and folder + slash + stem, extension.lower()


def _parse(header: bytes, offset: int) -> tuple[bytes, str, int]:
    if len(header) < BLOCK:
        raise DamagedTarError(f"truncated: the header at byte {offset} has {len(header)} of {BLOCK} bytes")
    try:
        checksum = int(header[148:156].strip(b" \0") or b"0", 8)
        size = int(header[124:136].strip(b" \0") or b"0", 8) if header[124] < 128 else -1
        if header[124] == 128:  # base 256, of GNU
            size = int.from_bytes(header[125:136], "big")
    except ValueError:
        checksum = size = -1
    if size < 0 or checksum != sum(header) - sum(header[148:156]) + 8 * ord(" "):
        raise DamagedHeaderError(f"damaged: the checksum of the header at byte {offset} differs")
    name = _text(header[:100])
    if header[257:263] == b"ustar\0" and header[345]:
        name = f"{_text(header[345:500])}/{name}"
    return header[156:157], name, size


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode("utf-8", "backslashreplace")  # different names stay different


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


def scan(file: BinaryIO, end: int, layout: Layout) -> ShardScan:
    """Group the members of a tar file into samples.

    Members whose names are equal up to the first dot of the last component belong to one sample, in any order. Hidden
    files and files in hidden folders are no members. A truncated file gives the samples before its end, a file with
    damaged headers the samples of all other members. The file is buffered, and `end` is its size in bytes.
    """
    images = IMAGES if layout.image is None else (layout.image,)
    fields = dict.fromkeys(images, 0) | {extension: 2 + 2 * i for i, extension in enumerate(layout.captions)}
    samples: dict[str, list[int]] = {}
    dropped: dict[str, int] = {}
    dotted: str | None = None
    problems: list[str] = []
    try:
        if compression := compression_of(_read(file, 0, 10)):
            return ShardScan(b"", {}, None, f"{COMPRESSED} {compression}")
        for name, offset, size, name_blocks in members(file, end, problems):
            key, extension = split_name(name)
            field = fields.get(extension)
            if key and _is_hidden_path(key.rpartition("/")[0]):
                if field is not None:
                    dropped[HIDDEN] = dropped.get(HIDDEN, 0) + 1
                continue
            if key and field is None and extension.rpartition(".")[2] in fields:
                dotted = dotted or name
                dropped[DOTTED] = dropped.get(DOTTED, 0) + 1
            if field is None or not key or not 0 < size <= _LARGEST or offset // BLOCK > _LARGEST:
                continue  # an entry has 32 bits for each
            sample = samples.setdefault(key, [0] * (3 + 2 * len(layout.captions)))
            if sample[field + 1]:
                dropped["duplicate member"] = dropped.get("duplicate member", 0) + 1
            elif field == 0:
                sample[0], sample[1], sample[-1] = offset // BLOCK, size, min(name_blocks, _MOST_NAME_BLOCKS)
            elif any(sample[3:field:2]) or _has_caption(file, offset, size, extension, layout.fields):
                sample[field : field + 2] = offset // BLOCK, size
    except DamagedTarError as error:
        problems.append(f"{error}, the rest of the file is left out")
    except OSError as error:
        problems.append(f"cannot be read: {error}")
    entries = bytearray()
    for sample in samples.values():
        member = next((i for i in range(len(layout.captions)) if sample[3 + 2 * i]), None)
        if sample[1] and not layout.captions:
            entries += ENTRY.pack(*sample[:2], 0, 0, 0, sample[-1])
        elif not sample[1] or member is None:
            reason = "no image" if not sample[1] else "no caption"
            dropped[reason] = dropped.get(reason, 0) + 1
        else:
            entries += ENTRY.pack(*sample[:2], *sample[2 + 2 * member : 4 + 2 * member], member, sample[-1])
    more = [f"{len(problems) - 2} more"] if len(problems) > 2 else []
    return ShardScan(bytes(entries), dropped, dotted, "; ".join([*problems[:2], *more]) or None)


def _has_caption(file: BinaryIO, offset: int, size: int, extension: str, fields: Sequence[str]) -> bool:
    """Tell if a member has a caption, as `captions.json_captions` does.

    A damaged member counts as one, so that it is a bad record where it is read.
    """
    if not fields or size > _LARGEST_CAPTION:
        return True
    data = _read(file, offset, size)
    # Most members have a caption. Parsing them all would double the time of the scan.
    match = (_json_caption(fields) if is_json(extension) else _VISIBLE).search(data)
    if match and data.count(b"{", 0, match.start()) == is_json(extension):  # no field of an object in an object
        return True
    try:
        text = data.decode("utf-8-sig")
        content = json.loads(text) if is_json(extension) else text
    except (ValueError, RecursionError):
        return True
    values = [content.get(field) for field in fields] if isinstance(content, dict) else [content]
    items = [item for value in values for item in (value if isinstance(value, list) else [value])]
    return not all(item is None or item != item or (isinstance(item, str) and not item.strip()) for item in items)


@functools.cache
def _json_caption(fields: Sequence[str]) -> re.Pattern[bytes]:
    """Compile a pattern of a field with visible text, or a list that starts with it."""
    names = "|".join(map(re.escape, fields)).encode()
    return re.compile(rb'"(?:%b)"\s*:\s*\[?\s*"\s*[!#-\[\]-~]' % names)


def is_json(extension: str) -> bool:
    """Tell if the members of an extension are JSON."""
    return extension.rpartition(".")[2] == "json"


def scan_file(path: str, layout: Layout) -> ShardScan:
    """Scan a local tar file; see `scan`."""
    try:
        with open(path, "rb", LOCAL_WINDOW) as file:
            return scan(file, os.fstat(file.fileno()).st_size, layout)
    except OSError as error:
        return ShardScan(b"", {}, None, f"cannot be read: {error}")


if __name__ == "__main__":  # stdin: pickled (paths, layout as a tuple); stdout: pickled tuples of `ShardScan`
    shards, sample_layout = pickle.load(sys.stdin.buffer)
    pickle.dump([tuple(scan_file(shard, Layout(*sample_layout))) for shard in shards], sys.stdout.buffer)
