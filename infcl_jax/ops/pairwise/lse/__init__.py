"""Row and column log-sum-exp over all pairs of a sharded batch.

The losses of the package, except SigLIP, are functions of these vectors.
"""

from infcl_jax.ops.pairwise.implementations import IMPLEMENTATIONS as IMPLEMENTATIONS
from infcl_jax.ops.pairwise.implementations import available_implementations as available_implementations
from infcl_jax.ops.pairwise.lse.api import PairwiseLSE as PairwiseLSE
from infcl_jax.ops.pairwise.lse.api import pairwise_lse as pairwise_lse
from infcl_jax.ops.pairwise.lse.guide import MARGIN_STRATEGIES as MARGIN_STRATEGIES
from infcl_jax.ops.pairwise.lse.positives import MULTI_POSITIVE as MULTI_POSITIVE
from infcl_jax.ops.pairwise.lse.positives import Positives as Positives
from infcl_jax.ops.pairwise.lse.positives import PositivesByID as PositivesByID
