"""Queries of an evaluation of dense text retrieval, and their relevance judgments."""

import ast
import csv
import math
import os
from typing import Any, NamedTuple

from infcl_jax.data.sources.captions import cell_captions
from infcl_jax.data.sources.text_records import (
    BYTE_ORDER_MARK,
    PASSAGE_IDS,
    QUERY,
    RecordFile,
    Rows,
    id_of,
    label_of,
    list_of,
    name_columns,
    optional_field,
    query_of,
)
from infcl_jax.runtime.file_io import open_regular

_QUERY_IDS = ("query_id", "query-id", "_id", "qid", "id")
_ANSWERS = ("answers", "answer")
_QUERIES = (*QUERY, "query_text", "question_text", "text")  # BEIR's queries have a "text"
_TABLE_QUERIES = (*_QUERIES, "title")  # names of columns, see `name_columns`; TREC's topics have a title
_TABLE_IDS = (*_QUERY_IDS, "question_id", "topic", "topic_id")
_JUDGED_QUERIES = (*(name for name in _TABLE_IDS if name not in ("_id", "id")), "query", "question")
_JUDGED_PASSAGES = (*(name for name in PASSAGE_IDS if name not in ("_id", "id")), "doc", "document_id", "passage")
_RELEVANCES = ("relevance", "score", "rel", "label", "grade", "judgment")
# Columns of judgments without names, by their number.
_JUDGMENTS = {2: ("query", "passage"), 3: ("query", "passage", "relevance"), 4: ("query", "", "passage", "relevance")}
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
    rows = None if records.is_json else _rows(records[0].decode(errors="replace"))
    questions = []
    for number, record in enumerate(records):
        try:
            if rows is None:
                fields = records.json(number)
                text, key = query_of(fields, _QUERIES), id_of(fields, _QUERY_IDS)
                questions.append(Question(text, key, _answers(*optional_field(fields, _ANSWERS))))
            elif number or not rows.header:
                questions.append(_row_question(rows, record))
        except ValueError as error:
            raise ValueError(f"{records.place(number)}: {type(error).__name__}: {error}") from error
    if not questions:
        raise ValueError(f"expected queries in {os.fspath(path)}, got only a header")
    return questions


def _answers(name: str, value: Any) -> tuple[str, ...]:
    """Return answers without blank ones; a text may be a list as pandas writes it."""
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


def _rows(line: str) -> Rows:
    """Tell the columns of a table of queries by its first line; tables with answers quote their cells."""
    cells = line.split("\t")
    names = name_columns(cells, query=_TABLE_QUERIES, id=_TABLE_IDS, answers=_ANSWERS)
    if "query" in names and len({*names} - {""}) > 1:
        return Rows(names, f"{len(cells)} columns", header=True, quoted="answers" in names)
    try:
        last = next(csv.reader([line.rstrip("\r")], delimiter="\t"))[-1].strip()
    except csv.Error:
        last = ""
    has_answers = last == "[]" or ({"'", '"'} & {*last} and _cell_answers(last) is not None)
    return Rows(("query", "answers"), "2 columns", quoted=True) if has_answers else Rows(("id", "query"), "2 columns")


def _row_question(rows: Rows, line: bytes) -> Question:
    """Read a line of a table of queries."""
    record = rows.record(line)
    answers = record.get("answers")
    if answers is not None and not rows.header and _cell_answers(answers.strip()) is None:
        raise ValueError(f"expected a list of answers as in line 1, got {answers[:40]!r}")
    return Question(query_of(record, ("query",)), record.get("id", "").strip(), _answers("answers", answers))


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
    names: tuple[str, ...] = ()
    with open_regular(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(_LONGEST_LINE), b"")):
            try:
                text = line.removeprefix(BYTE_ORDER_MARK if number == 0 else b"").decode().strip()
                if not text:
                    continue
                if not names:
                    names, is_header = _judgment_columns(text)
                    query, passage = names.index("query"), names.index("passage")
                    score = names.index("relevance") if "relevance" in names else None
                    if is_header:
                        continue
                cells = text.split()
                if len(cells) != len(names):
                    raise ValueError(f"{len(cells)} column(s)")
                relevance = 1.0 if score is None else float(cells[score])
                if not math.isfinite(relevance):
                    raise ValueError(f"the relevance {cells[-1]}")
            except ValueError as error:
                expected = f"{len(names)} columns" if names else "two to four columns"
                raise ValueError(
                    f"expected {expected}, query id, passage id and relevance, in line {number + 1} of "
                    f"{os.fspath(path)}, got {error}"
                ) from error
            if relevance > 0:
                judgments.setdefault(cells[query], set()).add(cells[passage])
    if not judgments:
        raise ValueError(f"expected relevant passages in {os.fspath(path)}, got none")
    return judgments


def _judgment_columns(line: str) -> tuple[tuple[str, ...], bool]:
    """Name the columns of judgments by the first line, and tell whether it has names."""
    cells = line.split("\t")
    if not 2 <= len(cells) <= 4 or _is_number(cells[-1]):  # only names have spaces
        cells = line.split()
    count = len(cells)
    if count not in _JUDGMENTS:
        comma = ", separated by commas; separate them by tabs" if "," in line or ";" in line else ""
        raise ValueError(f"{count} column(s){comma}")
    usual = _JUDGMENTS[count]
    named = name_columns(cells, query=_JUDGED_QUERIES, passage=_JUDGED_PASSAGES, relevance=_RELEVANCES)
    if not ({"query", "passage"} & {*named} if count == 2 else not _is_number(cells[-1])):
        return usual, False
    if all(name in ("", expected) for name, expected in zip(named, usual, strict=True)):
        return usual, True
    if {*usual} - {"", *named}:
        raise ValueError(f"the names {', '.join(cells)}; name the columns query-id, corpus-id and score")
    return named, True


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True
