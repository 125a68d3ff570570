"""Row sums of the pairwise sigmoid loss over all pairs of a sharded batch."""

from infcl_jax.ops.pairwise.sigmoid.api import SIGMOID_IMPLEMENTATIONS as SIGMOID_IMPLEMENTATIONS
from infcl_jax.ops.pairwise.sigmoid.api import PairwiseSigmoid as PairwiseSigmoid
from infcl_jax.ops.pairwise.sigmoid.api import pairwise_sigmoid as pairwise_sigmoid
