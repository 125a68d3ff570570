"""Row sums of the pairwise sigmoid loss over all pairs of a sharded batch.

Strategies, main loops, windows and operands are those of `pairwise_lse`. This folder imports JAX, jaxtyping and
`pairwise_lse` only.
"""

from infcl_jax.ops.pairwise_sigmoid.api import PairwiseSigmoid, pairwise_sigmoid
from infcl_jax.ops.pairwise_sigmoid.implementations import SIGMOID_IMPLEMENTATIONS

__all__ = ["SIGMOID_IMPLEMENTATIONS", "PairwiseSigmoid", "pairwise_sigmoid"]
