"""Training loss of dense text retrieval."""

from typing import Any, ClassVar

import jax.numpy as jnp

from infcl_jax.losses import Loss, retrieval_loss
from infcl_jax.losses.base import LossOutput


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
