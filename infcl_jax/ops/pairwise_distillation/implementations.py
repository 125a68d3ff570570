"""Implementations of the pairs' sums for distillation, other than the dense one.

Requirements are those of the rows of the same names in the table of `pairwise_lse`.
"""

from collections.abc import Callable

from infcl_jax.ops.pairwise_distillation.base import Backend
from infcl_jax.ops.pairwise_distillation.vjp import Plan
from infcl_jax.ops.pairwise_distillation.xla import XlaStrips
from infcl_jax.ops.pairwise_lse import ring
from infcl_jax.ops.pairwise_lse.base import AxisName

# Backends with shared max-shifts: `backend(single_device)`, see `pairwise_lse.implementations.Implementation.backend`.
BACKENDS: dict[str, Callable[[bool], Backend]] = {
    "ring": lambda _: XlaStrips(rows=None),
    "xla": lambda _: XlaStrips(),
}
DISTILLATION_IMPLEMENTATIONS = tuple(BACKENDS)


def plan_of(implementation: str, axis_name: AxisName | None) -> Plan:
    """Return the static arguments of `vjp.blockwise`.

    Args:
      implementation: one of `DISTILLATION_IMPLEMENTATIONS`.
      axis_name: mesh axes of the batch; None for one device.
    """
    rows = None if implementation == "ring" else XlaStrips().rows
    backend = BACKENDS[implementation](not ring.ring_axes(axis_name))
    return Plan(backend, XlaStrips(rows, shared=False), axis_name)
