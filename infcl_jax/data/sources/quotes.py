"""Quotes of CSV and TSV files: where they enclose cells, and where they may swallow rows."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import BinaryIO

_BLOCK = 2**24  # bytes of a file read at once
_LONGEST = 2**26  # bytes of a quoted cell, as of a block that Arrow parses
_LINE_BREAK = re.compile(rb"\r\n?|\n")
_SWALLOWED = 0.9  # least fraction of a cell's lines that are rows; the rest can be damaged rows


@dataclasses.dataclass
class Quotes:
    """Quotes of a file.

    Attributes:
      present: whether there is any.
      line_breaks: whether a quoted cell has a line break.
      stray: number of the line, from 1, of the first quoted cell without closing quote, or with text behind it.
      swallowing: the same, of the first quoted cell whose lines look like rows.
      images: images of these rows in the first such cells.
    """

    present: bool = False
    line_breaks: bool = False
    stray: int | None = None
    swallowing: int | None = None
    images: list[bytes] = dataclasses.field(default_factory=list)


def scan_quotes(file: BinaryIO, separator: str, swallowed: Callable[[list[bytes]], list[bytes]]) -> Quotes:
    """Scan a table for quotes up to the first stray one.

    Args:
      file: table, at its start.
      separator: separator of the cells.
      swallowed: function from the lines of a quoted cell to the images of the rows that they look like.
    """
    end = rf"[{re.escape(separator)}\r\n]"
    # A quote behind a separator begins a quoted cell; others are text.
    text, begin = rf'"(?<=[^{end[1:]}")', rf'"(?<![^{end[1:]}")'
    simple = re.compile(rf'(?:[^"]++|{text}|{begin}(?:[^"\r\n]++|"")*+"(?={end}))*+'.encode())  # without line breaks
    opened = re.compile(rb'"(?:[^"]++|"")*+')
    closed = re.compile(rf'"{end}'.encode())
    result, data, line, more = Quotes(), b"", 1, True
    while more and len(data) <= _LONGEST:
        block = file.read(_BLOCK)
        more = bool(block)
        data += block or b"\n"
        stop = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        position, counted = 0 if b'"' in data else stop, 0
        result.present |= position < stop
        while position < stop and (position := _end(simple, data, position, stop)) < stop:
            behind = _end(opened, data, position, stop)
            if behind == stop and more and stop - position <= _LONGEST:
                break  # the rest of the cell is in the next block
            line, counted = line + data.count(b"\n", counted, position), position
            if not closed.match(data, behind, stop):
                result.stray = line
                return result
            result.line_breaks = True
            images = swallowed(_LINE_BREAK.split(data[position + 1 : behind]))
            if images:
                result.swallowing = result.swallowing or line
                result.images += images
            position = behind + 1
        line += data.count(b"\n", counted, position)
        data = data[position:]
    return result


def _end(pattern: re.Pattern[bytes], data: bytes, position: int, stop: int) -> int:
    match = pattern.match(data, position, stop)
    return position if match is None else match.end()


def swallowed_rows(
    lines: list[bytes], separator: bytes, columns: int, image: int, is_image: Callable[[bytes], bool]
) -> list[bytes]:
    """Return the images of rows that a quoted cell has swallowed.

    Args:
      lines: lines of the cell, at least two.
      separator: separator of the cells.
      columns: number of columns.
      image: index of the image column.
      is_image: whether a text is the name of an image.

    Returns:
      Images of the lines, or none unless nearly all lines are rows.
    """

    def find_image(line: bytes) -> bytes:
        cells = line.split(separator)
        # Commas are also in captions, in front of the image or behind it.
        if columns < 2 or len(cells) < columns or (separator != b"," and len(cells) > columns):
            return b""
        names = (cells[number].strip(b'" ') for number in (image, image - columns))
        return next(filter(is_image, names), b"")

    first, *inner, last = lines
    # The cells in front of the quoted one are in the same line as its start, and those behind in that of its end.
    images = [find_image(line) for line in [last + first, *filter(bytes.strip, inner)]]
    found = list(filter(None, images))
    return found if images[0] and len(found) >= _SWALLOWED * len(images) else []
