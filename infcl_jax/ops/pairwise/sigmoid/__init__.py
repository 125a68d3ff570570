"""Row sums of the pairwise sigmoid loss over all pairs of a sharded batch."""

from infcl_jax.ops.pairwise.sigmoid.api import SIGMOID_IMPLEMENTATIONS, PairwiseSigmoid, pairwise_sigmoid

__all__ = ["SIGMOID_IMPLEMENTATIONS", "PairwiseSigmoid", "pairwise_sigmoid"]
