"""Sums of softplus in kernels: one exponential per pair, and one logarithm for several.

In base 2, with `z` the logit over ln 2: `softplus = ln 2 max(z, 0) + log1p(e)` and `e = 2^-|z|`. For several terms,
`sum log1p(e_k) = log1p(u)` with `1 + u = prod (1 + e_k)`. `merge` forms u from nonnegative terms only, so that it keeps
full relative precision, however confident the pairs are.
"""

import math
from typing import Any

import jax.numpy as jnp

LN2 = math.log(2)
# log1p(u) = u * polynomial for u below this limit: minimax coefficients, relative error 1e-8 in exact arithmetic.
SMALL = 0.25
COEFFICIENTS = (1.0, -0.49999738, 0.33320826, -0.24778120, 0.18170922, -0.09234841)


def merge(u: Any, v: Any) -> Any:
    """Return `(1 + u) (1 + v) - 1`, without cancellation."""
    return u + (v + u * v)


def log1p(u: Any) -> Any:
    """Compute `log(1 + u)` for u >= 0 with full relative precision."""
    polynomial = jnp.full_like(u, COEFFICIENTS[-1])
    for coefficient in COEFFICIENTS[-2::-1]:
        polynomial = polynomial * u + coefficient
    return jnp.where(u < SMALL, u * polynomial, jnp.log2(1.0 + u) * LN2)
