"""Operands and kernels of the fused backend of `pairwise_lse`."""

from typing import NamedTuple, Protocol

import jax.numpy as jnp
from jaxtyping import BFloat16, Float, Float32, Int32

from infcl_jax.ops.pairwise.base import Array
from infcl_jax.ops.pairwise.fused_operands import LOG2E, Padded, mask_shift, pad_to
from infcl_jax.ops.pairwise.ids import ranges_by_id
from infcl_jax.ops.pairwise.kernel_api import LABEL_RANGE_ROWS, Kernels, Pairs, row_ranges
from infcl_jax.ops.pairwise.lse.block import LseBlock


class LseOperands(NamedTuple):
    """Kernel operands of a block, in bf16 and base 2.

    `s_ij` is the fp32 sum of the GEMMs over the operands' bf16 terms. A shift is a max-shift in base 2. The
    exponentials are

        shared scale:       e_ij  = exp2(row_scale_i s_ij - row_shift_i - column_shift_j) for rows and columns
        per-sample scales:  er_ij = exp2(row_scale_i s_ij - row_shift_i - column_masked_j) for rows
                            ec_ij = exp2(column_scale_j s_ij - column_shift_j - row_masked_i) for columns

    Attributes:
      x: bf16 `[bx, num_terms * K]`; the bf16 terms of the features are concatenated.
      y: bf16 `[by, num_terms * K]`; the bf16 terms of the features are concatenated.
      row_scale: fp32 `[bx]`.
      row_shift: fp32 `[bx]`, +inf for masked rows.
      column_shift: fp32 `[by]`, +inf for masked columns; None for zeros.
      column_scale: fp32 `[by]`; None with a shared scale.
      row_masked: fp32 `[bx]`, 0 or +inf; None with a shared scale.
      column_masked: fp32 `[by]`, 0 or +inf; None with a shared scale.
      labels: int32 `[bx]`, column of each row's positive, -1 if it is not in the block; None: no positives. With ids,
        the first column of each row's positives.
      lowest: int32 `[bx / LABEL_RANGE_ROWS]`, lowest label other than -1 of each range of rows; None without labels.
      highest: int32 `[bx / LABEL_RANGE_ROWS]`, highest label of each range of rows; None without labels. With ids, the
        last column of all their positives.
      last: int32 `[bx]`, last column of each row's positives by id, -1 if there is none in the block. The positives are
        the columns from `labels` to `last`, because rows and columns are sorted by id. None without ids.
      guide_x: bf16 `[bx, guide_terms * Kg]`, terms of the guide's features. With `t_ij` the sum of their GEMMs over
        `guide_pairs`, `er_ij` is 0 where `t_ij > row_threshold_i`, and `ec_ij` where `t_ij > column_threshold_j`, but
        not in the positives' terms. None without a guide.
      guide_y: bf16 `[by, guide_terms * Kg]`; None without a guide.
      row_threshold: fp32 `[bx]`; None without a guide.
      column_threshold: fp32 `[by]`; None without a guide or without column sums.
    """

    x: BFloat16[Array, "bx k"]
    y: BFloat16[Array, "by k"]
    row_scale: Float32[Array, "bx"]
    row_shift: Float32[Array, "bx"]
    column_shift: Float32[Array, "by"] | None = None
    column_scale: Float32[Array, "by"] | None = None
    row_masked: Float32[Array, "bx"] | None = None
    column_masked: Float32[Array, "by"] | None = None
    labels: Int32[Array, "bx"] | None = None
    lowest: Int32[Array, "ranges"] | None = None
    highest: Int32[Array, "ranges"] | None = None
    last: Int32[Array, "bx"] | None = None
    guide_x: BFloat16[Array, "bx kg"] | None = None
    guide_y: BFloat16[Array, "by kg"] | None = None
    row_threshold: Float32[Array, "bx"] | None = None
    column_threshold: Float32[Array, "by"] | None = None


class WeightsByID(NamedTuple):
    """Weights of the positives by id in dS, fp32.

    `dS_ij` at a positive contains

        shared scale:       e_ij (row_i + column_j) + scale (row_sum_i + column_sum_j)
        per-sample scales:  exp2(row_scale_i s_ij - row_shift_i) row_i + row_sum_i
                            + exp2(column_scale_j s_ij - column_shift_j) column_j + column_sum_j

    With a shared scale, a weight `row_i + column_j` of 0 gives 0, even if `e_ij` is infinite.

    Attributes:
      row: `[bx]`.
      row_sum: `[bx]`.
      column: `[by]`; None without column sums.
      column_sum: `[by]`; None without column sums.
      scale: `[1]`; None with per-sample scales.
      row_shift: `[bx]`, max-shift of the positives in base 2; None with a shared scale.
      column_shift: `[by]`; None with a shared scale or without column sums.
    """

    row: Float32[Array, "bx"]
    row_sum: Float32[Array, "bx"]
    column: Float32[Array, "by"] | None = None
    column_sum: Float32[Array, "by"] | None = None
    scale: Float32[Array, "1"] | None = None
    row_shift: Float32[Array, "bx"] | None = None
    column_shift: Float32[Array, "by"] | None = None


class LseWeights(NamedTuple):
    """Weights of the exponentials in dS, fp32.

    `dS_ij = er_ij row_i + ec_ij column_j + [j == labels_i] positive_i`. With a shared scale er = ec = e.

    Attributes:
      row: `[bx]`.
      column: `[by]`; None without column sums.
      positive: `[bx]`; None without positives by label.
      by_id: weights of the positives by id, whose terms are added; None without ids.
    """

    row: Float32[Array, "bx"]
    column: Float32[Array, "by"] | None
    positive: Float32[Array, "bx"] | None
    by_id: WeightsByID | None = None


