"""Checked fields of the records of text retrieval."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

# Names of the fields in DPR's JSON, and in the JSON lines of tevatron, BEIR, FlagEmbedding and Sentence Transformers.
QUERY = ("question", "query", "anchor")
POSITIVES = ("positive_ctxs", "positive_passages", "positives", "pos", "positive")
NEGATIVES = ("hard_negative_ctxs", "negative_passages", "negatives", "neg", "negative")
FALLBACK = ("negative_ctxs",)  # of DPR, for a question without hard negatives
NUMBERED = re.compile(r"negative_\d+")  # of Sentence Transformers, one text each
PASSAGE_IDS = ("docid", "doc_id", "docno", "passage_id", "psg_id", "_id", "id", "pid", "corpus_id", "corpus-id")
TEXTS = ("text", "contents", "body", "passage", "content", "passage_text")
_KINDS = {dict: "an object", list: "a list", bool: "a boolean", int: "a number", float: "a number", type(None): "null"}


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
    """Return the first name whose value is not null, with the value.

    Raises:
      ValueError: the record has none of the names, or only null.
    """
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
    """Check a text.

    Args:
      name: field of the text, for the error.
      value: value of the field.

    Raises:
      ValueError: the value is no text.
    """
    if not isinstance(value, str):
        raise ValueError(f"expected a text in {name}, got {_kind(value)}")
    return value


def query_of(record: Mapping[str, Any], names: Sequence[str]) -> str:
    """Return the text of a query.

    Raises:
      ValueError: the record has no such text, or a blank one.
    """
    name, value = field(record, names)
    if not text_of(name, value).strip():
        raise ValueError(f"expected a text in {name}, got a blank one")
    return value


def id_of(record: Mapping[str, Any], names: Sequence[str]) -> str:
    """Return the id of a record; "" without one.

    Raises:
      ValueError: the id is neither a text nor a number.
    """
    name, value = optional_field(record, names)
    return "" if value is None else label_of(name, value)


def label_of(name: str, value: Any) -> str:
    """Return a text, or a number as a text.

    Raises:
      ValueError: the value is neither.
    """
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # pandas writes the integers of a column with gaps as 7.0
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else text_of(name, value)


def list_of(name: str, value: Any) -> list[Any]:
    """Return a list, or a list of a single text.

    Raises:
      ValueError: the value is neither.
    """
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list | tuple):
        raise ValueError(f"expected a list in {name}, got {_kind(value)}")
    return list(value)


def passage_of(name: str, value: Any) -> Passage:
    """Read a passage.

    Args:
      name: field of the passage, for the error.
      value: a text, or an object with a text and optionally an id and a title.

    Raises:
      ValueError: the value is neither, or its text is missing.
    """
    if not isinstance(value, dict):
        return Passage(text_of(name, value))
    title = optional_field(value, ("title",))[1]
    return Passage(
        text_of(*field(value, TEXTS)),
        "" if title is None else label_of("title", title),
        id_of(value, PASSAGE_IDS),
    )


class Rows(NamedTuple):
    """Tab-separated lines as records.

    Attributes:
      names: field of each column; "" for a column without a field.
      expected: description of the columns, for messages.
      header: whether the first line has names.
      quoted: whether quotes can enclose cells.
      optional: number of columns at the end that lines may lack.
    """

    names: tuple[str, ...]
    expected: str
    header: bool = False
    quoted: bool = False
    optional: int = 0

    def record(self, line: bytes) -> dict[str, str]:
        """Return the cells of a line by field.

        Raises:
          ValueError: the line is not UTF-8, has another number of columns, or a cell that is too long.
        """
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

    Names are compared by their letters and digits, in lower case.

    Args:
      cells: cells of the first line.
      fields: known names of each field, in order of preference.

    Returns:
      Field of each column; "" for a column without a field.
    """
    columns = [_letters(cell) for cell in cells]
    result = [""] * len(columns)
    for field_name, names in fields.items():
        for name in [name for name in map(_letters, names) if name in columns][:1]:
            result[columns.index(name)] = field_name
    return tuple(result)


def _letters(cell: str) -> str:
    return re.sub(r"[\W_]", "", cell.lower())


def _kind(value: Any) -> str:
    return _KINDS.get(type(value), type(value).__name__)
