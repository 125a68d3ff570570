"""Implementations of the pairs' sums for distillation, other than the dense one.

Requirements and ranks are those of the rows of the same names in the table of `pairwise_lse`.
"""

from collections.abc import Callable

from infcl_jax.ops.pairwise_distillation.base import Backend
from infcl_jax.ops.pairwise_distillation.vjp import Plan
from infcl_jax.ops.pairwise_distillation.xla import XlaStrips
from infcl_jax.ops.pairwise_lse import ring
from infcl_jax.ops.pairwise_lse.base import AxisName
from infcl_jax.ops.pairwise_lse.implementations import fused_backends

# Rows of a strip of the general path around the fused kernels, which is rarely taken: 32 MiB for each fp32 array of
# 65,536 columns.
GENERAL_ROWS = 128

# Backends with shared max-shifts: `backend(single_device)`, see `pairwise_lse.implementations.Implementation.backend`.
BACKENDS: dict[str, Callable[[bool], Backend]] = {
    "ring": lambda _: XlaStrips(rows=None),
    "xla": lambda _: XlaStrips(),
    **fused_backends("pairwise_distillation"),
}
DISTILLATION_IMPLEMENTATIONS = tuple(BACKENDS)


def plan_of(implementation: str, axis_name: AxisName | None) -> Plan:
    """Return the static arguments of `vjp.blockwise`.

    Args:
      implementation: one of `DISTILLATION_IMPLEMENTATIONS`.
      axis_name: mesh axes of the batch; None for one device.
    """
    backend = BACKENDS[implementation](not ring.ring_axes(axis_name))
    rows = backend.rows if isinstance(backend, XlaStrips) else GENERAL_ROWS
    return Plan(backend, XlaStrips(rows, shared=False), axis_name)
