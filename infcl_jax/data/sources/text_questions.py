"""Queries of an evaluation of dense text retrieval, and their relevance judgments."""

from __future__ import annotations

import ast
import csv
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from infcl_jax.data.sources.captions import cell_captions
from infcl_jax.data.sources.text_fields import (
    PASSAGE_IDS,
    QUERY,
    column_name,
    find_column,
    id_of,
    label_of,
    list_of,
    optional_field,
    query_of,
)
from infcl_jax.data.sources.text_records import BYTE_ORDER_MARK, RecordFile
from infcl_jax.runtime.file_io import open_regular

_QUERY_IDS = ("query_id", "query-id", "_id", "qid", "id")
_ANSWERS = ("answers", "answer")
_QUERIES = (*QUERY, "query_text", "question_text", "text")  # BEIR's queries have a "text"
_TABLE_QUERIES = (*_QUERIES, "title")  # names of columns, reduced by `column_name`; TREC's topics have a title
_TABLE_IDS = (*_QUERY_IDS, "question_id", "topic", "topic_id")
_JUDGED_QUERIES = (*(name for name in _TABLE_IDS if name not in ("_id", "id")), "query", "question")
_JUDGED_PASSAGES = (*(name for name in PASSAGE_IDS if name not in ("_id", "id")), "doc", "document_id", "passage")
_RELEVANCES = ("relevance", "score", "rel", "label", "grade", "judgment")
_LONGEST_LINE = 2**16  # bytes of a relevance judgment


class Question(NamedTuple):
    """Query of an evaluation.

    Examples:
      >>> Question("who wrote book 0?", answers=("author 0",)).key
      ''

    Attributes:
      text: text of the query.
      key: id of the query; "" without one.
      answers: answers of open-domain question answering; empty for queries with relevance judgments.
    """

    text: str
    key: str = ""
    answers: tuple[str, ...] = ()


def read_questions(path: str | os.PathLike) -> list[Question]:
    """Read the queries of an evaluation.

    Layouts: DPR's tab-separated question and list of answers (`nq-test.qa.csv`), MS MARCO's tab-separated id and query,
    and JSON with `question`, `query` or `text` and optionally `answers` and an id (`_id`, `id`, `qid` or `query_id`),
    such as BEIR's `queries.jsonl`. A table may start with a line of names, in any order. Without names, it has answers
    if its first line ends with a list of quoted texts.

    Examples:
      >>> read_questions("dpr/qa.csv")[0].answers
      ('author 0',)

    Raises:
      FileNotFoundError: the file does not exist.
      ValueError: a line is damaged, or there is no query.
    """
    records = RecordFile(path)
    is_json = records.is_array or records[0].lstrip()[:1] == b"{"
    columns = None if is_json else _Columns.of(records[0].decode(errors="replace"))
    questions = []
    for row, record in enumerate(records):
        try:
            if columns is None:
                questions.append(_json_question(records.json(row)))
            elif row or not columns.header:
                questions.append(columns.question(record.decode().rstrip("\r")))
        except (ValueError, csv.Error) as error:
            raise ValueError(f"{records.place(row)}: {type(error).__name__}: {error}") from error
    if not questions:
        raise ValueError(f"expected queries in {os.fspath(path)}, got only a header")
    return questions


def _json_question(record: Mapping[str, Any]) -> Question:
    name, answers = optional_field(record, _ANSWERS)
    return Question(query_of(record, _QUERIES), id_of(record, _QUERY_IDS), _answers(name, answers))


def _answers(name: str, value: Any) -> tuple[str, ...]:
    """Return answers without blank ones; a text may be a list as pandas writes it.

    Raises:
      ValueError: the value is neither a list nor a text, or an answer is neither a text nor a number.
    """
    if isinstance(value, str):
        answers = _cell_answers(value.strip())
        value = [value] if answers is None else answers
    texts = [] if value is None else [label_of(name, answer) for answer in list_of(name, value)]
    return tuple(text for text in texts if text.strip())


def _cell_answers(cell: str) -> list[Any] | None:
    """Parse a list of answers as JSON, Python or NumPy writes it; None for another text."""
    if cell[:1] != "[" or cell[-1:] != "]":
        return None
    for parse in (cell_captions, ast.literal_eval):  # the second for lists with numbers
        try:
            items = parse(cell)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue
        if isinstance(items, list) and items != [cell] and all(isinstance(item, str | int | float) for item in items):
            return items
    return None


