"""Records of text retrieval: random access to JSON and text files, and checked fields."""

import array
import codecs
import csv
import functools
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from infcl_jax.data.sources.base import check_index
from infcl_jax.data.sources.files import check_size
from infcl_jax.data.sources.tar_scan import compression_of
from infcl_jax.runtime.file_io import open_regular, parse_json

# Names of the fields in DPR's JSON, and in the JSON lines of tevatron, BEIR, FlagEmbedding and Sentence Transformers.
QUERY = ("question", "query", "anchor")
POSITIVES = ("positive_ctxs", "positive_passages", "positives", "pos", "positive")
NEGATIVES = ("hard_negative_ctxs", "negative_passages", "negatives", "neg", "negative")
FALLBACK = ("negative_ctxs",)  # of DPR, for a question without hard negatives
NUMBERED = re.compile(r"negative_\d+")  # of Sentence Transformers, one text each
PASSAGE_IDS = ("docid", "doc_id", "docno", "passage_id", "psg_id", "_id", "id", "pid", "corpus_id", "corpus-id")
TEXTS = ("text", "contents", "body", "passage", "content", "passage_text")
_KINDS = {dict: "an object", list: "a list", bool: "a boolean", int: "a number", float: "a number", type(None): "null"}
BYTE_ORDER_MARK = codecs.BOM_UTF8
_BLOCK = 2**24  # bytes of a file scanned at once
_LARGEST = 2**26  # bytes of a record; a query with hundreds of passages has less than one MiB
_QUOTE, _BACKSLASH = b'"\\'
_BINARY = re.compile(rb"(?P<Parquet>PAR1\x15)|(?P<Arrow>ARROW1\0|\xff{4})")  # first bytes


class RecordFile:
    """Random access to the records of a file by byte offsets.

    One scan of the file finds the offsets. Records are the lines of a file, or the objects of a JSON array such as
    DPR's training data, whose first byte other than white space is "[". Memory is 16 bytes per record, whatever the
    file's size. It can be pickled and shared by threads.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = os.fspath(path)
        with open_regular(self.path) as file:
            head = file.read(_BLOCK).removeprefix(BYTE_ORDER_MARK)
        if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise ValueError(f"expected a file in UTF-8, got UTF-16 in {self.path}; convert it")
        match = _BINARY.match(head)
        if binary := compression_of(head) or (match and match.lastgroup):
            raise ValueError(f"expected a text file in UTF-8, got {binary} in {self.path}; convert it")
        self.is_array = head.lstrip()[:1] == b"["
        self.is_json = head.lstrip()[:1] in (b"[", b"{")
        self._starts, self._stops = _array_offsets(self.path) if self.is_array else _line_offsets(self.path)
        if not len(self):
            raise ValueError(f"expected records in {self.path}, got none")

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> bytes:
        """Read the bytes of a record."""
        check_index(index, len(self))
        with open_regular(self.path) as file:
            return self._read(file, index)

    def __iter__(self) -> Iterator[bytes]:
        """Read the records in order, from one open file."""
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
        """Parse a record as a JSON object."""
        return parse_json(self[index], f"record {index} of {self.path}")


def _line_offsets(path: str) -> tuple[np.ndarray, np.ndarray]:
    """Return start and stop of each line that is not blank."""
    starts, stops = array.array("q"), array.array("q")
    with open_regular(path) as file:
        mark = len(BYTE_ORDER_MARK)
        start = position = mark if file.read(mark) == BYTE_ORDER_MARK else 0
        file.seek(start)
        is_filled = False
        for piece in iter(functools.partial(file.readline, _BLOCK), b""):  # a line, or a block of a longer one
            position += len(piece)
            is_filled = is_filled or not piece.isspace()
            is_ended = piece.endswith(b"\n")
            if is_ended and is_filled:
                starts.append(start)
                stops.append(position - 1)
            if is_ended:
                start, is_filled = position, False
    if is_filled:
        starts.append(start)
        stops.append(position)
    return np.array(starts), np.array(stops)


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


class Passage(NamedTuple):
    """Passage of a corpus.

    Examples:
      >>> Passage("by author 0", title="Book 0").key
      ''

    Attributes:
      text: text of the passage.
      title: title of its document; "" without one.
      key: id in the corpus; "" without one.
    """

    text: str
    title: str = ""
    key: str = ""


def field(record: Mapping[str, Any], names: Sequence[str]) -> tuple[str, Any]:
    """Return the first name whose value is not null, with the value; there must be one."""
    name, value = optional_field(record, names)
    if value is None:
        present = [name for name in names if name in record]
        got = f"null in {', '.join(present)}" if present else ", ".join(record) or "no field"
        raise ValueError(f"expected one of the fields {', '.join(names)}, got {got}")
    return name, value


def optional_field(record: Mapping[str, Any], names: Sequence[str]) -> tuple[str, Any]:
    """Return the first name with a value that is not null; None for no value."""
    return next(((name, record[name]) for name in names if not is_null(record.get(name))), (names[0], None))


def is_null(value: Any) -> bool:
    """Return whether a value is null, or NaN, as pandas writes a missing text."""
    return value is None or value != value


def text_of(name: str, value: Any) -> str:
    """Check that the value of a field is a text."""
    if not isinstance(value, str):
        raise ValueError(f"expected a text in {name}, got {_KINDS[type(value)]}")
    return value


def query_of(record: Mapping[str, Any], names: Sequence[str]) -> str:
    """Return the text of a query, which must not be blank."""
    name, value = field(record, names)
    if not text_of(name, value).strip():
        raise ValueError(f"expected a text in {name}, got a blank one")
    return value


def id_of(record: Mapping[str, Any], names: Sequence[str]) -> str:
    """Return the id of a record, or another text or number; "" without one."""
    name, value = optional_field(record, names)
    return "" if value is None else label_of(name, value)


def label_of(name: str, value: Any) -> str:
    """Return the value of a field, a text or a number, as a text."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # pandas writes the integers of a column with gaps as 7.0
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else text_of(name, value)


