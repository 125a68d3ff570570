"""Sources of dense text retrieval: queries with passages, and the corpus of an evaluation."""

import itertools
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from infcl_jax.data.sources.base import bad_record, check_index
from infcl_jax.data.sources.text_records import (
    FALLBACK,
    NEGATIVES,
    NUMBERED,
    PASSAGE_IDS,
    POSITIVES,
    QUERY,
    TEXTS,
    Passage,
    RecordFile,
    Rows,
    is_null,
    list_of,
    name_columns,
    optional_field,
    passage_of,
    query_of,
)
from infcl_jax.runtime.file_io import parse_json

_PROBED = 16  # first records, of which one must be JSON
_LABELS = ("label", "labels")  # of Sentence Transformers, whose "positive" then has negatives too


class RetrievalExample(NamedTuple):
    """Query with its passages.

    Attributes:
      query: text of the query.
      positives: passages that answer it, at least one.
      negatives: hard negatives, possibly none.
      left_out: number of hard negatives of the record that are positives of the query, not among `negatives`.
    """

    query: str
    positives: tuple[Passage, ...]
    negatives: tuple[Passage, ...]
    left_out: int = 0


class QuerySource:
    """Queries with positive and hard negative passages, read from files by offset.

    Layouts, told apart by the names of the fields:

    - DPR: a JSON array of `question`, `positive_ctxs`, `hard_negative_ctxs`, `negative_ctxs`;
    - tevatron: JSON lines of `query`, `positive_passages`, `negative_passages`;
    - FlagEmbedding: JSON lines of `query`, `pos`, `neg`;
    - Sentence Transformers: JSON lines of `anchor`, `positive`, `negative` or `negative_1`, `negative_2`, ...

    A passage is a string, or an object with `text` and optionally `title` and an id. A string in place of a list is one
    passage. Negatives may be missing or null. A hard negative with the id, or with the text and title, of a positive of
    its query is left out.

    Examples:
      >>> source = QuerySource("dpr/train.json")
      >>> len(source), source[0].query
      (8, 'who wrote book 0?')

    Args:
      path: the file.
      split: name of the split, for messages.

    Raises:
      FileNotFoundError: the file does not exist.
      ValueError: the file has no records, or another format.
    """

    def __init__(self, path: str | os.PathLike, split: str = "train"):
        self.name, self.split = os.fspath(path), split
        if not os.path.exists(path):
            raise FileNotFoundError(f"expected a file of queries with passages, got no file {self.name}; set dataset")
        self._records = RecordFile(path)
        if not self._records.is_array and not any(map(_is_object, itertools.islice(self._records, _PROBED))):
            raise ValueError(
                f"expected JSON lines or a JSON array of queries with passages in {self.name}, got "
                f"{_format_name(self._records[0])}; convert it"
            )

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> RetrievalExample:
        """Read an example; raise `BadRecordError` if it is damaged or has no positive passage."""
        try:
            record = self._records.json(index)
            query, positives = query_of(record, QUERY), _passages(record, POSITIVES)
            if labels := next((name for name in _LABELS if name in record), None):
                raise ValueError(f"expected positives and negatives in fields of their own, got {labels}")
            if not positives:
                raise ValueError(f"expected a positive passage in one of {', '.join(POSITIVES)}, got none")
            negatives = _passages(record, NEGATIVES) or _passages(record, FALLBACK)
            negatives += tuple(passage_of(n, x) for n, x in record.items() if NUMBERED.fullmatch(n) and not is_null(x))
        except ValueError as error:
            raise bad_record(f"record {index} of {self.name}, split {self.split}", error) from error
        known, keys = {passage[:2] for passage in positives}, {passage.key for passage in positives} - {""}
        kept = tuple(passage for passage in negatives if passage[:2] not in known and passage.key not in keys)
        return RetrievalExample(query, positives, kept, len(negatives) - len(kept))


def _is_object(record: bytes) -> bool:
    try:
        parse_json(record, "")
    except ValueError:
        return False
    return True


def _format_name(line: bytes) -> str:
    """Name the format of a file by its first line, which is not JSON."""
    if line.lstrip()[:1] == b"{":
        return "JSON objects over several lines, or damaged ones"
    return "TSV" if b"\t" in line else "CSV" if b"," in line else "other text"


def _passages(record: Mapping[str, Any], names: tuple[str, ...]) -> tuple[Passage, ...]:
    """Read the passages of a field; none if it is missing or null."""
    name, values = optional_field(record, names)
    passages = tuple(passage_of(name, value) for value in ([] if values is None else list_of(name, values)))
    if not all(passage.text.strip() or passage.title.strip() for passage in passages):
        raise ValueError(f"expected a text of each passage in {name}, got a blank one")
    return passages


class Corpus:
    """Passages of a corpus, read from a file by offset.

    Layouts: DPR's `psgs_w100.tsv` (a header, then id, quoted text and title), MS MARCO's `collection.tsv` (id and text,
    without quotes) and JSON lines with `text` or `contents`, an id and optionally a `title`, such as BEIR's. A header
    may name the columns in any order.

    Examples:
      >>> Corpus("dpr/corpus.tsv")[0]
      Passage(text='by author 0', title='Book 0', key='0')

    Args:
      path: file that ends in .tsv or .jsonl.

    Raises:
      FileNotFoundError: the file does not exist.
      ValueError: the file has no passages, or its header names no text.
    """

    def __init__(self, path: str | os.PathLike):
        self.name, self._records = os.fspath(path), RecordFile(path)
        self._rows = None if self._records.is_json else self._table(self._records[0].decode(errors="replace"))
        self._first = int(self._rows is not None and self._rows.header)
        if not len(self):
            raise ValueError(f"expected passages in {self.name}, got only a header")

    def _table(self, line: str) -> Rows:
        """Tell the columns by the first line."""
        cells = line.split("\t")
        names = name_columns(cells, text=TEXTS, title=("title",), id=PASSAGE_IDS)
        if "id" in name_columns(cells[:1], id=PASSAGE_IDS):
            names = ("id", *("" if name == "id" else name for name in names[1:]))
        is_number = any(re.sub(r"[\W_]", "", cell).isdigit() for cell in cells)
        if names[0] != "id" and (is_number or len({*names} - {""}) < 2):
            return Rows(("id", "text", "title"), "2 or 3 columns (id, text, title)", optional=1)
        if "text" not in names:
            raise ValueError(
                f"expected one of the columns {', '.join(TEXTS)} in line 1 of {self.name}, got "
                f"{', '.join(cell.strip() for cell in cells)}"
            )
        return Rows(names, f"the {len(cells)} columns of the header", header=True, quoted=True)

    def __len__(self) -> int:
        return len(self._records) - self._first

    def __getitem__(self, index: int) -> Passage:
        """Read a passage; raise `ValueError` if its record is damaged."""
        check_index(index, len(self))
        return self._passage(index, self._records[index + self._first])

    def __iter__(self) -> Iterator[Passage]:
        """Read all passages in order; raise `ValueError` if a record is damaged."""
        for index, record in enumerate(self._records, -self._first):
            if index >= 0:
                yield self._passage(index, record)

    def _passage(self, index: int, record: bytes) -> Passage:
        try:
            if self._rows is None:
                return passage_of("the record", parse_json(record, self.name))
            fields = self._rows.record(record)
            return Passage(fields["text"], fields.get("title", ""), fields.get("id", ""))
        except ValueError as error:
            raise ValueError(f"passage {index} of {self.name}: {error}") from error
