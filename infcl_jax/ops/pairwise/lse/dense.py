"""Dense reference implementation, differentiated by JAX.

It computes the whole pair matrix, in fp64 for fp64 features.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from infcl_jax.ops.pairwise.base import Array, accumulation_dtype, exp_below, finite_shift, similarities
from infcl_jax.ops.pairwise.lse.block import LseBlock, PositiveLogits, Results
from infcl_jax.ops.pairwise.lse.guide import guided_pairs
from infcl_jax.ops.pairwise.lse.positives import find_positives
from infcl_jax.ops.pairwise.strips import positives, valid_pairs


def dense_lse(block: LseBlock, *, exclude: bool = False, columns: bool = True) -> Results:
    """Compute row and column log-sum-exps and positives from the full pair matrix.

    Features are promoted to at least fp32 first, so that both gradient terms of a positive are added before rounding.
    Empty sums are -inf. Positives outside the block are 0. Columns use `y_scale`, or the shared scale if it is None.

    Args:
      block: rows and columns to compare; labels or ids are required.
      exclude: leave positives out of the sums.
      columns: whether to compute column sums.

    Returns:
      `base.Results`.
    """
    x, y = (a.astype(accumulation_dtype(a.dtype)) for a in (block.x, block.y))
    s = similarities(x, y)
    not_positive = ~find_positives(block) if exclude else jnp.ones_like(s, bool)
    valid = valid_pairs(block.x_mask, block.y_mask, not_positive)
    in_row, in_column = guided_pairs(block.x_guide, block.y_guide, block.x_threshold, block.y_threshold)
    x_scale = jnp.broadcast_to(block.x_scale, x.shape[:1])[:, None]
    column = column_positives = None
    if columns:
        y_scale = block.x_scale if block.y_scale is None else block.y_scale
        y_scale = jnp.broadcast_to(y_scale, y.shape[:1])[None, :]
        column = _masked_log_sum_exp(y_scale * s, valid if in_column is None else valid & in_column, axis=0)
        if block.x_ids is not None:
            column_positives = _positive_logits(y_scale * s, find_positives(block), axis=0)
    row = _masked_log_sum_exp(x_scale * s, valid if in_row is None else valid & in_row, axis=1)
    if block.x_ids is None:
        return row, column, positives(s, block.labels)
    return row, column, (_positive_logits(x_scale * s, find_positives(block), axis=1), column_positives)


def _positive_logits(z: Float[Array, "bx by"], match: Bool[Array, "bx by"], axis: int) -> PositiveLogits:
    return PositiveLogits(_masked_log_sum_exp(z, match, axis), jnp.where(match, z, jnp.zeros_like(z)).sum(axis))


def _masked_log_sum_exp(z: Float[Array, "bx by"], valid: Bool[Array, "bx by"], axis: int) -> Float[Array, "_"]:
    z = jnp.where(valid, z, jnp.full_like(z, -jnp.inf))
    shift = finite_shift(jax.lax.stop_gradient(z.max(axis)))
    sumexp = jnp.where(valid, exp_below(z, jnp.expand_dims(shift, axis)), jnp.zeros_like(z)).sum(axis)
    nonempty = sumexp > 0
    log = jnp.log(jnp.where(nonempty, sumexp, jnp.ones_like(sumexp)))
    return jnp.where(nonempty, shift + log, jnp.full_like(log, -jnp.inf))
