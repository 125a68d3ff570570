"""CSV, TSV and JSON lines files as Arrow tables."""

import codecs
import dataclasses
import itertools
import logging
import math
import re
from collections.abc import Callable, Iterator, Sequence
from csv import reader
from typing import Any, BinaryIO

import pyarrow as pa
from pyarrow import csv, json

from infcl_jax.runtime.file_io import parse_json

_BLOCK = 2**26  # bytes of text parsed at once; longer than any row
_HEADER = 2**20  # bytes of the first line of a CSV file
_SEPARATORS = ("\t", ",", ";", "|")  # the first one in the first line separates cells
_AS_TEXT = "all quotes are read as text"
_NESTED = 64  # levels of a JSON value; Arrow recurses without a limit
_SURROGATE = re.compile("[\ud800-\udfff]")
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?')  # of JSON
_QUOTES_BLOCK = 2**24  # bytes of a file scanned for quotes at once
_LONGEST_CELL = 2**26  # bytes of a quoted cell, as of a block that Arrow parses
_LINE_BREAK = re.compile(rb"\r\n?|\n")
_SWALLOWED = 0.9  # least fraction of a cell's lines that are rows; the rest can be damaged rows
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_TYPES = {str: "a text", dict: "an object", bool: "true or false", int: "a number", float: "a number"}

_logger = logging.getLogger(__name__)

Choose = Callable[[Sequence[str]], list[str]]  # from the names of all columns to the used ones, images first


def read_csv(file: BinaryIO, path: str, choose: Choose, is_image: Callable[[bytes], bool]) -> tuple[pa.Table, int]:
    """Read used columns of a CSV or TSV file, as bytes.

    A TSV file with stray quotes was written without quoting, as Google's Conceptual Captions are, so its quotes are
    text. OpenCLIP's own TSV files are quoted by pandas. A CSV file needs quotes, so stray ones are a warning.
    `is_image` tells if a text is the name of an image.

    Returns:
      The table, and the number of rows with a wrong number of columns, which are left out.
    """
    header = file.readline(_HEADER).decode("utf-8-sig").splitlines()[:1]
    separator = next((separator for separator in _SEPARATORS if separator in "".join(header)), ",")
    names = [name.strip() for name in next(reader(header, delimiter=separator), [])]
    used = choose(names)
    image = names.index(used[0])
    file.seek(0)
    quotes = scan_quotes(
        file, separator, lambda lines: _swallowed_rows(lines, separator.encode(), len(names), image, is_image)
    )
    if separator == "\t" and quotes.stray:
        _logger.warning("%s: the quote in line %d does not enclose a cell; %s", path, quotes.stray, _AS_TEXT)
        return _parse_csv(file, separator, names, used, None)
    table, damaged = _parse_csv(file, separator, names, used, quotes)
    if separator == "\t" and quotes.present and damaged:
        unquoted = _parse_csv(file, separator, names, used, None)
        if unquoted[1] < damaged:
            _logger.warning("%s: with quoted cells, %d rows have too few or too many; %s", path, damaged, _AS_TEXT)
            return unquoted
    lost = set(quotes.images) - set(table.column(used[0]).to_pylist()) if quotes.images else set()
    if quotes.stray or lost:
        swallowed = f"or a later one has {len(lost)} lines that look like rows"
        reason = "is not closed at its end" if quotes.stray else swallowed
        _logger.warning(
            "%s: the quoted cell in line %d %s, which can swallow the rows behind it; correct it, and write quotes"
            ' within quoted cells as ""',
            path,
            quotes.stray or quotes.swallowing,
            reason,
        )
    return table, damaged


@dataclasses.dataclass
class Quotes:
    """Quotes of a file. Lines have numbers from 1."""

    present: bool = False  # whether there is any
    line_breaks: bool = False  # whether a quoted cell has a line break
    stray: int | None = None  # line of the first quoted cell without closing quote, or with text behind it
    swallowing: int | None = None  # line of the first quoted cell whose lines look like rows
    images: list[bytes] = dataclasses.field(default_factory=list)  # of these rows


def scan_quotes(file: BinaryIO, separator: str, swallowed: Callable[[list[bytes]], list[bytes]]) -> Quotes:
    """Scan a table for quotes up to the first stray one.

    `swallowed` returns the images of the lines of a quoted cell if they look like rows.
    """
    end = rf"[{re.escape(separator)}\r\n]"
    # A quote behind a separator begins a quoted cell; others are text.
    text, begin = rf'"(?<=[^{end[1:]}")', rf'"(?<![^{end[1:]}")'
    simple = re.compile(rf'(?:[^"]++|{text}|{begin}(?:[^"\r\n]++|"")*+"(?={end}))*+'.encode())  # without line breaks
    opened = re.compile(rb'"(?:[^"]++|"")*+')
    closed = re.compile(rf'"{end}'.encode())
    result, data, line, more = Quotes(), b"", 1, True
    while more and len(data) <= _LONGEST_CELL:
        block = file.read(_QUOTES_BLOCK)
        more = bool(block)
        data += block or b"\n"
        stop = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        position, counted = 0 if b'"' in data else stop, 0
        result.present |= position < stop
        while position < stop and (position := _end(simple, data, position, stop)) < stop:
            behind = _end(opened, data, position, stop)
            if behind == stop and more and stop - position <= _LONGEST_CELL:
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


