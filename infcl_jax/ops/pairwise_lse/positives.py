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
from jax import lax
from jaxtyping import Bool, Float, Int32

from infcl_jax.ops.pairwise_lse.base import (
    Array,
    AxisName,
    Block,
    LogSum,
    PositiveCotangents,
    PositiveLogits,
    PositiveSums,
    varying_over,
    zero_masked,
)
from infcl_jax.ops.pairwise_lse.chunking import is_positive

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


class Groups(NamedTuple):
    """Group numbers of this device's rows and columns.

    A pair with equal numbers is a positive. Numbers start at 1, so that rows padded with zeros match nothing. They are
    in the order in which ids first occur, columns before rows and devices in their order. All fields are None without
    ids.

    Attributes:
      x: int32 `[bx]`, an even negative number for masked rows, see `sort_key`.
      y: int32 `[by]`, an odd negative number for masked columns.
      x_count: int32 `[bx]`, number of positives of each row over all devices.
      y_count: int32 `[by]`, number of positives of each column over all devices.
    """

    x: Array | None = None
    y: Array | None = None
    x_count: Array | None = None
    y_count: Array | None = None


def match_ids(
    x_ids: Int32[Array, "bx *k"],
    y_ids: Int32[Array, "by *k"],
    x_mask: Bool[Array, "bx"] | None,
    y_mask: Bool[Array, "by"] | None,
    axis_name: AxisName | None,
) -> Groups:
    """Number the distinct ids of all devices and count each row's and column's positives.

    Every device sorts the ids of all devices, a few bytes a row.

    Args:
      x_ids: int32 `[bx]` or `[bx, 2]`.
      y_ids: int32 `[by]` or `[by, 2]`.
      x_mask: bool `[bx]`, False for masked rows.
      y_mask: bool `[by]`, False for masked columns.
      axis_name: mesh axes of the batch; None for one device.
    """
    x_ids, y_ids, x_mask, y_mask = varying_over((x_ids, y_ids, x_mask, y_mask), axis_name)
    all_ids = [_gather(ids.reshape(len(ids), -1), axis_name) for ids in (y_ids, x_ids)]
    numbers = _numbers(jnp.concatenate(all_ids))
    y, x = jnp.split(numbers, [len(all_ids[0])])
    x_in_group, y_in_group = (
        jnp.zeros(len(numbers) + 1, jnp.int32)
        .at[group]
        .add(zero_masked(jnp.ones_like(group), _gather(mask, axis_name)))
        for group, mask in ((x, x_mask), (y, y_mask))
    )

    def own(group: Array, ids: Array) -> Array:
        """Return this device's group numbers."""
        if axis_name is None:
            return group
        return lax.dynamic_slice_in_dim(group, lax.axis_index(axis_name) * len(ids), len(ids))

    def masked(group: Array, mask: Array | None, odd: int) -> Array:
        return group if mask is None else jnp.where(mask, group, -2 * group - odd)

    x, y = own(x, x_ids), own(y, y_ids)
    counts = zero_masked(y_in_group[x], x_mask), zero_masked(x_in_group[y], y_mask)
    return Groups(masked(x, x_mask, 0), masked(y, y_mask, 1), *counts)


def _numbers(ids: Int32[Array, "n k"]) -> Int32[Array, "n"]:
    """Number the distinct rows of `ids` by their first occurrence, from 1."""
    order = jnp.lexsort(tuple(ids.T)).astype(jnp.int32)  # stable
    ordered = ids[order]
    is_first = jnp.concatenate([jnp.ones_like(order[:1], bool), (ordered[1:] != ordered[:-1]).any(1)])
    first = lax.cummax(jnp.where(is_first, jnp.arange(len(order), dtype=jnp.int32), jnp.zeros_like(order)))
    return jnp.zeros_like(ids[:, 0]).at[order].set(order[first] + 1)


def sort_key(group: Int32[Array, "n"]) -> Int32[Array, "n"]:
    """Return sort keys of group numbers, which are even, and odd for masked rows and columns.

    Masked rows follow the others of their group.
    """
    return jnp.where(group < 0, -group | 1, 2 * group)


def _gather(array: Array | None, axis_name: AxisName | None) -> Array | None:
    return array if array is None or axis_name is None else lax.all_gather(array, axis_name, tiled=True)


def find_positives(block: Block) -> Bool[Array, "bx by"]:
    """Return bool `[bx, by]`, True at the positives of a block."""
    return is_positive(block.labels, block.y) if block.x_ids is None else is_match(block.x_ids, block.y_ids)


def is_match(x_ids: Int32[Array, "rows"], y_ids: Int32[Array, "columns"]) -> Bool[Array, "rows columns"]:
    """Return bool `[rows, columns]`, True at the positives by id."""
    return x_ids[:, None] == y_ids[None, :]


def positive_sums(
    match: Bool[Array, "rows columns"] | None,
    s: Float[Array, "rows columns"],
    log_sum: Callable[[int], LogSum],
    *,
    columns: bool,
) -> tuple[PositiveSums | None, PositiveSums | None]:
    """Return the sums over the positives of each row and column.

    Args:
      match: True at the positives by id, see `is_match`; None without ids, for no sums.
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

    Probability minus share cancels, so rounding to the features' dtype first would leave only noise.

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