def list_of(name: str, value: Any) -> list[Any]:
    """Return the value of a field as a list; a text is a list of one."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list | tuple):
        raise ValueError(f"expected a list in {name}, got {_KINDS[type(value)]}")
    return list(value)


def passage_of(name: str, value: Any) -> Passage:
    """Read a passage from the value of a field: a text, or an object with a text and perhaps an id and a title."""
    if not isinstance(value, dict):
        return Passage(text_of(name, value))
    return Passage(text_of(*field(value, TEXTS)), id_of(value, ("title",)), id_of(value, PASSAGE_IDS))


class Rows(NamedTuple):
    """Tab-separated lines as records."""

    names: tuple[str, ...]  # field of each column; "" for a column without a field
    expected: str  # description of the columns, for messages
    header: bool = False  # whether the first line has names
    quoted: bool = False  # whether quotes can enclose cells
    optional: int = 0  # number of columns at the end that lines may lack

    def record(self, line: bytes) -> dict[str, str]:
        """Return the cells of a line by field."""
        text = line.decode().rstrip("\r\n")
        try:
            cells = next(csv.reader([text], delimiter="\t")) if self.quoted else text.split("\t")
        except csv.Error as error:
            raise ValueError(str(error)) from error
        if not len(self.names) - self.optional <= len(cells) <= len(self.names):
            raise ValueError(f"expected {self.expected}, got {len(cells)}")
        return dict(zip(self.names, cells, strict=False))


def name_columns(cells: Sequence[str], **fields: Iterable[str]) -> tuple[str, ...]:
    """Return the field of each column by the names in the first line of a table.

    Names are compared by their letters and digits, in lower case. Of several known names of a field, the first counts.
    A column without a field has "".
    """
    columns = [_letters(cell) for cell in cells]
    result = [""] * len(columns)
    for field_name, names in fields.items():
        if name := next((name for name in map(_letters, names) if name in columns), None):
            result[columns.index(name)] = field_name
    return tuple(result)


def _letters(cell: str) -> str:
    return re.sub(r"[\W_]", "", cell.lower())
