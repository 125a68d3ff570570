"""Random access to the records of JSON and text files by byte offsets."""

from __future__ import annotations

import codecs
import os
from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np

from infcl_jax.data.sources.files import check_size
from infcl_jax.file_io import open_regular, parse_json

BYTE_ORDER_MARK = codecs.BOM_UTF8
_BLOCK = 2**24  # bytes of a file scanned at once
_LARGEST = 2**26  # bytes of a record; a query with hundreds of passages has less than one MiB
_NEWLINE, _QUOTE, _BACKSLASH = (ord(character) for character in '\n"\\')


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
      ValueError: the file has no records, its JSON array is not closed, or it is in UTF-16.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = os.fspath(path)
        with open_regular(self.path) as file:
            head = file.read(_BLOCK).removeprefix(BYTE_ORDER_MARK)
        if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise ValueError(f"expected a file in UTF-8, got UTF-16 in {self.path}; convert it")
        self.is_array = head.lstrip()[:1] == b"["
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
    newlines, size = [], os.path.getsize(path)
    with open_regular(path) as file:
        position = 0
        while block := file.read(_BLOCK):
            newlines.append(position + np.flatnonzero(np.frombuffer(block, np.uint8) == _NEWLINE))
            position += len(block)
        stops = np.concatenate([*newlines, [size]]).astype(np.int64)
        file.seek(0)
        mark = len(BYTE_ORDER_MARK) if file.read(len(BYTE_ORDER_MARK)) == BYTE_ORDER_MARK else 0
        starts = np.concatenate([[mark], stops[:-1] + 1]).astype(np.int64)
        keep = stops > starts
        short = np.flatnonzero(keep & (stops - starts <= 2))  # only these can be a line break alone
        if len(short):
            data = np.memmap(file, np.uint8, "r")
            ends = data[np.stack([starts[short], stops[short] - 1])]
            keep[short] = ~np.isin(ends, np.frombuffer(b"\r\t ", np.uint8)).all(0)
    return starts[keep], stops[keep]


def _array_offsets(path: str) -> tuple[np.ndarray, np.ndarray]:
    """Return start and stop of each object of a JSON array."""
    starts, stops, carry, position = [], [], b"", 0
    quoted, depth = 0, 0  # state at the start of a block
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
            brackets = np.flatnonzero(np.isin(block, np.frombuffer(b"[]{}", np.uint8)) & ~inside)
            opens = np.isin(block[brackets], np.frombuffer(b"[{", np.uint8))
            depths = depth + np.cumsum(np.where(opens, 1, -1))
            starts.append(position + brackets[opens & (depths == 2)])
            stops.append(position + brackets[~opens & (depths == 1)] + 1)
            quoted = (quoted + int(quotes.sum())) % 2
            depth = int(depths[-1]) if len(depths) else depth
            position += len(data)
    if depth or quoted:
        raise ValueError(f"expected a JSON array in {path}, got one that is not closed; download it again")
    return np.concatenate(starts).astype(np.int64), np.concatenate(stops).astype(np.int64)
