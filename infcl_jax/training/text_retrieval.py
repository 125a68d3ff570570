"""Training of dense text retrieval: settings and loss."""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp

from infcl_jax.losses import Loss, retrieval_loss
from infcl_jax.losses.base import LossOutput
from infcl_jax.ops.common.checks import check_choice

SELECTIONS = ("first", "random")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextRetrievalConfig:
    """Settings of dense text retrieval.

    Examples:
      >>> TextRetrievalConfig(hard_negatives=7, positive="random").query_length is None
      True

    Attributes:
      hard_negatives: hard negatives of each query in a batch; those that a query lacks are masked.
      positive: positive and hard negatives of a query: the "first" ones of the file, or drawn at "random".
      query_length: tokens of a query; None: those of a passage.
      separator: text between the title and the text of a passage.
      corpus: path of the passages to search in evaluations; None: no evaluation.
      questions: path of the questions of evaluations.
      judgments: path of the relevance judgments; None: questions have answers.

    Raises:
      ValueError: a value is out of range, or `corpus` and `questions` are not set together.
    """

    hard_negatives: int = 1
    positive: str = "first"
    query_length: int | None = None
    separator: str = " "
    corpus: str | None = None
    questions: str | None = None
    judgments: str | None = None

    def __post_init__(self) -> None:
        check_choice("text_retrieval.positive", self.positive, SELECTIONS)
        if self.hard_negatives < 0:
            raise ValueError(f"expected text_retrieval.hard_negatives >= 0, got {self.hard_negatives}")
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
        """Compute the loss of a `TextPairOutput` for the global batch.

        Args:
          output: features of b queries and b * p passages.
          **inputs: `passage_mask`, bool [b * p], False for padding of queries with fewer than p passages.
        """
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
