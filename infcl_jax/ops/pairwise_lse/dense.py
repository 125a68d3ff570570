"""The oracle: the same quantities from the whole pair matrix, differentiated by JAX, in fp64 when given fp64."""

import jax
import jax.numpy as jnp

from infcl_jax.ops.pairwise_lse.base import Array, Block, accumulation_dtype, finite_reference, similarities
from infcl_jax.ops.pairwise_lse.chunking import is_positive, positives, valid_pairs


def dense_lse(block: Block, *, exclude: bool = False, columns: bool = True) -> tuple[Array, Array | None, Array]:
    """Row log-sum-exp `[bx]`, column log-sum-exp `[by]` and positives `[bx]` of one block held whole.

    Features are promoted to at least fp32 first, so the gradients of both terms of a positive meet before any rounding.
    Sums over nothing are -inf, positives that are not in the block 0. Columns use `y_scale`, the shared scale if None.

    Args:
      block: rows and columns to compare; labels are required.
      exclude: leave the positives out of the sums.
      columns: whether column sums are asked for (None is returned otherwise).
    """
    x, y = (a.astype(accumulation_dtype(a.dtype)) for a in (block.x, block.y))
    s = similarities(x, y)
    not_positive = ~is_positive(block.labels, y) if exclude else jnp.ones_like(s, bool)
    valid = valid_pairs(block.x_mask, block.y_mask, not_positive)
    x_scale = jnp.broadcast_to(block.x_scale, x.shape[:1])[:, None]
    column = None
    if columns:
        y_scale = block.x_scale if block.y_scale is None else block.y_scale
        y_scale = jnp.broadcast_to(y_scale, y.shape[:1])[None, :]
        column = _masked_log_sum_exp(y_scale * s, valid, axis=0)
    return (
        _masked_log_sum_exp(x_scale * s, valid, axis=1),
        column,
        positives(s, block.labels),
    )


def _masked_log_sum_exp(z: Array, valid: Array, axis: int) -> Array:
    z = jnp.where(valid, z, jnp.full_like(z, -jnp.inf))
    reference = finite_reference(jax.lax.stop_gradient(z.max(axis)))
    total = jnp.where(valid, jnp.exp(z - jnp.expand_dims(reference, axis)), jnp.zeros_like(z)).sum(axis)
    some = total > 0
    log = jnp.log(jnp.where(some, total, jnp.ones_like(total)))
    return jnp.where(some, reference + log, jnp.full_like(log, -jnp.inf))
