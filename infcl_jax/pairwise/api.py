"""`pairwise_lse`: validation and choice of implementation."""

from typing import NamedTuple

import jax.numpy as jnp

from infcl_jax.pairwise import gather
from infcl_jax.pairwise.blockwise import BLOCKWISE, Plan, blockwise
from infcl_jax.pairwise.checks import (
    check_axis,
    check_choice,
    check_features,
    check_implementation,
    checked_labels,
    checked_mask,
    checked_scales,
)
from infcl_jax.pairwise.devices import best_implementation, check_device
from infcl_jax.pairwise.tiles import Array, AxisName, Block, varying_over


class PairwiseLSE(NamedTuple):
    """Result of `pairwise_lse`, in fp32 (fp64 for fp64 features).

    Attributes:
      row: `[bx]` log-sum-exp of each row over all columns of all devices.
      col: `[by]` log-sum-exp of each column over all rows, or None if not asked for.
      positive: `[bx]` similarity of each row with its positive, not scaled.
    """

    row: Array
    col: Array | None
    positive: Array


_GATHERED = {"dense": gather.dense, "local": gather.local}
IMPLEMENTATIONS = (*_GATHERED, *BLOCKWISE)


def pairwise_lse(
    x: Array,
    y: Array,
    x_scale: Array | float,
    y_scale: Array | float | None = None,
    *,
    axis_name: AxisName | None = None,
    positives: str = "include",
    labels: Array | None = None,
    x_mask: Array | None = None,
    y_mask: Array | None = None,
    columns: bool = True,
    implementation: str | None = None,
) -> PairwiseLSE:
    """Row and column log-sum-exp over all pairs of a batch, without storing the pair matrix.

    With `s_ij = <x_i, y_j>` over the rows and columns of all devices of `axis_name`:

        row_i = log sum_j exp(x_scale_i * s_ij)
        col_j = log sum_i exp(y_scale_j * s_ij)
        positive_i = s_{i, labels_i}

    Every contrastive loss of this package is a function of these vectors. Differentiable in `x`, `y`, `x_scale` and
    `y_scale`; only the gradients that are asked for are computed. Inside `shard_map` (with its default
    `check_vma=True`) the gradient of a sum over all devices is exact, also that of arguments that all devices share.

    Method: Cheng et al., "Breaking the Memory Barrier" (Inf-CL), Algorithms 1-4, with both directions from one sweep.

    Args:
      x: `[bx, D]` row features of this device, bf16, fp16, fp32 or fp64. Usually L2-normalised; need not be.
      y: `[by, D]` column features of this device, same dtype.
      x_scale: inverse temperature of the rows, scalar or `[bx]`.
      y_scale: inverse temperature of the columns, scalar or `[by]`; `x_scale` if None.
      axis_name: mesh axis (or tuple of axes) over which the batch is sharded, inside `shard_map`; None for one device.
      positives: "include" them in the sums or "exclude" them.
      labels: int `[bx]`, row of this device's `y` that is each row's positive; row i by default. A label out of range
        is an error where its value is known, and gives a NaN `positive` where it is traced.
      x_mask: bool `[bx]`, False for rows that do not exist (padding): they are in no sum, and their results are 0.
      y_mask: bool `[by]`, likewise for columns.
      columns: False if only rows are needed (one-directional retrieval); `col` is None then.
      implementation: None (the best for the platform) or one of `IMPLEMENTATIONS`.

    Returns:
      `PairwiseLSE`. A log-sum-exp over no pair at all is -inf, with zero gradient.

    Raises:
      ValueError: shapes, dtypes, labels, the axis name or the implementation are not as described.
    """
    check_features(x, y)
    check_choice("positives", positives, ("include", "exclude"))
    check_implementation(implementation, IMPLEMENTATIONS)
    if implementation is None:
        implementation = best_implementation() if x.dtype != jnp.float64 else "xla"
    check_device(implementation, x.dtype)
    check_axis(axis_name)
    labels = checked_labels(labels, x.shape[0], y.shape[0])
    x_mask, y_mask = checked_mask("x_mask", x_mask, x.shape[0]), checked_mask("y_mask", y_mask, y.shape[0])
    if x.dtype == jnp.float16:  # fp16's range is too narrow for products of probabilities
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    x_scale, y_scale = checked_scales(x_scale, y_scale, x, y, columns)
    block = varying_over(Block(x, y, x_scale, y_scale, x_mask, y_mask, labels), axis_name)
    exclude = positives == "exclude"
    if implementation in _GATHERED:
        row, column, positive = _GATHERED[implementation](block, axis_name=axis_name, exclude=exclude, columns=columns)
    else:
        row, column, positive = blockwise(Plan(implementation, axis_name, exclude, columns), *block)
    positive = jnp.where((labels >= 0) & (labels < y.shape[0]), positive, jnp.full_like(positive, jnp.nan))
    return PairwiseLSE(
        _zero_where_masked(row, x_mask),
        _zero_where_masked(column, y_mask) if columns else None,
        _zero_where_masked(positive, x_mask),
    )


def _zero_where_masked(array: Array, mask: Array | None) -> Array:
    return array if mask is None else jnp.where(mask, array, jnp.zeros_like(array))
