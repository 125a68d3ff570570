"""Max-shift of the exponentials, shared or per row and column.

With a shared scale, all exponentials first use one shared shift. One exponential per pair then serves the row sum, the
column sum and both gradients. Per-sample scales, and sums outside the exact range of the shared shift, use the general
path: the maxima of rows and columns as shifts, and two exponentials per pair. With per-sample scales the fused kernels
try `shared_shift` of each scale before they compute maxima.
"""

import math

import jax.numpy as jnp
from jaxtyping import Bool, Float

from infcl_jax.ops.pairwise.base import Array, LogSum

# Largest exponent, in nats, of normalized features with the shared shift. A sum of 1e10 terms e^60 is finite in fp32.
MAX_EXPONENT = 60.0
# Terms below e^-87 underflow in fp32. A sum of n terms that is at least n * e^-71 has lost less than e^-16 of its
# value. Both are in nats.
UNDERFLOW_EXPONENT = -87.0
TOLERANCE_EXPONENT = -16.0
# Largest sum whose reciprocal is a normal fp32 number.
MAX_SUM = 1e37
# Smallest scale by which the fused kernels can divide to get the gradient of the scale.
MIN_SCALE = 1e-6


def shared_shift(scale: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """Return the smallest shift that bounds the exponents of normalized features.

    `scale * s - shift <= MAX_EXPONENT` with `shift >= 0`. A vector of scales gives a vector of shifts.
    """
    return jnp.maximum(scale - MAX_EXPONENT, jnp.zeros_like(scale))


def shifted_log_sum(shift: Float[Array, ""] | Float[Array, "n"], sumexp: Float[Array, "n"]) -> LogSum:
    """Return a sum with the shared shift as `LogSum`.

    An empty sum gets the shift -inf, so that it does not affect merges.
    """
    return LogSum(jnp.where(sumexp > 0, shift, -jnp.inf), sumexp)


def weighted(e: Float[Array, "*n"], weight: Float[Array, "..."]) -> Float[Array, "*n"]:
    """Multiply exponentials by weights; an infinite exponential with the weight 0 gives 0."""
    return jnp.where(weight == 0, jnp.zeros_like(e), weight * e)


def within_range(sumexp: Float[Array, "n"], mask: Bool[Array, "n"] | None, terms: int) -> Bool[Array, ""]:
    """Return whether all unmasked sums of up to `terms` terms are exact.

    An exact sum neither overflows nor loses a relevant share to underflow, see the constants of this module.
    """
    smallest = terms * math.exp(UNDERFLOW_EXPONENT - TOLERANCE_EXPONENT)
    in_range = (sumexp >= smallest) & (sumexp <= MAX_SUM)
    return jnp.all(in_range if mask is None else in_range | ~mask)


def factor(sums: LogSum, weight: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """Return `weight / sumexp`, 0 for an empty sum.

    With the cotangent of a log-sum-exp as `weight`, the result is the factor of its exponentials in the gradient.
    """
    nonempty = sums.sumexp > 0
    return jnp.where(nonempty, weight, jnp.zeros_like(weight)) / jnp.where(
        nonempty, sums.sumexp, jnp.ones_like(sums.sumexp)
    )
