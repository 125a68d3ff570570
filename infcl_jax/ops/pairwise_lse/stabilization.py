"""Max-shift of the exponentials, shared or per row and column.

With a shared scale and normalized features, all exponentials use one shared shift. A single exponential then serves the
row sum, the column sum and both gradients. Per-sample scales, and sums outside the exact range of the shared shift, use
the general path: maxima, and two exponentials per pair.
"""

import math

import jax.numpy as jnp
from jaxtyping import Bool, Float

from infcl_jax.ops.pairwise_lse.base import Array, Block, LogSum, Sums

# exp(scale * s - shift) is at most e^60 for normalized features: a sum over 1e10 pairs is still finite in fp32.
SHARED_TOP = 60.0
# Terms below e^-87 underflow in fp32. A sum of n terms that is at least n * e^-71 has lost less than e^-16 of its
# value.
LOST_BELOW = -87.0
NEGLIGIBLE = -16.0
# Largest sum whose reciprocal is a normal fp32 number.
LARGEST_SUM = 1e37
# Smallest scale by which the fused kernels can divide to get the gradient of the scale.
SMALLEST_SCALE = 1e-6


def shared_shift(scale: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """Returns the shared shift `c`.

    `exp(scale * s - c)` stays below `e^60` for normalized features.
    """
    return jnp.maximum(scale - SHARED_TOP, jnp.zeros_like(scale))


def is_shared(block: Block) -> bool:
    """Returns whether one scale applies to all rows and columns."""
    return block.x_scale.ndim == 0


def per_sample(block: Block, columns: bool) -> Block:
    """Broadcasts the shared scale of a block to its rows and columns."""
    x_scale = jnp.broadcast_to(block.x_scale, block.x.shape[:1])
    return block._replace(
        x_scale=x_scale, y_scale=jnp.broadcast_to(block.x_scale, block.y.shape[:1]) if columns else None
    )


def shifted_log_sum(shift: Float[Array, ""] | Float[Array, "n"], sumexp: Float[Array, "n"]) -> LogSum:
    """Returns a sum with the shared shift as `LogSum`.

    The shift of an empty sum becomes -inf, so that it does not affect later merges.
    """
    return LogSum(jnp.where(sumexp > 0, shift, -jnp.inf), sumexp)


def within_range(sumexp: Float[Array, "n"], mask: Bool[Array, "n"] | None, terms: int) -> Bool[Array, ""]:
    """Returns whether all unmasked sums of up to `terms` terms are exact.

    The limits are the constants above.
    """
    smallest = terms * math.exp(LOST_BELOW - NEGLIGIBLE)
    in_range = (sumexp >= smallest) & (sumexp <= LARGEST_SUM)
    return jnp.all(in_range if mask is None else in_range | ~mask)


def all_within_range(block: Block, sums: Sums, devices: int) -> Bool[Array, ""]:
    """Returns whether this device's final sums with the shared shift are exact."""
    exact = within_range(sums.row.sumexp, block.x_mask, block.y.shape[0] * devices)
    if sums.column is not None:
        exact &= within_range(sums.column.sumexp, block.y_mask, block.x.shape[0] * devices)
    return exact & (block.x_scale > SMALLEST_SCALE)


def factor(sums: LogSum, weight: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """Returns `weight / sumexp`, zero for an empty sum."""
    nonempty = sums.sumexp > 0
    return jnp.where(nonempty, weight, jnp.zeros_like(weight)) / jnp.where(
        nonempty, sums.sumexp, jnp.ones_like(sums.sumexp)
    )
