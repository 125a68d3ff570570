"""Cross entropies of rows and columns, with positives by label or id.

A direction is the rows or the columns. Its targets are one positive, the mean of several or any of them, and a share of
all pairs with label smoothing.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Bool, Float, Int32

from infcl_jax.losses.batch import Array, AxisName, cross_entropy, global_mean, global_sum
from infcl_jax.ops.pairwise.base import accumulation_dtype, zero_masked
from infcl_jax.ops.pairwise.ids import match_ids
from infcl_jax.ops.pairwise.lse import Positives


class Direction(NamedTuple):
    """Loss of each row or column in nats, and a mask of those in the mean; None: all."""

    loss: Float[Array, "b"]
    mask: Bool[Array, "b"] | None


def with_positive(
    negative_lse: Float[Array, "b"],
    positive: Float[Array, "b"],
    mask: Bool[Array, "b"] | None,
    label_smoothing: float = 0.0,
) -> Direction:
    """Return the loss of rows with one positive each, without `uniform_logit` of the label smoothing."""
    loss = cross_entropy(negative_lse, positive)
    return Direction(loss + label_smoothing * positive if label_smoothing else loss, mask)


def with_positives(negative_lse: Float[Array, "b"], positives: Positives, label_smoothing: float = 0.0) -> Direction:
    """Return the loss of rows with positives by id; a row without one is outside the mean."""
    mask = positives.number > 0
    lse = zero_masked(positives.lse, mask)
    loss = cross_entropy(negative_lse, lse) + positives.gap
    return Direction(loss + label_smoothing * (lse - positives.gap) if label_smoothing else loss, mask)


def mean_of_both(
    rows: Direction, columns: Direction, weights: Float[Array, "b"] | None, axis_name: AxisName | None
) -> Float[Array, ""]:
    """Average the means over rows and over columns, with equal or given weights of the pairs.

    If both have the same count, the result and its gradients equal one mean over pairs, bit for bit.
    """
    if rows.mask is columns.mask:
        return global_mean((rows.loss + columns.loss) / 2, rows.mask, axis_name, weights)

    def weighted(direction: Direction) -> tuple[Array, Array]:
        """Return the weighted losses, and the sum of the weights over all devices."""
        loss = zero_masked(direction.loss, direction.mask)
        weight = zero_masked(jnp.ones_like(loss) if weights is None else weights, direction.mask)
        return weight * loss, global_sum(weight.sum(), axis_name)

    (row_loss, row_weight), (column_loss, column_weight) = weighted(rows), weighted(columns)
    total = jnp.where(row_weight == 0, column_weight, row_weight)  # the rows may have no weight while the columns do
    loss = row_loss + total / _nonzero(column_weight) * column_loss
    return global_sum((loss / 2).sum(), axis_name) / _nonzero(total)


def uniform_logit(
    image: Float[Array, "b d"],
    text: Float[Array, "b d"],
    scale: Float[Array, ""],
    mask: Bool[Array, "b"] | None,
    weights: Float[Array, "b"] | None,
    rows: Direction,
    columns: Direction,
    axis_name: AxisName | None,
) -> Float[Array, ""]:
    """Return the mean logit of all pairs.

    A pair has a row in the mean over rows and an unmasked column, or a column in the mean over columns and an unmasked
    row. The mean over pairs is the product of the mean features, so it needs no pair matrix.
    """

    def mean(features: Array, mask: Array | None, weights: Array | None = None) -> Array:
        features = zero_masked(features, mask).astype(accumulation_dtype(features.dtype))
        weights = zero_masked(jnp.ones_like(features[:, 0]) if weights is None else weights, mask)
        feature_sum = global_sum((weights[:, None] * features).sum(0), axis_name)
        return feature_sum / _nonzero(global_sum(weights.sum(), axis_name))

    of_rows = (mean(image, rows.mask, weights) * mean(text, mask)).sum()
    of_columns = (mean(image, mask) * mean(text, columns.mask, weights)).sum()
    return scale * (of_rows + of_columns) / 2


def count_extra_positives(ids: Int32[Array, "b 2"] | None) -> Float[Array, ""] | None:
    """Count the positives of a global batch in addition to its pairs; None without ids."""
    if ids is None:
        return None
    counts = match_ids(ids, ids, None, None, None).x_count
    return (counts - 1).astype(jnp.float32).sum()


def _nonzero(value: Float[Array, ""]) -> Float[Array, ""]:
    """Replace 0 by 1, as a divisor of an empty sum."""
    return jnp.where(value == 0, jnp.ones_like(value), value)
