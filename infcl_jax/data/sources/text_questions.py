"""Queries of an evaluation of dense text retrieval, and their relevance judgments."""

from __future__ import annotations

import ast
import csv
import math
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from infcl_jax.data.sources.text_fields import QUERY, id_of, label_of, list_of, optional_field, query_of
from infcl_jax.data.sources.text_records import BYTE_ORDER_MARK, RecordFile
from infcl_jax.file_io import open_regular

_QUERY_IDS = ("query_id", "query-id", "_id", "qid", "id")
_ANSWERS = ("answers", "answer")
_QUERIES = (*QUERY, "text")  # BEIR's queries have a "text"
_OTHER_IDS = ("queryid", "q_id", "question_id", "topic", "topic_id")
_NAMES = {*_QUERY_IDS, *_OTHER_IDS, *_QUERIES, *_ANSWERS}  # of columns, in a first line
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
    such as BEIR's `queries.jsonl`. A table may start with a line of names.

    Examples:
      >>> read_questions("dpr/qa.csv")[0].answers
      ('author 0',)

    Raises:
      FileNotFoundError: the file does not exist.
      ValueError: a line is damaged, or there is no query.
    """
    records = RecordFile(path)
    is_json = records.is_array or records[0].lstrip()[:1] == b"{"
    questions = []
    for row, record in enumerate(records):
        try:
            if is_json:
                questions.append(_json_question(records.json(row)))
            elif row or not _is_header(record):
                questions.append(_question(record.decode()))
        except Exception as error:  # `ast` raises any exception, up to MemoryError for deep nesting
            raise ValueError(f"{records.place(row)}: {type(error).__name__}: {error}") from error
    if not questions:
        raise ValueError(f"expected queries in {os.fspath(path)}, got only a header")
    return questions


def _json_question(record: Mapping[str, Any]) -> Question:
    name, answers = optional_field(record, _ANSWERS)
    texts = [] if answers is None else [label_of(name, answer) for answer in list_of(name, answers)]
    return Question(query_of(record, _QUERIES), id_of(record, _QUERY_IDS), tuple(texts))


def _is_header(line: bytes) -> bool:
    """Return whether all columns of a line are names of columns."""
    return all(cell.strip().lower() in _NAMES for cell in line.decode(errors="replace").split("\t"))


def _question(line: str) -> Question:
    line = line.rstrip("\r")
    fields = line.split("\t")
    if len(fields) != 2:
        raise ValueError(f"expected two columns, got {len(fields)}")
    if not fields[1].lstrip('"').startswith("["):
        return Question(query_of({"query": fields[1]}, QUERY), fields[0].strip())
    text, answers = next(csv.reader([line], delimiter="\t"))  # only these files quote their columns
    texts = list_of("answers", ast.literal_eval(answers))
    return Question(query_of({"question": text}, QUERY), answers=tuple(label_of("answers", text) for text in texts))


def read_judgments(path: str | os.PathLike) -> dict[str, set[str]]:
    """Read relevance judgments.

    Columns are separated by white space, and may start with a line of names:

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
                cells = line.removeprefix(BYTE_ORDER_MARK if number == 0 else b"").decode().split()
                if not cells:
                    continue
                first, columns = columns is None, columns or len(cells)
                if len(cells) != columns or not 2 <= columns <= 4:
                    raise ValueError(f"{len(cells)} column(s)")
                if first and cells[0].lower() in _NAMES:
                    continue
                relevance = 1.0 if columns == 2 else float(cells[-1])
                if not math.isfinite(relevance):
                    raise ValueError(f"the relevance {cells[-1]}")
            except ValueError as error:
                expected = "two to four columns" if columns is None or not 2 <= columns <= 4 else f"{columns} columns"
                raise ValueError(
                    f"expected {expected}, query id, passage id and relevance, in line {number + 1} of "
                    f"{os.fspath(path)}, got {error}"
                ) from error
            if relevance > 0:
                judgments.setdefault(cells[0], set()).add(cells[2 if columns == 4 else 1])
    if not judgments:
        raise ValueError(f"expected relevant passages in {os.fspath(path)}, got none")
    return judgments
