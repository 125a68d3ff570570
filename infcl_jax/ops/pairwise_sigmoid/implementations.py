"""Implementations of the pairwise sigmoid loss.

Requirements, ranks and workspace are those of the rows of the same names in the table of `pairwise_lse`.
"""

from collections.abc import Callable

from infcl_jax.ops.pairwise_lse.implementations import fused_backends
from infcl_jax.ops.pairwise_sigmoid.base import Backend
from infcl_jax.ops.pairwise_sigmoid.xla import XlaStrips

# `backend(single_device)`, see `pairwise_lse.implementations.Implementation.backend`.
BACKENDS: dict[str, Callable[[bool], Backend]] = {
    "ring": lambda _: XlaStrips(rows=None),
    "xla": lambda _: XlaStrips(),
    **fused_backends("pairwise_sigmoid"),
}
SIGMOID_IMPLEMENTATIONS = tuple(BACKENDS)
