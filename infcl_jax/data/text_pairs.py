"""Training batches of queries with passages."""

import copy
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from infcl_jax.data.iterator import STATS, TrainIterator
from infcl_jax.data.packing import PADDED, TextPacker
from infcl_jax.data.parallelism import READ, TOKENIZE, check_at_least, take_seconds, timed
from infcl_jax.data.reader import BAD_RECORDS, as_array, read_good
from infcl_jax.data.sources.text_records import Passage
from infcl_jax.data.sources.text_retrieval import QuerySource, RetrievalExample
from infcl_jax.data.tokenizers import BaseTokenizer

LEFT_OUT = "left_out_negatives"  # name in `TrainIterator.stats`, see `RetrievalExample.left_out`

_STREAM = 2**34  # offset of the seed in the keys of random generators, see `infcl_jax.data.pipeline`


@dataclasses.dataclass(frozen=True)
class PairTexts:
    """Texts and token ids of queries and passages.

    Examples:
      >>> texts = PairTexts(load_tokenizer("bytes", 32), query_length=24)
      >>> texts.queries(["who wrote book 0?"]).shape
      (1, 24)

    Attributes:
      tokenizer: tokenizer with the context length of the passages.
      query_length: tokens of a query, special tokens included; None: as many as of a passage.
      separator: text between the title and the text of a passage, such as " [SEP] ", which a tokenizer of BERT reads as
        its separator token.
    """

    tokenizer: BaseTokenizer
    query_length: int | None = None
    separator: str = " "

    def queries(self, texts: Sequence[str]) -> np.ndarray:
        """Encode n queries as int32 [n, query_length]."""
        # DPR replaces the typographic apostrophe, in training and in evaluation.
        return self.query_tokenizer([text.replace("\u2019", "'") for text in texts])

    @functools.cached_property
    def query_tokenizer(self) -> BaseTokenizer:
        """Tokenizer of the queries; one object, which warns of cut texts once."""
        if self.query_length is None:
            return self.tokenizer
        tokenizer = copy.copy(self.tokenizer)
        tokenizer.context_length = self.query_length
        return tokenizer

    def __call__(self, queries: Sequence[str], passages: Sequence[Passage], prefix: str = "") -> dict[str, np.ndarray]:
        """Encode n queries and m passages as the entries "query" and "passage" of a batch, with a prefix."""
        return {f"{prefix}query": self.queries(queries), f"{prefix}passage": self.passages(passages)}

    def passages(self, passages: Sequence[Passage]) -> np.ndarray:
        """Encode n passages, with their titles in front, as int32 [n, context_length]."""
        return self.tokenizer([f"{p.title}{self.separator}{p.text}" if p.title else p.text for p in passages])


@dataclasses.dataclass(frozen=True)
class PairReader:
    """Function that makes one chunk of a batch from (global row, sample index) pairs."""

    source: QuerySource
    texts: PairTexts
    hard_negatives: int
    positive: str
    seed: int
    teacher: PairTexts | None = None

    def __call__(self, rows: Sequence[tuple[int, int]]) -> dict[str, Any]:
        """Read the texts of the rows."""
        take_seconds()  # of a chunk that raised
        bad: dict[int, str] = {}
        with timed(READ):
            read = [read_good(self.source.__getitem__, index, len(self.source), bad) for _, index in rows]
        passages = [self._passages(row, example) for (row, _), (example, _) in zip(rows, read, strict=True)]
        size = 1 + self.hard_negatives
        with timed(TOKENIZE):
            queries = [example.query for example, _ in read]
            padded = [p for group in passages for p in (*group, *[Passage("")] * (size - len(group)))]
            ids = self.texts(queries, padded)
            if self.teacher is not None:
                ids |= self.teacher(queries, padded, "teacher_")
        return ids | {
            "passage_mask": np.concatenate([np.arange(size) < len(group) for group in passages]),
            "index": np.array([index for _, index in read], np.int64),
            BAD_RECORDS: as_array(bad),
            STATS: take_seconds() | {LEFT_OUT: sum(example.left_out for example, _ in read)},
        }

    def _passages(self, row: int, example: RetrievalExample) -> list[Passage]:
        """Choose the positive and the hard negatives of a row."""
        if self.positive == "first":
            return [example.positives[0], *example.negatives[: self.hard_negatives]]
        rng = np.random.Generator(np.random.Philox(key=np.array([_STREAM + self.seed, row], np.uint64)))
        chosen = rng.permutation(len(example.negatives))[: self.hard_negatives]
        return [example.positives[int(rng.integers(len(example.positives)))], *(example.negatives[i] for i in chosen)]


def pair_iterator(
    source: QuerySource,
    texts: PairTexts,
    *,
    batch_size: int,
    hard_negatives: int,
    seed: int,
    positive: str = "first",
    process_index: int = 0,
    process_count: int = 1,
    num_workers: int | None = None,
    num_threads: int | None = None,
    prefetch_batches: int | None = None,
    max_bad_records: float | None = None,
    teacher: PairTexts | None = None,
    packer: TextPacker = PADDED,
) -> TrainIterator:
    """Create an endless iterator of training batches of queries with passages.

    Order, epochs and resume are as in `infcl_jax.data.train_iterator`.

    Examples:
      >>> source, texts = QuerySource("dpr/train.json"), PairTexts(load_tokenizer("bytes", 32))
      >>> data = pair_iterator(source, texts, batch_size=4, hard_negatives=1, seed=0, num_workers=0)
      >>> batch = next(data)
      >>> batch["query"].shape, batch["passage"].shape
      ((4, 32), (8, 32))
      >>> data.close()

    Args:
      source: queries with passages.
      texts: tokenization of queries and passages.
      batch_size: queries of the global batch B, over all processes.
      hard_negatives: hard negatives n of each query; those that a query lacks are padding.
      seed: seed of order and choice, in [0, 2**32).
      positive: "first": the first positive and hard negatives of a query; "random": drawn in every epoch.
      process_index: index of this process.
      process_count: number of processes that share each batch; each gets b = B / process_count rows.
      num_workers: number of worker processes; 0: threads; None: chosen from the cores.
      num_threads: number of reading threads without workers; None: one per core.
      prefetch_batches: number of batches to prefetch; None: 2.
      max_bad_records: maximum number of different bad records to replace, see `infcl_jax.data.train_iterator`.
      teacher: tokenization of a teacher, which adds "teacher_query" and "teacher_passage"; None: none.
      packer: packing of queries and passages, which then are `PackedTokens`.

    Returns:
      An iterator of {"query": int32 [b, Lq], "passage": int32 [b (1 + n), L], "passage_mask": bool [b (1 + n)],
      "index": int64 [b]}. The passages of a query are consecutive, the positive first.

    Raises:
      ValueError: batch_size is not a multiple of the number of processes or exceeds the source.
      BadRecordError: raised during iteration, for more than `max_bad_records` bad records or 16 in a row.
    """
    check_at_least(0, hard_negatives=hard_negatives)
    return TrainIterator(
        source,  # type: ignore[arg-type]
        PairReader(source, texts, hard_negatives, positive, seed, teacher),
        batch_size=batch_size,
        seed=seed,
        row_bytes=(2 + hard_negatives) * 4 * texts.tokenizer.context_length,
        max_bad_records=max_bad_records,
        process_index=process_index,
        process_count=process_count,
        num_workers=num_workers,
        num_threads=num_threads,
        prefetch_batches=prefetch_batches,
        packer=packer,
    )
