"""Quotes of CSV and TSV files that swallow rows."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import BinaryIO

_QUOTE = ord('"')
_QUOTED = re.compile(rb'(?:[^"]++|"")*+')  # the rest of a quoted cell in a line
_BLOCK, _LINE = 2**24, 2**26  # bytes of a file read at once, and at most of the rest of their last line


def first_stray_quote(file: BinaryIO, separator: str, is_row: Callable[[bytes], bool]) -> int | None:
    """Find a quoted cell that no writer of quoted cells has written.

    Its closing quote is missing or has text behind it, or it contains a row. Parsers that obey quotes then read text of
    several rows as one cell.

    Args:
      file: table, at its start.
      separator: separator of the cells.
      is_row: whether a line within a quoted cell looks like a row of the table.

    Returns:
      Number of the line in which the cell begins, from 1; None if there is no such cell.
    """
    end = re.compile(rf"[{separator}\r\n]".encode())
    # Cells without quotes, and quoted ones that end in their line. A search by cell takes five times as long.
    cell = rf'(?:[^"{separator}\r\n][^{separator}\r\n]*+|"(?:[^"\r\n]++|"")*+"|)'
    simple = re.compile(rf"(?:{cell}[{separator}\r\n])*+".encode())
    number, opened = 0, 0  # `opened`: line of the quoted cell that contains the start of this line
    while block := file.read(_BLOCK) + file.readline(_LINE):
        block += b"" if block.endswith(b"\n") else b"\n"
        if not opened and simple.fullmatch(block):
            number += block.count(b"\n")
            continue
        for line in io.BytesIO(block):
            number += 1
            if opened and is_row(line):
                return opened
            if opened or not simple.fullmatch(line):
                opened, stray = _open_cell(line, number, opened, end)
                if stray:
                    return opened
    return opened or None


def _open_cell(line: bytes, number: int, opened: int, end: re.Pattern[bytes]) -> tuple[int, bool]:
    """Find an open or malformed quoted cell in a line.

    Args:
      line: the line.
      number: number of the line.
      opened: line of the quoted cell that contains its start, or 0.
      end: pattern of the byte behind a closing quote.

    Returns:
      Line in which the cell begins that is open at the end of the line, or 0, and False; or the line in which a cell
      begins that has text behind its closing quote, and True.
    """
    position = 0
    while position < len(line):
        if not opened and line[position] == _QUOTE:
            opened, position = number, position + 1
        if opened:
            quoted = _QUOTED.match(line, position)
            position = len(line) if quoted is None else quoted.end()
            if position == len(line):
                break
            position += 1
            if position < len(line) and not end.match(line, position):
                return opened, True
            opened = 0
        match = end.search(line, position)
        position = len(line) if match is None else match.end()
    return opened, False
