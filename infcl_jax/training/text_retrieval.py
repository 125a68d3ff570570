"""Training of dense text retrieval: settings and loss."""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp

from infcl_jax.losses import Loss, retrieval_loss
from infcl_jax.losses.base import LossOutput
from infcl_jax.schema import Range, Section, setting

SELECTIONS = ("first", "random")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextRetrievalConfig(Section, prefix="text_retrieval."):
    """Settings of dense text retrieval.

    Examples:
      >>> TextRetrievalConfig(hard_negatives=7, positive="random").query_length is None
      True

    Raises:
      ValueError: a value is out of range, or `corpus` and `questions` are not set together.
    """

    hard_negatives: int = setting(
        1,
        "hard negatives of each query in a batch, also negatives of the other queries; those that a query lacks are "
        "masked",
        Range(0, 1024),
        fixed=True,
    )
    positive: str = setting(
        "first",
        'positive and hard negatives of a query: the "first" ones of the file, or drawn at "random" in every epoch',
        SELECTIONS,
        fixed=True,
    )
    query_length: int | None = setting(
        None, "tokens of a query; None: as many as of a passage, text.context_length", Range(3, 2**16)
    )
    separator: str = setting(
        " ", 'text between the title and the text of a passage; " [SEP] " with tokenizers of BERT, as in DPR'
    )
    corpus: str | None = setting(
        None, "passages to search in evaluations, .tsv or .jsonl; None: no evaluation", evaluated=True
    )
    questions: str | None = setting(
        None,
        "questions of evaluations with answers, or queries with text_retrieval.judgments",
        evaluated=True,
    )
    judgments: str | None = setting(
        None,
        "relevant passages of the queries, in the columns of TREC or BEIR; None: questions have answers",
        evaluated=True,
    )

    def check(self) -> None:
        """Check that corpus and questions belong together."""
        if (self.corpus is None) != (self.questions is None):
            raise ValueError("expected text_retrieval.corpus and text_retrieval.questions together, got one; set both")
        if self.judgments is not None and self.corpus is None:
            raise ValueError("expected text_retrieval.corpus with text_retrieval.judgments, got None")


class RetrievalLoss(Loss):
    """`retrieval_loss` of queries against the passages of the global batch, as a training loss.

    The passages of a query are consecutive rows, the positive first. Each query has the passages of the other queries
    as negatives, their hard negatives included.
    """

    inputs: ClassVar[tuple[str, ...]] = ("passage_mask",)

    def __call__(self, output: Any, **inputs: Any) -> LossOutput:
        """Compute the loss of b queries and b * p passages; `passage_mask` [b * p] is False for padding."""
        queries, passages = output.query.shape[0], output.passage.shape[0]
        value = retrieval_loss(
            output.query,
            output.passage,
            output.logit_scale,
            labels=jnp.arange(queries, dtype=jnp.int32) * (passages // queries),
            axis_name=self.axis_name,
            mesh=self.mesh,
            passage_mask=inputs["passage_mask"],
            implementation=self.implementation,
        )
        return LossOutput(value)
