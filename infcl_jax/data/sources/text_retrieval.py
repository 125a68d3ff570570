"""Sources of dense text retrieval: queries with passages, and the corpus of an evaluation."""

from __future__ import annotations

import ast
import csv
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from infcl_jax.data.sources.base import bad_record
from infcl_jax.data.sources.text_records import RecordFile
from infcl_jax.file_io import open_regular

# Names of the fields in DPR's JSON, and in the JSON lines of tevatron and of MS MARCO's hard negatives.
_QUERY = ("question", "query")
_POSITIVES = ("positive_ctxs", "positive_passages", "positives", "pos")
_NEGATIVES = ("hard_negative_ctxs", "negative_passages", "negatives", "neg")
_FALLBACK = "negative_ctxs"  # of DPR, for a question without hard negatives
_IDS = ("docid", "passage_id", "psg_id", "_id", "id", "pid")
_TEXTS = ("text", "contents", "body")
_LONGEST_LINE = 2**16  # bytes of a relevance judgment


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


class RetrievalExample(NamedTuple):
    """Query with its passages.

    Attributes:
      query: text of the query.
      positives: passages that answer it, at least one.
      negatives: hard negatives, possibly none.
    """

    query: str
    positives: tuple[Passage, ...]
    negatives: tuple[Passage, ...]


class QuerySource:
    """Queries with positive and hard negative passages, read from files by offset.

    Layouts, told apart by the names of the fields:

    - DPR: a JSON array of `question`, `positive_ctxs`, `hard_negative_ctxs`, `negative_ctxs`;
    - tevatron: JSON lines of `query`, `positive_passages`, `negative_passages`;
    - others of MS MARCO: JSON lines of `query`, `pos` or `positives`, `neg` or `negatives`.

    A passage is a string, or an object with `text` and optionally `title`.

    Examples:
      >>> source = QuerySource("dpr/train.json")
      >>> len(source), source[0].query
      (8, 'who wrote book 0?')

    Args:
      path: the file.
      split: name of the split, for messages.

    Raises:
      FileNotFoundError: the file does not exist.
      ValueError: the file has no records.
    """

    def __init__(self, path: str | os.PathLike, split: str = "train"):
        self.name, self.split, self._records = os.fspath(path), split, RecordFile(path)

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> RetrievalExample:
        """Read an example; raise `BadRecordError` if it is damaged or has no positive passage."""
        try:
            record = self._records.json(index)
            positives = _passages(_field(record, _POSITIVES))
            if not positives:
                raise ValueError("expected a positive passage, got none")
            negatives = _passages(next((record[n] for n in _NEGATIVES if n in record), ())) or _passages(
                record.get(_FALLBACK, ())
            )
            return RetrievalExample(str(_field(record, _QUERY)), positives, negatives)
        except (ValueError, KeyError, TypeError) as error:
            raise bad_record(f"record {index} of {self.name}, split {self.split}", error) from error