class LseKernels(Kernels, Protocol):
    """GPU kernels of `pairwise_lse`.

    `sums` has the options `exclude` (the positives), `columns` (compute column sums), `maxima` (maxima of the exponents
    instead of sums of the exponentials) and `guide_pairs` (of the guide's terms). `ds` has the options `exclude` and
    `guide_pairs`. Its moments are `sum_j er_ij s_ij` and `sum_i ec_ij s_ij`.
    """

    def positive_sums(
        self, operands: LseOperands, pairs: Pairs, *, maxima: bool
    ) -> tuple[Float32[Array, "bx"], Float32[Array, "bx"], Float32[Array, "bx"]]:
        """Compute sums over each row's positives by id, from the tiles that contain positives only.

        `operands` has a shared scale, and rows and columns without padding.

        Returns:
          LseSums over the positives of `e_ij`, `s_ij` and `e_ij s_ij`, fp32 `[bx]`; with `maxima`, the maximum of the
          exponents of `e_ij` (-inf without a positive) instead of the first.
        """


def operands_of(
    padded: Padded,
    guide: Padded | None,
    block: LseBlock,
    row_shift: Float[Array, ""] | Float[Array, "bx"],
    column_shift: Float[Array, ""] | Float[Array, "by"] | None,
) -> LseOperands:
    """Return the kernels' operands.

    Args:
      padded: features of the block.
      guide: features of the guide; None without one.
      block: rows and columns.
      row_shift: max-shift of the rows' exponents in nats, `[]` or `[bx]`.
      column_shift: max-shift of the columns' exponents in nats, `[]` or `[by]`; not read with a shared scale.
    """
    rows, columns = padded.x.shape[0], padded.y.shape[0]
    row_masked = mask_shift(block.x_mask, padded.bx, rows)
    column_masked = mask_shift(block.y_mask, padded.by, columns)

    def vector(a: Array, size: int, count: int, gain: float = 1) -> Array:
        """Convert `a`, scalar or `[size]`, to base 2 and pad it to `[count]`."""
        return pad_to(jnp.broadcast_to(a, (size,)) * (LOG2E * gain), (count,))

    x_shift = vector(row_shift, padded.bx, rows)
    operands = LseOperands(
        padded.x,
        padded.y,
        vector(block.x_scale, padded.bx, rows, padded.gain),
        x_shift if row_masked is None else x_shift + row_masked,
        column_masked,
    )
    if block.x_ids is not None:
        operands = with_positives_by_id(operands, block.x_ids, block.y_ids)
    else:
        operands = operands._replace(**padded.label_ranges(block.labels))
    if guide is not None:
        operands = operands._replace(
            guide_x=guide.x,
            guide_y=guide.y,
            row_threshold=pad_to(block.x_threshold, (rows,)),
            column_threshold=None if block.y_threshold is None else pad_to(block.y_threshold, (columns,)),
        )
    if block.y_scale is None:
        return operands
    zeros = [jnp.zeros_like(a[:, 0], jnp.float32) for a in (padded.x, padded.y)]
    row_masked = zeros[0] if row_masked is None else row_masked
    column_masked = zeros[1] if column_masked is None else column_masked
    return operands._replace(
        column_shift=vector(column_shift, padded.by, columns) + column_masked,
        column_scale=vector(block.y_scale, padded.by, columns, padded.gain),
        row_masked=row_masked,
        column_masked=column_masked,
    )


def padded_weights(padded: Padded, weights: LseWeights) -> LseWeights:
    """Pad the weights with zeros."""
    rows, columns = (padded.x.shape[0],), (padded.y.shape[0],)
    row, column, positive, by_id = weights

    def pad(name: str, array: Array | None) -> Array | None:
        if array is None or name == "scale":
            return array
        return pad_to(array, columns if name.startswith("column") else rows)

    return LseWeights(
        pad("row", row),
        pad("column", column),
        pad("positive", positive),
        None if by_id is None else WeightsByID(**{name: pad(name, a) for name, a in by_id._asdict().items()}),
    )


def with_positives_by_id(operands: LseOperands, x_ids: Int32[Array, "bx"], y_ids: Int32[Array, "by"]) -> LseOperands:
    """Add the column range of each row's positives by id.

    Args:
      operands: padded operands without positives.
      x_ids: sorted group numbers of the rows.
      y_ids: sorted group numbers of the columns.
    """
    rows = operands.x.shape[:1]
    first, last = (pad_to(a, rows, -1) for a in ranges_by_id(x_ids, y_ids))
    lowest, highest = row_ranges(first, last, LABEL_RANGE_ROWS)
    return operands._replace(labels=first, last=last, lowest=lowest, highest=highest)


def positive_tiles(
    operands: LseOperands, tile_rows: int, tile_columns: int
) -> tuple[Int32[Array, "row_tiles"], Int32[Array, "row_tiles"]]:
    """Return the first column tile that contains positives by id, and their number, of each row tile."""
    lowest, highest = row_ranges(operands.labels, operands.last, tile_rows)
    none = highest < 0
    first = jnp.where(none, jnp.zeros_like(lowest), lowest // tile_columns)
    return first, jnp.where(none, jnp.zeros_like(first), highest // tile_columns - first + 1)