def _swallowed_rows(
    lines: list[bytes], separator: bytes, columns: int, image: int, is_image: Callable[[bytes], bool]
) -> list[bytes]:
    """Return the images in the lines of a quoted cell if it swallowed rows: nearly all lines are rows.

    Args:
      lines: lines of the cell, at least two.
      separator: separator of the cells.
      columns: number of columns.
      image: index of the image column.
      is_image: whether a text is the name of an image.
    """

    def find_image(line: bytes) -> bytes:
        cells = line.split(separator)
        # Commas are also in captions, in front of the image or behind it.
        if columns < 2 or len(cells) < columns or (separator != b"," and len(cells) > columns):
            return b""
        names = (cells[number].strip(b'" ') for number in (image, image - columns))
        return next(filter(is_image, names), b"")

    first, *inner, last = lines
    # Cells before the quoted one are in the line where it starts, cells after it in the line where it ends.
    images = [find_image(line) for line in [last + first, *filter(bytes.strip, inner)]]
    found = list(filter(None, images))
    return found if images[0] and len(found) >= _SWALLOWED * len(images) else []


def _parse_csv(
    file: BinaryIO, separator: str, names: Sequence[str], used: Sequence[str], quotes: Quotes | None
) -> tuple[pa.Table, int]:
    """Parse a file. Quotes enclose cells, or are text if `quotes` is None."""
    damaged = 0

    def skip_damaged(row: Any) -> str:
        nonlocal damaged
        damaged += 1
        return "skip"

    file.seek(0)
    table = csv.read_csv(
        file,
        csv.ReadOptions(block_size=_BLOCK, use_threads=False, column_names=names, skip_rows=1),
        csv.ParseOptions(
            delimiter=separator,
            quote_char='"' if quotes else False,
            # Blocks are split faster at any line break.
            newlines_in_values=quotes is not None and (quotes.line_breaks or quotes.stray is not None),
            invalid_row_handler=skip_damaged,
        ),
        # Bytes, because one caption that is not UTF-8 must not spoil the table.
        csv.ConvertOptions(check_utf8=False, include_columns=used, column_types=dict.fromkeys(used, pa.binary())),
    )
    return table, damaged


def read_json_lines(file: BinaryIO, path: str, choose: Choose) -> pa.Table:
    """Read used columns of a JSON lines file; see `read_csv`."""
    for _, row in _objects(file, path):
        if row.count(b"[") + row.count(b"{") <= _NESTED:
            continue
        brackets = _STRING.sub(b"", row).translate(None, _NO_BRACKETS)
        if max(itertools.accumulate(1 if bracket in b"[{" else -1 for bracket in brackets)) > _NESTED:
            raise ValueError(f"expected at most {_NESTED} nested values in {path}, got more; simplify such lines")
    file.seek(0)
    try:
        table = json.read_json(file, json.ReadOptions(block_size=_BLOCK))
    except pa.ArrowInvalid:
        return _parse_lines(file, path, choose)
    return table.select(choose(table.column_names))


def _objects(file: BinaryIO, path: str) -> Iterator[tuple[int, bytes]]:
    """Yield the number of each line from 1, and its object."""
    file.seek(0)
    number = 0
    for line in iter(lambda: file.readline(_BLOCK), b""):
        if len(line) == _BLOCK:
            raise ValueError(f"expected lines of less than {_BLOCK} bytes in {path}, got a longer one")
        rows = line.removeprefix(codecs.BOM_UTF8).split(b"\r")  # all line breaks of Arrow
        if rows[-1] == b"\n":
            rows.pop()  # of \r\n
        for row in map(bytes.strip, rows):
            number += 1
            # Arrow 26 crashes where a block of lines starts with null. An object of several lines could nest deeper.
            if row[:1] + row[-1:] not in (b"", b"{}"):
                raise ValueError(f"expected an object in every line of {path}, got {row[:40]!r}; correct such lines")
            if row:
                yield number, row


def _parsed(file: BinaryIO, path: str) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, row in _objects(file, path):
        yield number, parse_json(row, f"line {number} of {path}")


def _parse_lines(file: BinaryIO, path: str, choose: Choose) -> pa.Table:
    """Read lines without Arrow.

    Arrow requires one type per column, even in unused ones, and rejects NaN.
    """
    used = choose(list(dict.fromkeys(name for _, row in _parsed(file, path) for name in row)))
    columns: dict[str, list[Any]] = {name: [] for name in used}
    first: dict[str, tuple[str, int]] = {}
    damaged: list[int] = []
    for number, row in _parsed(file, path):
        for name, values in columns.items():
            value = _without_nan(row.get(name))
            values.append(_replace_surrogates(value))
            if values[-1] != value:
                damaged.append(number)
            if value is None:
                continue
            kind, line = first.setdefault(name, (_kind(value), number))
            if kind != _kind(value):
                raise ValueError(
                    f"expected values of one type in the column {name!r} of {path}, got {kind} in line {line} and"
                    f" {_kind(value)} in line {number}; write all of them in the same way"
                )
    if damaged:
        _logger.warning(
            "%s: %d values have half of a surrogate pair, read as U+FFFD, the first in line %d",
            path,
            len(damaged),
            damaged[0],
        )
    return pa.table(columns)


def _without_nan(value: Any) -> Any:
    """Return a value, and null for NaN."""
    if isinstance(value, list):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def _replace_surrogates(value: Any) -> Any:
    """Replace lone surrogates, which UTF-8 cannot encode."""
    if isinstance(value, list):
        return [_replace_surrogates(item) for item in value]
    if isinstance(value, dict):
        return {_replace_surrogates(key): _replace_surrogates(item) for key, item in value.items()}
    return _SURROGATE.sub("\N{REPLACEMENT CHARACTER}", value) if isinstance(value, str) else value


def _kind(value: Any) -> str:
    """Name the JSON type of a value for messages."""
    if isinstance(value, list):
        texts = all(item is None or isinstance(item, str) for item in value)
        return "a list of texts" if texts else "a list of other values"
    return _TYPES[type(value)]
