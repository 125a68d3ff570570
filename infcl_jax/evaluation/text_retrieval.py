"""Evaluation of dense text retrieval by exact search of a corpus."""

import dataclasses
import functools
import hashlib
import logging
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import flax.linen as nn
import numpy as np
import regex
from jax.sharding import Mesh

from infcl_jax.data.sources.text_questions import Question
from infcl_jax.data.sources.text_records import Passage
from infcl_jax.data.sources.text_retrieval import Corpus
from infcl_jax.data.text_pairs import PairTexts
from infcl_jax.evaluation.results import TaskResult, flat_metrics
from infcl_jax.inference.features import TowerEncoder, encode_texts
from infcl_jax.inference.search import top_k
from infcl_jax.runtime.progress import Progress

HITS, MRR, RECALL = (20, 100), 10, 1000  # cutoffs of DPR's accuracy and of MS MARCO's MRR and recall
_BLOCK = 2**17  # passages whose features are in memory at once: 400 MB of 768 floats
_TOKEN = regex.compile(r"[\p{L}\p{M}\p{N}]+|[^\p{Z}\p{C}]")

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, eq=False)
class TextRetrievalSuite:
    """Evaluation of a dual encoder of queries and passages on a corpus.

    Questions with answers give the accuracy at 20 and 100: the fraction whose first k passages contain an answer
    (Karpukhin et al. 2020, section 4). Relevance judgments give MRR@10 and recall@1000, over the queries with a
    relevant passage. Passages that share an id are one document, at the rank of the best of them.

    The corpus is encoded block by block. The best passages so far are merged with each block's, so neither its
    features nor the similarities of all pairs are in memory at once.

    Examples:
      >>> pair, ids = build_model(text_pair_config("bert-tiny")), np.zeros((1, 64), np.int32)
      >>> parameters = replicate(mesh, jax.device_get(jax.jit(pair.init)(jax.random.key(0), ids, ids)))
      >>> texts, corpus = PairTexts(load_tokenizer("bytes", 64)), Corpus("dpr/corpus.tsv")
      >>> suite = TextRetrievalSuite(pair, texts, mesh, corpus, read_questions("dpr/qa.csv"))
      >>> suite(parameters)["text_retrieval/top20"]  # of 8 passages
      1.0

    Attributes:
      model: a `TextPair` module.
      texts: tokenization of queries and passages.
      mesh: mesh with an axis "data".
      corpus: passages; None: no evaluation.
      questions: queries.
      judgments: ids of the relevant passages by query id; None without judgments.
      batch_size: texts encoded at once, over all devices.
      block: passages whose features are in memory at once.
      say: function that prints a line of progress.
      check: function called before each block, which may raise to end an evaluation.
      names: names of the questions and of the judgments in messages.

    Raises:
      ValueError: an evaluation has neither answers nor judgments of its questions, or no relevant passage is in the
        corpus.
    """

    model: nn.Module
    texts: PairTexts
    mesh: Mesh
    corpus: Corpus | None = None
    questions: Sequence[Question] = ()
    judgments: Mapping[str, set[str]] | None = None
    batch_size: int = 256
    block: int = _BLOCK
    say: Callable[[str], object] = lambda line: None
    check: Callable[[], None] = lambda: None
    names: tuple[str, str] = ("the questions", "the judgments")

    chance: ClassVar[Mapping[str, float]] = {}

    def __call__(self, variables: Any, grid_path: Any = None) -> dict[str, float]:
        """Evaluate a model; return metrics such as `text_retrieval/top20`."""
        return flat_metrics(self.results(variables))

    @property
    def metric_names(self) -> list[str]:
        """Names of all results, sorted; none without a corpus."""
        names = [f"top{k}" for k in HITS] if self._answered else []
        names += [f"mrr{MRR}", f"recall{RECALL}"] if self.judgments is not None else []
        return sorted(f"text_retrieval/{name}" for name in names) if self.corpus is not None else []

    @functools.cached_property
    def _answered(self) -> list[int]:
        """Rows of the questions with answers."""
        return [row for row, question in enumerate(self.questions) if question.answers]

    @functools.cached_property
    def _relevant(self) -> dict[int, set[str]]:
        """Ids of the relevant passages, by row of the judged questions."""
        judgments, (questions, name) = self.judgments or {}, self.names
        rows = {row: judgments[x.key] for row, x in enumerate(self.questions) if judgments.get(x.key)}
        if not rows and (judgments or not self._answered):
            keys = min(judgments, default=None), next((question.key for question in self.questions), None)
            ids = "" if None in keys else f", such as {keys[0]!r} in the judgments and {keys[1]!r} in the queries"
            if self._answered:
                raise ValueError(
                    f"expected judgments of the queries of {questions} in {name}, got others{ids}; give both the same"
                    " ids"
                )
            raise ValueError(
                f"expected answers in {questions}, or judgments of its queries, got neither{ids}; set "
                "text_retrieval.judgments to a file with the ids of the queries"
            )
        if not rows:
            return rows
        assert self.corpus is not None
        judged = set().union(*rows.values())
        unknown = judged - {passage.key for passage in self.corpus if passage.key in judged}
        if unknown == judged:
            raise ValueError(
                f"expected the passages of {name} in {self.corpus.name}, got none of {len(judged)}, such as "
                f"{min(judged)!r} where the corpus has {self.corpus[0].key!r}; give both the same ids"
            )
        absent = len(judgments) - len({self.questions[row].key for row in rows})
        if absent or unknown:
            _logger.warning(
                "%d of %d judged queries of %s are not in %s and not counted; %d of %d judged passages are not in %s "
                "and count as not found",
                *(absent, len(judgments), name, questions, len(unknown), len(judged), self.corpus.name),
            )
        return rows

    def check_inputs(self) -> None:
        """Check questions and judgments against the corpus, and warn of those that are missing.

        Raises:
          ValueError: there are neither answers nor judgments of the questions, or no relevant passage is in the corpus.
        """
        if self.corpus is not None:
            _ = self._relevant

    def results(self, variables: Any, grid_path: Any = None, *, examples: bool = False) -> list[TaskResult]:
        """Evaluate a model; return one result, or none without a corpus.

        Text retrieval has no images, so `grid_path` and `examples` have no effect.
        """
        if self.corpus is None:
            return []
        self.check_inputs()
        metrics, size = self.metrics(self.search(variables)), len(self.corpus)
        main = next(iter(metrics))
        return [TaskResult(name="text_retrieval", kind="retrieval", metrics=metrics, main_metric=main, images=size)]

    def search(self, variables: Any) -> np.ndarray:
        """Find the passages with the largest dot product of each question.

        Returns:
          int64 [Q, k], rows of the corpus in descending order. k is the largest cutoff of the metrics, or larger where
          passages share ids, so that each question has as many documents.
        """
        assert self.corpus is not None
        k, judged = RECALL if self.judgments is not None else max(HITS), self.judgments is not None
        query = self._encode("query", variables, self.texts.queries, [question.text for question in self.questions])
        score, row = np.empty((len(query), 0)), np.empty((len(query), 0), np.int64)
        document = np.arange(len(self.corpus))  # without judgments, each passage counts
        progress = Progress(self.corpus.name, len(self.corpus), "passages", self.say)
        for start in range(0, len(self.corpus), self.block):
            self.check()
            passages = [self.corpus[i] for i in range(start, min(start + self.block, len(self.corpus)))]
            feature = self._encode("passage", variables, self.texts.passages, passages)
            rows = slice(start, start + len(passages))
            if judged:
                document[rows] = [_document_id(p.key) if p.key else i for i, p in enumerate(passages, start)]
            block_score, block_row = self._search_block(query, feature, document[rows], k)
            score, row = np.concatenate([score, block_score], 1), np.concatenate([row, block_row + start], 1)
            best = np.argsort(-score, axis=1, kind="stable")
            score, row = np.take_along_axis(score, best, 1), np.take_along_axis(row, best, 1)
            columns = columns_of_documents(document[row], k)
            score, row = score[:, :columns], row[:, :columns]
            progress.add(len(passages))
        return row

    def _search_block(
        self, query: np.ndarray, feature: np.ndarray, document: np.ndarray, k: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Find the best passages of a block, with at least k documents of each question if it has as many."""
        count = min(k, len(feature))
        while True:
            score, row = dot_product_top_k(query, feature, count, self.mesh)
            if count == len(feature) or columns_of_documents(document[row], k) <= count:
                return score, row
            count = min(2 * count, len(feature))

    def metrics(self, row: np.ndarray) -> dict[str, float]:
        """Score the results of a search.

        Args:
          row: int [Q, k], rows of the corpus, best first.

        Raises:
          ValueError: see `check_inputs`.
        """
        metrics: dict[str, float] = {}
        relevant = self._relevant
        if self._answered:
            ranks = []  # of the first passage with an answer
            for question, rows in ((self.questions[i], row[i, : max(HITS)]) for i in self._answered):
                hit = (k for k, i in enumerate(rows) if has_answer(question.answers, self._passage(i).text))
                ranks.append(next(hit, np.inf))
            metrics |= {f"top{k}": float(np.mean(np.array(ranks) < k)) for k in HITS}
        if relevant:
            # Of documents in the order of their best passages.
            documents = [dict.fromkeys(self._passage(i).key or int(i) for i in row[i]) for i in relevant]
            hits = [
                np.array([key in keys for key in found])
                for found, keys in zip(documents, relevant.values(), strict=True)
            ]
            metrics[f"mrr{MRR}"] = float(np.mean([1 / (1 + h.argmax()) if (h := x[:MRR]).any() else 0 for x in hits]))
            recall = [x[:RECALL].sum() / len(keys) for x, keys in zip(hits, relevant.values(), strict=True)]
            metrics[f"recall{RECALL}"] = float(np.mean(recall))
        return metrics

    def _passage(self, index: Any) -> Passage:
        assert self.corpus is not None
        return self.corpus[int(index)]

    def _encode(self, name: str, variables: Any, tokenize: Callable, texts: Sequence[Any]) -> np.ndarray:
        encode = TowerEncoder(self.model, f"encode_{name}")
        return encode_texts(encode, variables, tokenize, texts, self.mesh, self.batch_size)


def columns_of_documents(document: np.ndarray, k: int) -> int:
    """Return the first columns of [Q, c] in which every row has k different documents; c + 1 if a row has fewer."""
    if document.shape[1] < k or not len(document):
        return document.shape[1] + 1
    order = np.argsort(document, axis=1, kind="stable")
    ordered = np.take_along_axis(document, order, 1)
    first = np.ones(document.shape, bool)
    first[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    seen = np.empty(document.shape, bool)
    np.put_along_axis(seen, order, first, 1)
    return int((seen.cumsum(axis=1, dtype=np.int32) < k).sum(axis=1).max()) + 1


def _document_id(key: str) -> int:
    """Hash an id; the same on all processes, as the searches of a collective must be."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), signed=True)


def dot_product_top_k(query: np.ndarray, passage: np.ndarray, k: int, mesh: Mesh) -> tuple[np.ndarray, np.ndarray]:
    """Find the k passages of largest dot product with each query.

    One more coordinate gives all passages the length M of the longest one. The cosine of the angle to a query, whose
    coordinate is 0, is then the dot product over M and the query's length, so `top_k` finds the same order (Bachrach et
    al. 2014, "Speeding Up the Xbox Recommender System Using a Euclidean Transformation for Inner-Product Spaces").
    Dot products that differ by less than 1e-6 of M and the query's length may change places at the end of the k.

    Args:
      query: float [Q, D], the same on every process.
      passage: float [G, D].
      k: number of neighbors, in [1, G].
      mesh: mesh with an axis "data".

    Returns:
      Dot products float64 [Q, k] in descending order, and rows int32 [Q, k].
    """
    query, passage = query.astype(np.float64), passage.astype(np.float64)
    squares = np.sum(passage**2, axis=1)
    longest = max(float(squares.max()), 1e-12)
    extended = np.concatenate([passage, np.sqrt(np.maximum(longest - squares, 0))[:, None]], axis=1)
    padded = np.concatenate([query, np.zeros((len(query), 1))], axis=1)
    _, row = top_k(padded.astype(np.float32), extended.astype(np.float32), k, mesh)
    score = np.stack([passage[rows] @ x for x, rows in zip(query, row, strict=True)])
    order = np.lexsort((row, -score))
    return np.take_along_axis(score, order, 1), np.take_along_axis(row, order, 1)


def has_answer(answers: Sequence[str], text: str) -> bool:
    """Return whether a text contains an answer as consecutive tokens, as in DPR's evaluation.

    Text and answers are decomposed (NFD) and in lower case. Tokens are runs of letters, marks and digits, and each
    other visible character (Chen et al. 2017, "Reading Wikipedia to Answer Open-Domain Questions").
    """
    words = f" {' '.join(_answer_tokens(text))} "
    return any((tokens := _answer_tokens(answer)) and f" {' '.join(tokens)} " in words for answer in answers)


def _answer_tokens(text: str) -> list[str]:
    return _TOKEN.findall(unicodedata.normalize("NFD", text).lower())
