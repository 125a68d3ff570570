"""How exponentials are kept in range: one reference for all of them, or a maximum for each row and column.

With one scale for all pairs and features in the usual range, every exponential is taken against one shared reference,
so that a single one serves the row sum, the column sum and both gradients. Sums that leave the range in which that is
exact, or per-sample scales, take the general way: maxima, and two exponentials.
"""

import math

import jax.numpy as jnp

from infcl_jax.ops.pairwise_lse.base import Array, Block, LogSum, Sums

# exp(scale * s - reference) is at most e^60 for normalised features: summed over 1e10 pairs still finite in fp32.
SHARED_TOP = 60.0
# Terms under e^-87 vanish in fp32. A sum of n terms at least n * e^-71 has lost less than e^-16 of itself.
LOST_BELOW = -87.0
NEGLIGIBLE = -16.0
# Keeps the reciprocal of a sum a normal fp32 number.
LARGEST_SUM = 1e37
# Under it the fused kernels cannot take the scale's gradient from a quotient by the scale.
SMALLEST_SCALE = 1e-6


def shared_reference(scale: Array) -> Array:
    """The reference `c` of the shared way: `exp(scale * s - c)` stays under `e^60` for normalised features."""
    return jnp.maximum(scale - SHARED_TOP, jnp.zeros_like(scale))


def is_shared(block: Block) -> bool:
    """Whether one scale serves all rows and columns."""
    return block.x_scale.ndim == 0


def per_sample(block: Block, columns: bool) -> Block:
    """The same block with its shared scale written out per row and per column."""
    x_scale = jnp.broadcast_to(block.x_scale, block.x.shape[:1])
    return block._replace(
        x_scale=x_scale, y_scale=jnp.broadcast_to(block.x_scale, block.y.shape[:1]) if columns else None
    )


def against(reference: Array, total: Array) -> LogSum:
    """A sum taken against the shared reference; a sum over nothing must not claim that reference when merged."""
    return LogSum(jnp.where(total > 0, reference, -jnp.inf), total)


def within_range(total: Array, mask: Array | None, terms: int) -> Array:
    """Whether all sums of at most so many terms that count are exact (see the constants above)."""
    smallest = terms * math.exp(LOST_BELOW - NEGLIGIBLE)
    good = (total >= smallest) & (total <= LARGEST_SUM)
    return jnp.all(good if mask is None else good | ~mask)


def all_within_range(block: Block, sums: Sums, devices: int) -> Array:
    """Whether this device's sums over all devices, taken against the shared reference, are exact."""
    exact = within_range(sums.row.total, block.x_mask, block.y.shape[0] * devices)
    if sums.column is not None:
        exact &= within_range(sums.column.total, block.y_mask, block.x.shape[0] * devices)
    return exact & (block.x_scale > SMALLEST_SCALE)


def factor(sums: LogSum, weight: Array) -> Array:
    """`weight / total`, zero for a sum over nothing."""
    some = sums.total > 0
    return jnp.where(some, weight, jnp.zeros_like(weight)) / jnp.where(some, sums.total, jnp.ones_like(sums.total))
