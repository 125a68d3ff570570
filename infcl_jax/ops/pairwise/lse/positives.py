"""Positives by id: pairs of a row and a column with equal ids.

`match_ids` replaces the ids of all devices by group numbers, once and before the sweep over the pairs. Backends compare
the numbers of a block (`is_match`) and sum over its positives (`base.PositiveSums`). `positives_by_id` converts these
sums to the public result. Losses of row i with logits z_ip of its positives p, and the log-sum-exps N_i over the
negatives and P_i over the positives:

    mean:  -1/n_i sum_p log softmax(z_i)_p = softplus(N_i - P_i) + P_i - mean_p z_ip    (SupCon's L_out, UniCL)
    any:   -log sum_p softmax(z_i)_p       = softplus(N_i - P_i)                         (SupCon's L_in, MIL-NCE)

Both keep full relative precision for a confident row, see `infcl_jax.losses.batch.cross_entropy`.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Bool, Float, Int32

from infcl_jax.ops.pairwise.base import Array, LogSum
from infcl_jax.ops.pairwise.ids import Groups, is_match
from infcl_jax.ops.pairwise.lse.block import LseBlock, PositiveCotangents, PositiveLogits, PositiveSums
from infcl_jax.ops.pairwise.strips import is_positive

MULTI_POSITIVE = ("mean", "any")


class Positives(NamedTuple):
    """Positives of each row or column, in fp32 (fp64 for fp64 features).

    Examples:
      >>> ids = jnp.array([0, 0, 0, 0, 0, 0, 7, 8], jnp.int32)
      >>> lse = pairwise_lse(image, text, 14.3, x_ids=ids, y_ids=ids)
      >>> lse.positive.row.number
      Array([6, 6, 6, 6, 6, 6, 1, 1], dtype=int32)

    Attributes:
      lse: `[n]` log-sum-exp of the positives' logits; -inf without a positive.
      gap: `[n]` `lse` minus the mean of the positives' logits; 0 with at most one positive, and with "any".
      number: int32 `[n]` number of positives over all devices; 0 for masked rows.
    """

    lse: Float[Array, "n"]
    gap: Float[Array, "n"]
    number: Int32[Array, "n"]


class PositivesByID(NamedTuple):
    """Positives by id of both sides.

    Examples:
      >>> ids = jnp.arange(8, dtype=jnp.int32) // 2
      >>> lse = pairwise_lse(image, text, 14.3, x_ids=ids, y_ids=ids, columns=False)
      >>> lse.positive.row.lse.shape, lse.positive.col
      ((8,), None)

    Attributes:
      row: positives of the rows, `n` = bx.
      col: positives of the columns, `n` = by; None with `columns=False`.
    """

    row: Positives
    col: Positives | None


def find_positives(block: LseBlock) -> Bool[Array, "bx by"]:
    """Return bool `[bx, by]`, True at the positives of a block."""
    return is_positive(block.labels, block.y) if block.x_ids is None else is_match(block.x_ids, block.y_ids)


def positive_sums(
    match: Bool[Array, "rows columns"] | None,
    s: Float[Array, "rows columns"],
    log_sum: Callable[[int], LogSum],
    *,
    columns: bool,
) -> tuple[PositiveSums | None, PositiveSums | None]:
    """Return the sums over the positives of each row and column.

    Args:
      match: True at the positives by id, see `is_match`; None without ids: no sums.
      s: similarities.
      log_sum: `log_sum(axis)` returns the log-sum-exp of the positives' logits over an axis.
      columns: whether to compute column sums.
    """
    if match is None:
        return None, None
    s = jnp.where(match, s, jnp.zeros_like(s))
    return PositiveSums(log_sum(1), s.sum(1)), PositiveSums(log_sum(0), s.sum(0)) if columns else None


def with_positives(
    d_logits: Float[Array, "rows columns"],
    match: Bool[Array, "rows columns"] | None,
    side: PositiveCotangents | None,
    weighted_softmax: Callable[[PositiveCotangents], Float[Array, "rows columns"]],
    axis: int,
) -> Float[Array, "rows columns"]:
    """Add the positives' terms to the cotangents of the logits, in the accumulation dtype.

    Probability and share nearly cancel: rounded to the features' dtype first, they leave only noise.

    Args:
      d_logits: cotangents of the logits from other terms.
      match: True at the positives by id; None without ids.
      side: sums and cotangents of the rows' (`axis` 1) or columns' (`axis` 0) positives; None for no terms.
      weighted_softmax: returns `d_lse * exp(logit - lse)` of a side.
      axis: reduced axis of the sums.
    """
    if match is None or side is None:
        return d_logits
    terms = weighted_softmax(side) + jnp.expand_dims(side.d_sum, axis)
    return d_logits + jnp.where(match, terms, jnp.zeros_like(terms))


def positives_by_id(
    logits: tuple[PositiveLogits, PositiveLogits | None], groups: Groups, multi_positive: str
) -> PositivesByID:
    """Convert the sums over the positives of rows and columns to the public result."""
    rows, columns = logits
    return PositivesByID(
        _summarize(rows, groups.x_count, multi_positive),
        None if columns is None else _summarize(columns, groups.y_count, multi_positive),
    )


def _summarize(logits: PositiveLogits, count: Int32[Array, "n"], multi_positive: str) -> Positives:
    """Convert the sums over the positives to the public result.

    A single positive's log-sum-exp is its logit, without rounding, and its gradient does not need its exponential.
    """
    several = count > 1
    single = jnp.where(count == 1, logits.sum, jnp.full_like(logits.sum, -jnp.inf))
    lse = jnp.where(several, logits.lse, single)
    gap = jnp.zeros_like(lse)
    if multi_positive == "mean":
        mean = logits.sum / jnp.maximum(count, 1).astype(lse.dtype)
        gap = jnp.where(several, logits.lse - mean, gap)
    return Positives(lse, gap, count)