class Corpus:
    """Passages of a corpus, read from a file by offset.

    Layouts: DPR's `psgs_w100.tsv` (a header, then id, quoted text and title), MS MARCO's `collection.tsv` (id and text)
    and JSON lines with `text` or `contents`, an id and optionally a `title`.

    Examples:
      >>> Corpus("dpr/corpus.tsv")[0]
      Passage(text='by author 0', title='Book 0', key='0')

    Args:
      path: file that ends in .tsv or .jsonl.

    Raises:
      FileNotFoundError: the file does not exist.
      ValueError: the file has no passages.
    """

    def __init__(self, path: str | os.PathLike):
        self.name, self._records = os.fspath(path), RecordFile(path)
        self._json = self._records[0].lstrip()[:1] == b"{"
        self._header = not self._json and self._records[0].split(b"\t")[0].strip() == b"id"
        if not len(self):
            raise ValueError(f"expected passages in {self.name}, got only a header")

    def __len__(self) -> int:
        return len(self._records) - self._header

    def __getitem__(self, index: int) -> Passage:
        """Read a passage.

        Raises:
          IndexError: the index is negative or too large.
          ValueError: the record is damaged.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"index must be in [0, {len(self)}), got {index}")
        row = index + self._header
        try:
            if self._json:
                return _passage(self._records.json(row))
            line = self._records[row].decode().rstrip("\r\n")
            fields = next(csv.reader([line], delimiter="\t")) if self._header else line.split("\t")
            return Passage(fields[1], fields[2] if len(fields) > 2 else "", fields[0])
        except (ValueError, KeyError, TypeError, csv.Error) as error:
            raise ValueError(f"passage {index} of {self.name}: {error}") from error
        except IndexError as error:
            raise ValueError(f"passage {index} of {self.name}: expected an id and a text in a line") from error


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
    and JSON with `question` or `query` and optionally `answers` and an id.

    Examples:
      >>> read_questions("dpr/qa.csv")[0].answers
      ('author 0',)

    Raises:
      FileNotFoundError: the file does not exist.
      ValueError: a line is damaged.
    """
    records = RecordFile(path)
    is_json = records.is_array or records[0].lstrip()[:1] == b"{"
    questions = []
    for row in range(len(records)):
        try:
            questions.append(_json_question(records.json(row)) if is_json else _question(records[row].decode()))
        except Exception as error:  # `ast` raises any exception, up to MemoryError for deep nesting
            raise ValueError(f"line {row + 1} of {os.fspath(path)}: {type(error).__name__}: {error}") from error
    return questions


def _json_question(record: Mapping[str, Any]) -> Question:
    key, answers = str(record.get("query_id", record.get("_id", ""))), record.get("answers", ())
    if not isinstance(answers, list | tuple):
        raise ValueError(f"expected a list of answers, got {type(answers).__name__}")
    return Question(str(_field(record, _QUERY)), key, tuple(map(str, answers)))


def _question(line: str) -> Question:
    line = line.rstrip("\r")
    fields = line.split("\t")
    if len(fields) != 2:
        raise ValueError(f"expected two columns, got {len(fields)}")
    if not fields[1].lstrip('"').startswith("["):
        return Question(fields[1], key=fields[0])
    text, answers = next(csv.reader([line], delimiter="\t"))  # only these files quote their columns
    return Question(text, answers=tuple(map(str, ast.literal_eval(answers))))


def read_judgments(path: str | os.PathLike) -> dict[str, set[str]]:
    """Read relevance judgments in TREC's four columns: query id, iteration, passage id, relevance.

    Examples:
      >>> read_judgments("dpr/qrels.tsv")["0"]
      {'0'}

    Returns:
      Ids of the relevant passages by query id.

    Raises:
      FileNotFoundError: the file does not exist.
      ValueError: a line has other columns.
    """
    judgments: dict[str, set[str]] = {}
    with open_regular(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(_LONGEST_LINE), b"")):
            try:
                query, _, passage, relevance = line.decode().split()
                relevant = int(relevance) > 0
            except ValueError as error:
                raise ValueError(f"expected four columns in line {number + 1} of {path}, got {error}") from error
            if relevant:
                judgments.setdefault(query, set()).add(passage)
    return judgments


def _field(record: Mapping[str, Any], names: Sequence[str]) -> Any:
    for name in names:
        if name in record:
            return record[name]
    raise ValueError(f"expected one of the fields {', '.join(names)}, got {', '.join(record)}")


def _passages(values: Sequence[Any]) -> tuple[Passage, ...]:
    return tuple(_passage(value) for value in values)


def _passage(value: Any) -> Passage:
    if isinstance(value, str):
        return Passage(value)
    key = next((str(value[name]) for name in _IDS if name in value), "")
    return Passage(str(_field(value, _TEXTS)), str(value.get("title") or ""), key)