class _Columns(NamedTuple):
    """Columns of a table of queries.

    Attributes:
      text: index of the query.
      key: index of its id, if any.
      answers: index of its answers, if any; such tables quote their columns.
      width: number of columns.
      header: whether the first line has names.
    """

    text: int
    key: int | None
    answers: int | None
    width: int
    header: bool

    @classmethod
    def of(cls, line: str) -> _Columns:
        """Tell the columns by the first line."""
        cells = line.split("\t")
        names = [column_name(cell) for cell in cells]
        text, key, answers = (find_column(names, known) for known in (_TABLE_QUERIES, _TABLE_IDS, _ANSWERS))
        if text is not None and (key is not None or answers is not None):
            return cls(text, key, answers, len(cells), header=True)
        try:
            last = next(csv.reader([line.rstrip("\r")], delimiter="\t"))[-1].strip()
        except csv.Error:
            last = ""
        if last == "[]" or ({"'", '"'} & {*last} and _cell_answers(last) is not None):
            return cls(0, None, 1, 2, header=False)
        return cls(1, 0, None, 2, header=False)

    def question(self, line: str) -> Question:
        """Read a line.

        Raises:
          ValueError: the line has other columns, or a blank query.
        """
        cells: Sequence[str] = line.split("\t")
        if self.answers is not None:
            cells = next(csv.reader([line], delimiter="\t"))
        if len(cells) != self.width:
            raise ValueError(f"expected {self.width} columns, got {len(cells)}")
        answers = None if self.answers is None else cells[self.answers]
        if answers is not None and not self.header and _cell_answers(answers.strip()) is None:
            raise ValueError(f"expected a list of answers as in line 1, got {answers[:40]!r}")
        key = "" if self.key is None else cells[self.key].strip()
        return Question(query_of({"query": cells[self.text]}, QUERY), key, _answers("answers", answers))


def read_judgments(path: str | os.PathLike) -> dict[str, set[str]]:
    """Read relevance judgments.

    Columns are separated by white space, and may start with a line of names, which then tell their order:

    - TREC and MS MARCO: query id, iteration, passage id, relevance;
    - BEIR: query id, passage id, relevance;
    - query id and passage id of relevant passages.

    A relevance above 0 is relevant.

    Examples:
      >>> read_judgments("dpr/qrels.tsv")["0"]
      {'0'}

    Returns:
      Ids of the relevant passages by query id.

    Raises:
      FileNotFoundError: the file does not exist.
      ValueError: a line has other columns, or no passage is relevant.
    """
    judgments: dict[str, set[str]] = {}
    columns = None
    with open_regular(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(_LONGEST_LINE), b"")):
            try:
                text = line.removeprefix(BYTE_ORDER_MARK if number == 0 else b"").decode().strip()
                if not text:
                    continue
                if columns is None:
                    columns, is_header = _judgment_columns(text)
                    if is_header:
                        continue
                cells = text.split()
                if len(cells) != columns.width:
                    raise ValueError(f"{len(cells)} column(s)")
                relevance = 1.0 if columns.relevance is None else float(cells[columns.relevance])
                if not math.isfinite(relevance):
                    raise ValueError(f"the relevance {cells[-1]}")
            except ValueError as error:
                expected = "two to four columns" if columns is None else f"{columns.width} columns"
                raise ValueError(
                    f"expected {expected}, query id, passage id and relevance, in line {number + 1} of "
                    f"{os.fspath(path)}, got {error}"
                ) from error
            if relevance > 0:
                judgments.setdefault(cells[columns.query], set()).add(cells[columns.passage])
    if not judgments:
        raise ValueError(f"expected relevant passages in {os.fspath(path)}, got none")
    return judgments


class _JudgmentColumns(NamedTuple):
    query: int
    passage: int
    relevance: int | None
    width: int


def _judgment_columns(line: str) -> tuple[_JudgmentColumns, bool]:
    """Tell the columns of judgments by the first line, and whether it has names.

    Raises:
      ValueError: there are too few or too many columns, or a name in an unusual order is unknown.
    """
    cells = line.split("\t")
    if not 2 <= len(cells) <= 4 or _is_number(cells[-1]):  # only names have spaces
        cells = line.split()
    count, names = len(cells), [column_name(cell) for cell in cells]
    if not 2 <= count <= 4:
        comma = ", separated by commas; separate them by tabs" if "," in line or ";" in line else ""
        raise ValueError(f"{count} column(s){comma}")
    usual = _JudgmentColumns(0, 2 if count == 4 else 1, None if count == 2 else count - 1, count)
    query, passage, relevance = (find_column(names, x) for x in (_JUDGED_QUERIES, _JUDGED_PASSAGES, _RELEVANCES))
    named = (query, passage) != (None, None)
    if not (named if count == 2 else not _is_number(cells[-1])):
        return usual, False
    if query in (None, usual.query) and passage in (None, usual.passage) and relevance in (None, usual.relevance):
        return usual, True
    if query is None or passage is None or (count > 2 and relevance is None):
        raise ValueError(f"the names {', '.join(cells)}; name the columns query-id, corpus-id and score")
    return _JudgmentColumns(query, passage, relevance if count > 2 else None, count), True


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True
