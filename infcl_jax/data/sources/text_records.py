"""Random access to the records of JSON and text files by byte offsets."""

from __future__ import annotations

import codecs
import os
import re
from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np

from infcl_jax.data.sources.files import check_size
from infcl_jax.runtime.file_io import open_regular, parse_json

BYTE_ORDER_MARK = codecs.BOM_UTF8
_BLOCK = 2**24  # bytes of a file scanned at once
_LARGEST = 2**26  # bytes of a record; a query with hundreds of passages has less than one MiB
_NEWLINE, _QUOTE, _BACKSLASH = (ord(character) for character in '\n"\\')
_IS_BLANK = np.isin(np.arange(256), list(b" \t\n\r\v\f"))  # by byte
_BINARY = {
    "gzip": rb"\x1f\x8b",
    "Parquet": rb"PAR1\x15",
    "Arrow": rb"ARROW1\0|\xff{4}",
    "zip": rb"PK\x03\x04",
    "bzip2": rb"BZh\d1AY",
    "xz": rb"\xfd7zXZ",
    "zstd": rb"\x28\xb5\x2f\xfd",
}


class RecordFile:
    """Random access to the records of a file by byte offsets.

    One scan of the file finds the offsets. Records are the lines of a file, or the objects of a JSON array such as
    DPR's training data. Memory is 16 bytes per record, whatever the file's size. It can be pickled and shared by
    threads.

    Args:
      path: file in UTF-8, with or without a byte order mark. A file whose first byte other than white space is "[" is
        a JSON array.

    Raises:
      FileNotFoundError: the file does not exist.
      ValueError: the file has no records, is compressed, binary or in UTF-16, or has a JSON array that is not closed or
        holds something else than objects.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = os.fspath(path)
        with open_regular(self.path) as file:
            head = file.read(_BLOCK).removeprefix(BYTE_ORDER_MARK)
        if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise ValueError(f"expected a file in UTF-8, got UTF-16 in {self.path}; convert it")
        if binary := next((name for name, magic in _BINARY.items() if re.match(magic, head)), None):
            raise ValueError(f"expected a text file in UTF-8, got {binary} in {self.path}; convert it")
        self.is_array = head.lstrip()[:1] == b"["
        self.is_json = head.lstrip()[:1] in (b"[", b"{")
        self._starts, self._stops = _array_offsets(self.path) if self.is_array else _line_offsets(self.path)
        if not len(self):
            raise ValueError(f"expected records in {self.path}, got none")

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> bytes:
        """Read the bytes of a record.

        Raises:
          IndexError: the index is negative or too large.
          ValueError: the record is too large.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"index must be in [0, {len(self)}), got {index}")
        with open_regular(self.path) as file:
            return self._read(file, index)

    def __iter__(self) -> Iterator[bytes]:
        """Read the records in order, from one open file.

        Raises:
          ValueError: a record is too large.
        """
        with open_regular(self.path) as file:
            for index in range(len(self)):
                yield self._read(file, index)

    def _read(self, file: BinaryIO, index: int) -> bytes:
        start = int(self._starts[index])
        size = int(self._stops[index]) - start
        check_size(size, _LARGEST, f"record {index} of {self.path}")
        return os.pread(file.fileno(), size, start)

    def place(self, index: int) -> str:
        """Name a record: by its line, or by its number in a JSON array."""
        if self.is_array:
            return f"record {index} of {self.path}"
        with open_regular(self.path) as file:
            return f"line {1 + file.read(int(self._starts[index])).count(b'\n')} of {self.path}"

    def json(self, index: int) -> dict[str, Any]:
        """Parse a record as a JSON object.

        Raises:
          ValueError: the record is something else.
        """
        return parse_json(self[index], f"record {index} of {self.path}")


def _line_offsets(path: str) -> tuple[np.ndarray, np.ndarray]:
    """Return start and stop of each line that is not blank."""
    newlines, filled, size = [], [], os.path.getsize(path)
    with open_regular(path) as file:
        mark = len(BYTE_ORDER_MARK) if file.read(len(BYTE_ORDER_MARK)) == BYTE_ORDER_MARK else 0
        file.seek(mark)
        position, open_filled = mark, False  # of the line that continues in the next block
        while data := file.read(_BLOCK):
            block = np.frombuffer(data, np.uint8)
            ends = np.flatnonzero(block == _NEWLINE)
            visible = np.append(~_IS_BLANK[block], False)  # a line may start at the end of the block
            lines = np.logical_or.reduceat(visible, np.concatenate([[0], ends + 1]))
            lines[0] |= open_filled
            open_filled = lines[-1]
            newlines.append(position + ends)
            filled.append(lines[:-1])
            position += len(block)
    stops = np.concatenate([*newlines, [size]]).astype(np.int64)
    starts = np.concatenate([[mark], stops[:-1] + 1]).astype(np.int64)
    keep = np.concatenate([*filled, [open_filled]]).astype(bool)
    return starts[keep], stops[keep]


def _array_offsets(path: str) -> tuple[np.ndarray, np.ndarray]:
    """Return start and stop of each object of a JSON array."""
    starts, stops, carry, position = [], [], b"", 0
    quoted, depth, commas = 0, 0, 0  # state at the start of a block
    with open_regular(path) as file:
        while data := carry + (read := file.read(_BLOCK)):
            # A run of backslashes and the character that it escapes must be in the same block.
            carry = data[len(data.rstrip(b"\\")) :] if read else b""
            data = data[: len(data) - len(carry)]
            block = np.frombuffer(data, np.uint8)
            rows = np.arange(len(block))
            other = np.maximum.accumulate(np.where(block != _BACKSLASH, rows, -1))  # last one up to each byte
            before = np.concatenate([[-1], other[:-1]]) if len(block) else other
            quotes = (block == _QUOTE) & ((rows - before) % 2 == 1)  # an even number of backslashes before
            inside = (np.cumsum(quotes) + quoted) % 2 == 1
            marks = np.flatnonzero(np.isin(block, np.frombuffer(b"[]{},", np.uint8)) & ~inside)
            opens, closes = (np.isin(block[marks], np.frombuffer(pair, np.uint8)) for pair in (b"[{", b"]}"))
            depths = depth + np.cumsum(opens.astype(int) - closes)
            starts.append(position + marks[opens & (depths == 2)])
            stops.append(position + marks[closes & (depths == 1)] + 1)
            commas += int((~opens & ~closes & (depths == 1)).sum())
            quoted = (quoted + int(quotes.sum())) % 2
            depth = int(depths[-1]) if len(depths) else depth
            position += len(data)
    if depth or quoted:
        raise ValueError(f"expected a JSON array in {path}, got one that is not closed; download it again")
    objects = sum(map(len, starts))
    if commas and commas + 1 != objects:
        raise ValueError(
            f"expected a JSON array of objects in {path}, got {objects} among {commas + 1} elements; write each record "
            "as an object"
        )
    return np.concatenate(starts).astype(np.int64), np.concatenate(stops).astype(np.int64)
