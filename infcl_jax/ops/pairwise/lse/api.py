"""Public function `pairwise_lse`: validation and dispatch."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Bool, Float, Int32, Integer

from infcl_jax.ops.common.checks import check_choice, check_implementation, is_concrete
from infcl_jax.ops.pairwise.base import Array, AxisName, Strategy, accumulation_dtype, varying_over, zero_masked
from infcl_jax.ops.pairwise.checks import (
    check_axis,
    check_features,
    checked_ids,
    checked_labels,
    checked_mask,
    checked_scales,
)
from infcl_jax.ops.pairwise.ids import Groups, match_ids
from infcl_jax.ops.pairwise.implementations import (
    IMPLEMENTATIONS,
    TABLE,
    best_implementation,
    check_device,
    compute,
)
from infcl_jax.ops.pairwise.lse.block import LseBlock, Results
from infcl_jax.ops.pairwise.lse.guide import Margin, check_guide, guide_features
from infcl_jax.ops.pairwise.lse.positives import MULTI_POSITIVE, positives_by_id
from infcl_jax.ops.pairwise.lse.rule import LogSumExp
from infcl_jax.ops.pairwise.lse.xla import LseStrips


class PairwiseLSE(NamedTuple):
    """Result of `pairwise_lse`, in fp32 (fp64 for fp64 features).

    Examples:
      >>> result = pairwise_lse(image, text, 14.3, columns=False)
      >>> result.row.shape, result.col
      ((8,), None)

    Attributes:
      row: `[bx]` log-sum-exp of each row over all columns of all devices.
      col: `[by]` log-sum-exp of each column over all rows; None with `columns=False`.
      positive: `[bx]` unscaled similarity of each row with its positive, even if `y_mask` masks that positive. With
        ids: `PositivesByID`, the log-sum-exp, gap and number of the positives of the rows and of the columns.
    """

    row: Float[Array, "bx"]
    col: Float[Array, "by"] | None
    positive: Any


def pairwise_lse(
    x: Float[Array, "bx d"],
    y: Float[Array, "by d"],
    x_scale: Float[Array, ""] | Float[Array, "bx"] | float,
    y_scale: Float[Array, ""] | Float[Array, "by"] | float | None = None,
    *,
    axis_name: AxisName | None = None,
    positives: str = "include",
    labels: Integer[Array, "bx"] | None = None,
    x_ids: Int32[Array, "bx"] | Int32[Array, "bx 2"] | None = None,
    y_ids: Int32[Array, "by"] | Int32[Array, "by 2"] | None = None,
    multi_positive: str = "mean",
    x_mask: Bool[Array, "bx"] | None = None,
    y_mask: Bool[Array, "by"] | None = None,
    columns: bool = True,
    guide: tuple[Float[Array, "bx dg"], Float[Array, "by dg"]] | None = None,
    margin: float = 0.0,
    margin_strategy: str = "absolute",
    implementation: str | None = None,
) -> PairwiseLSE:
    """Compute row and column log-sum-exp over all pairs of a batch.

    The pair matrix is not stored. With `s_ij = <x_i, y_j>` over the rows and columns of all devices of `axis_name`:

        row_i = log sum_j exp(x_scale_i * s_ij)
        col_j = log sum_i exp(y_scale_j * s_ij)
        positive_i = s_{i, labels_i}

    With ids, every pair with equal ids is a positive, on all devices. With `p` over the positives of row i:

        positive.row.lse_i = log sum_p exp(x_scale_i * s_ip)
        positive.row.gap_i = positive.row.lse_i - mean_p(x_scale_i * s_ip)     0 with multi_positive="any"

    With `positives="exclude"`, the loss of row i is `softplus(row_i - positive.row.lse_i) + positive.row.gap_i`. With
    "mean" it is the mean of its positives' cross entropies (Khosla et al., "Supervised Contrastive Learning", L_out).
    With "any" it is the negative logarithm of the sum of their probabilities (L_in; Miech et al., MIL-NCE). Columns
    are alike.

    InfoNCE and the global contrastive losses are functions of these vectors. The result is differentiable in `x`, `y`,
    `x_scale` and `y_scale`. Gradients that the caller does not need are not computed. Inside `shard_map`, with its
    default `check_vma=True`, the gradients of a sum over all devices are exact, also for replicated arguments.

    Method: Cheng et al., "Breaking the Memory Barrier" (Inf-CL), Algorithms 1-4, with both directions in one pass.

    Examples:
      >>> row, col, positive = pairwise_lse(image, text, 14.3)
      >>> loss = ((row + col) / 2 - 14.3 * positive).mean()  # `clip_loss`
      >>> row.shape, col.shape, positive.shape
      ((8,), (8,), (8,))

    Args:
      x: `[bx, D]` row features of this device, bf16, fp16, fp32 or fp64. L2 normalization is usual but not required.
      y: `[by, D]` column features of this device, same dtype.
      x_scale: inverse temperature of the rows, scalar or `[bx]`.
      y_scale: inverse temperature of the columns, scalar or `[by]`; `x_scale` if None.
      axis_name: mesh axis (or tuple of axes) over which the batch is sharded, inside `shard_map`. None for one device.
        `()` inside `shard_map` compares each device's rows with its own columns only.
      positives: "include" or "exclude" positives in the sums.
      labels: int `[bx]`, row of this device's `y` that is each row's positive; row i by default. A concrete label out
        of range is an error. With a traced one, `row` and `positive` of that row and the gradients through `row` are
        NaN.
      x_ids: int32 `[bx]`, or `[bx, 2]` for 64-bit ids, instead of `labels`. A row may have any number of positives,
        on any device. int64 is refused, because JAX would cut it to 32 bits.
      y_ids: int32 `[by]` or `[by, 2]`, ids of the columns.
      multi_positive: "mean" or "any": whether `positive.row.gap` and `positive.col.gap` are computed or 0.
      x_mask: bool `[bx]`, False for masked rows (padding). They are in no sum and match no id. Their results and
        gradients are 0. Their features, labels and scales may have any value, including NaN.
      y_mask: bool `[by]`, False for masked columns. A row whose positive is masked keeps the rest of its sum.
      columns: False to compute rows only (one-directional retrieval); `col` is then None.
      guide: features of another model for the rows and the columns, of any floating dtype and width, without gradient.
        With its similarities t_ij, and the own pair (i, o_i) of each row, which is that of its label or, with ids, the
        column of the same number: column j leaves the sum of row i if `t_ij > t_{i, o_i} - margin`, and row i leaves
        that of column j if `t_ij > t_jj - margin`. Positives, which `positives="exclude"` must leave to the caller,
        are not affected. t_{i, o_i} is computed as all others, so that duplicates of the own pair stay. Solatorio,
        "GISTEmbed".
      margin: by how much a negative must be less similar in the guide than the own pair.
      margin_strategy: "absolute", or "relative": `margin * |t_{i, o_i}|` in place of `margin`.
      implementation: one of `IMPLEMENTATIONS`; None selects the best for the platform.

    Returns:
      `PairwiseLSE`. An empty log-sum-exp is -inf, with zero gradient.

    Raises:
      ValueError: shapes, dtypes, labels, ids, the axis name or the implementation are not as described, or `axis_name`
        is missing inside `shard_map`.
    """
    check_features(x, y)
    check_choice("positives", positives, ("include", "exclude"))
    check_implementation(implementation, IMPLEMENTATIONS)
    check_choice("multi_positive", multi_positive, MULTI_POSITIVE)
    x_ids, y_ids = checked_ids({"x_ids": x_ids, "y_ids": y_ids}, (x.shape[0], y.shape[0]), labels)
    by_id = x_ids is not None
    margins = Margin(margin, margin_strategy)
    check_guide(guide, margins, x.shape[0], y.shape[0])
    if guide is not None:
        _check_own_pairs(positives, columns and labels is not None, (columns or by_id) and x.shape[0] != y.shape[0])
    implementation = implementation or best_implementation(x.dtype)
    check_device(implementation, x.dtype)
    check_axis(axis_name, x, y)
    axis_name = axis_name or None
    # With identical masks and default labels, the row of a masked positive is masked too.
    may_mask_positives = y_mask is not None and not (labels is None and x_mask is y_mask)
    labels_known, given_mask = is_concrete(labels) and is_concrete(x_mask), x_mask
    x_mask, y_mask = checked_mask("x_mask", x_mask, x.shape[0]), checked_mask("y_mask", y_mask, y.shape[0])
    groups = Groups()
    if by_id:
        groups = match_ids(x_ids, y_ids, x_mask, y_mask, axis_name)
    else:
        # With the caller's mask: under jit, a checked one is a tracer, with which the range of labels is not checked.
        labels = checked_labels(labels, x.shape[0], y.shape[0], given_mask)
    if x.dtype == jnp.float16:  # fp16's range is too narrow for GEMMs of probabilities
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    x_scale, y_scale = checked_scales(x_scale, y_scale, x, y, columns)
    block = LseBlock(x, y, x_scale, y_scale, x_mask, y_mask, labels, *groups)
    if guide is not None:
        block = block._replace(x_guide=guide_features(guide[0], x_mask), y_guide=guide_features(guide[1], y_mask))
    inputs = varying_over(block, axis_name)
    block = _zero_masked_rows(inputs)
    options = {"exclude": positives == "exclude", "columns": columns}
    row, column, positive = _compute(implementation, LogSumExp(columns, margins), block, axis_name, **options)
    if by_id:
        column = zero_masked(column, y_mask) if columns else None
        return PairwiseLSE(zero_masked(row, x_mask), column, positives_by_id(positive, groups, multi_positive))
    if may_mask_positives:
        unmasked = jnp.take(block.y_mask, block.labels, mode="clip")
        positive = jnp.where(unmasked, positive, _similarities_of_pairs(block.x, inputs.y, block.labels))
    if not labels_known:
        row, positive = _nan_out_of_range(block, row, positive)
    return PairwiseLSE(
        zero_masked(row, x_mask), zero_masked(column, y_mask) if columns else None, zero_masked(positive, x_mask)
    )


def _check_own_pairs(positives: str, column_labels: bool, unequal: bool) -> None:
    """Raise `ValueError` unless a guide knows the own pair of every row and column in a sum, which is not in it."""
    if positives != "exclude":
        raise ValueError(f"expected positives='exclude' with a guide, got {positives!r}")
    if column_labels or unequal:
        raise ValueError(
            "expected row i to belong to column i for a guide of column sums or with ids, got "
            + ("labels" if column_labels else "another number of columns")
        )


def _compute(
    implementation: str, loss: LogSumExp, block: LseBlock, axis_name: AxisName | None, **options: bool
) -> Results:
    """Compute log-sum-exps and positives."""
    strategy = TABLE[implementation].strategy
    if isinstance(strategy, Strategy):
        return compute(implementation, loss, block, axis_name, **options)
    return strategy(loss.prepared(LseStrips(None), block), axis_name=axis_name, **options)


def _zero_masked_rows(block: LseBlock) -> LseBlock:
    """Set masked rows and columns to zero.

    They may contain NaN, and 0 * NaN would make every gradient NaN.
    """
    x_scale, y_scale = block.x_scale, block.y_scale
    return block._replace(
        x=zero_masked(block.x, block.x_mask),
        y=zero_masked(block.y, block.y_mask),
        x_scale=zero_masked(x_scale, block.x_mask) if x_scale.ndim else x_scale,
        y_scale=None if y_scale is None else zero_masked(y_scale, block.y_mask),
        labels=None if block.labels is None else zero_masked(block.labels, block.x_mask),
    )


def _similarities_of_pairs(
    x: Float[Array, "bx d"], y: Float[Array, "by d"], labels: Int32[Array, "bx"]
) -> Float[Array, "bx"]:
    """Compute `<x_i, y_{labels_i}>` `[bx]`.

    Masked columns may be non-finite. They count as zero, so that no gradient is NaN.
    """
    dtype = accumulation_dtype(x.dtype)
    y = _zero_unless_finite(jnp.take(y, labels, axis=0, mode="clip").astype(dtype))
    return _zero_unless_finite((x.astype(dtype) * y).sum(1))


def _zero_unless_finite(array: Array) -> Array:
    return jnp.where(jnp.isfinite(array), array, jnp.zeros_like(array))


def _nan_out_of_range(
    block: LseBlock, row: Float[Array, "bx"], positive: Float[Array, "bx"]
) -> tuple[Float[Array, "bx"], Float[Array, "bx"]]:
    """Set `row` and `positive` to NaN for labels out of range.

    `row` is multiplied by NaN, so that its gradients are NaN too.
    """
    in_range = (block.labels >= 0) & (block.labels < block.y.shape[0])
    nan = jnp.full_like(positive, jnp.nan)
    return row * jnp.where(in_range, jnp.ones_like(nan), nan), jnp.where(in_range, positive, nan)
