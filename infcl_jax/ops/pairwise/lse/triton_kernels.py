"""Triton kernels of `pairwise_lse`, which `triton` launches; importing them needs Triton.

See `pairwise.triton_kernels`.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from infcl_jax.ops.pairwise.triton_kernels import (
    PositiveRange,
    find_positives,
    is_positive,
    load_columns,
    load_rows,
    replace_positives,
    similarity_tile,
    store_columns,
    store_ds,
    store_rows,
    tile_of,
)


class Vectors(NamedTuple):
    """Vectors of the rows or of the columns of a tile, see `kernel_api`; None where absent."""

    scale: Any
    shift: Any
    masked: Any
    threshold: Any
    weight: Any


@triton.jit
def row_vectors(scale_ptr, shift_ptr, masked_ptr, threshold_ptr, weight_ptr, tile, SETTINGS):
    """Load the vectors of the rows, before the main loop to hide the latency."""
    return Vectors(
        load_rows(scale_ptr, tile, SETTINGS),
        load_rows(shift_ptr, tile, SETTINGS),
        load_rows(masked_ptr, tile, SETTINGS),
        load_rows(threshold_ptr, tile, SETTINGS),
        load_rows(weight_ptr, tile, SETTINGS),
    )


@triton.jit
def column_vectors(scale_ptr, shift_ptr, masked_ptr, threshold_ptr, weight_ptr, tile, SETTINGS):
    """Load the vectors of the columns, before the main loop to hide the latency."""
    return Vectors(
        load_columns(scale_ptr, tile, SETTINGS),
        load_columns(shift_ptr, tile, SETTINGS),
        load_columns(masked_ptr, tile, SETTINGS),
        load_columns(threshold_ptr, tile, SETTINGS),
        load_columns(weight_ptr, tile, SETTINGS),
    )


@triton.jit
def similarity_tiles(x_ptr, y_ptr, guide_x_ptr, guide_y_ptr, tile, SETTINGS):
    """Compute a tile of s and one of the guide's similarities t; the latter is None without a guide."""
    s, t = similarity_tile(x_ptr, y_ptr, tile.start_m, tile.start_n, SETTINGS.gemm, SETTINGS), None
    if guide_x_ptr is not None:
        t = similarity_tile(guide_x_ptr, guide_y_ptr, tile.start_m, tile.start_n, SETTINGS.other, SETTINGS)
    return s, t


@triton.jit
def row_exponents(s, row, column):
    """Compute the exponents of the row sums, and with a shared scale of the column sums."""
    shift = row.shift[:, None]
    if column.scale is not None:
        shift += column.masked[None, :]
    elif column.shift is not None:
        shift += column.shift[None, :]
    return s * row.scale[:, None] - shift


@triton.jit
def column_exponents(s, row, column):
    """Compute the exponents of the column sums with per-sample scales."""
    return s * column.scale[None, :] - (column.shift[None, :] + row.masked[:, None])


@triton.jit
def kept_of_row(values, t, row, otherwise: tl.constexpr):
    """Replace the values of pairs that the guide leaves out of the sum of their row."""
    return values if t is None else tl.where(t <= row.threshold[:, None], values, otherwise)


@triton.jit
def kept_of_column(values, t, column, otherwise: tl.constexpr):
    """Replace the values of pairs that the guide leaves out of the sum of their column."""
    return values if t is None else tl.where(t <= column.threshold[None, :], values, otherwise)


@triton.jit
def terms_of(exponent, positives, SETTINGS):
    """Compute the terms of sums (exponentials in base 2) or of maxima (exponents)."""
    if SETTINGS.exclude:
        exponent = replace_positives(exponent, positives, float("-inf"))
    return exponent if SETTINGS.maxima else tl.exp2(exponent)


@triton.jit
def sums_kernel(
    x_ptr, y_ptr, row_scale_ptr, row_shift_ptr, column_shift_ptr, column_scale_ptr, row_masked_ptr, column_masked_ptr,
    labels_ptr, last_ptr, guide_x_ptr, guide_y_ptr, row_threshold_ptr, column_threshold_ptr, window_ptr,
    row_ptr, column_ptr,
    SETTINGS: tl.constexpr,
):  # fmt: skip
    """Compute the sums or maxima of one tile over its columns and over its rows."""
    tile = tile_of(window_ptr, SETTINGS)
    row = row_vectors(row_scale_ptr, row_shift_ptr, row_masked_ptr, row_threshold_ptr, None, tile, SETTINGS)
    column = column_vectors(
        column_scale_ptr, column_shift_ptr, column_masked_ptr, column_threshold_ptr, None, tile, SETTINGS
    )  # fmt: skip
    s, t = similarity_tiles(x_ptr, y_ptr, guide_x_ptr, guide_y_ptr, tile, SETTINGS)
    positives = find_positives(labels_ptr, last_ptr, tile, SETTINGS)
    LEFT_OUT: tl.constexpr = float("-inf") if SETTINGS.maxima else 0.0
    terms = terms_of(row_exponents(s, row, column), positives, SETTINGS)
    row_terms = kept_of_row(terms, t, row, LEFT_OUT)
    store_rows(row_ptr, tile, tl.max(row_terms, 1) if SETTINGS.maxima else tl.sum(row_terms, 1))
    if column_ptr is not None:
        if column.scale is not None:
            terms = terms_of(column_exponents(s, row, column), positives, SETTINGS)
        terms = kept_of_column(terms, t, column, LEFT_OUT)
        store_columns(column_ptr, tile, tl.max(terms, 0) if SETTINGS.maxima else tl.sum(terms, 0))


@triton.jit
def terms_by_id(s, row, column, rows, columns, scale_ptr, tile, SETTINGS):
    """Compute the terms of positives by id in dS, see `kernel_api.WeightsByID`.

    `rows` and `columns` are pointers to the weights, sums and max-shifts.
    """
    weight = load_rows(rows[0], tile, SETTINGS)[:, None]
    d_sum = load_rows(rows[1], tile, SETTINGS)[:, None]
    if columns[0] is not None:
        column_weight = load_columns(columns[0], tile, SETTINGS)[None, :]
        d_sum = d_sum + load_columns(columns[1], tile, SETTINGS)[None, :]
    if scale_ptr is not None:
        if columns[0] is not None:
            weight = weight + column_weight
        e = tl.exp2(row_exponents(s, row, column))
        terms = tl.where(weight == 0, 0.0, e * weight) + tl.load(scale_ptr) * d_sum
    else:
        terms = tl.exp2(s * row.scale[:, None] - load_rows(rows[2], tile, SETTINGS)[:, None]) * weight + d_sum
        if columns[0] is not None:
            shift = load_columns(columns[2], tile, SETTINGS)[None, :]
            terms += tl.exp2(s * column.scale[None, :] - shift) * column_weight
    return terms


@triton.jit
def store_gradient(s, t, positive, row, column, positive_weight_ptr, by_id, moments, ds_ptr, tile, SETTINGS):
    """Store dS and its moments; `positive` marks the positives, None for a tile without."""
    excluded: tl.constexpr = SETTINGS.exclude and positive is not None
    exponent = row_exponents(s, row, column)
    e = tl.exp2(tl.where(positive, float("-inf"), exponent) if excluded else exponent)
    kept = kept_of_row(e, t, row, 0.0)
    if moments[0] is not None:
        store_rows(moments[0], tile, tl.sum(kept * s, 1))
    ds = kept * row.weight[:, None]
    if column.weight is not None:
        if column.scale is not None:
            exponent = column_exponents(s, row, column)
            e = tl.exp2(tl.where(positive, float("-inf"), exponent) if excluded else exponent)
        kept = kept_of_column(e, t, column, 0.0)
        ds += kept * column.weight[None, :]
        if moments[1] is not None:
            store_columns(moments[1], tile, tl.sum(kept * s, 0))
    if positive is not None:
        if positive_weight_ptr is not None:
            ds += tl.where(positive, load_rows(positive_weight_ptr, tile, SETTINGS)[:, None], 0.0)
        if by_id[0][0] is not None:
            ds = tl.where(positive, ds + terms_by_id(s, row, column, *by_id, tile, SETTINGS), ds)
    store_ds(ds_ptr, ds, tile, SETTINGS)


@triton.jit
def ds_kernel(
    x_ptr, y_ptr, row_scale_ptr, row_shift_ptr, column_shift_ptr, column_scale_ptr, row_masked_ptr, column_masked_ptr,
    labels_ptr, last_ptr, guide_x_ptr, guide_y_ptr, row_threshold_ptr, column_threshold_ptr,
    row_weight_ptr, column_weight_ptr, positive_weight_ptr,
    by_id_row_ptr, by_id_row_sum_ptr, by_id_column_ptr, by_id_column_sum_ptr, by_id_scale_ptr, by_id_row_shift_ptr,
    by_id_column_shift_ptr, window_ptr,
    row_ptr, column_ptr, ds_ptr,
    SETTINGS: tl.constexpr,
):  # fmt: skip
    """Compute one tile of dS and its moments."""
    tile = tile_of(window_ptr, SETTINGS)
    row = row_vectors(row_scale_ptr, row_shift_ptr, row_masked_ptr, row_threshold_ptr, row_weight_ptr, tile, SETTINGS)
    column = column_vectors(
        column_scale_ptr, column_shift_ptr, column_masked_ptr, column_threshold_ptr, column_weight_ptr, tile, SETTINGS
    )  # fmt: skip
    s, t = similarity_tiles(x_ptr, y_ptr, guide_x_ptr, guide_y_ptr, tile, SETTINGS)
    by_id = (
        (by_id_row_ptr, by_id_row_sum_ptr, by_id_row_shift_ptr),
        (by_id_column_ptr, by_id_column_sum_ptr, by_id_column_shift_ptr),
        by_id_scale_ptr,
    )
    moments = row_ptr, column_ptr
    positives = find_positives(labels_ptr, last_ptr, tile, SETTINGS)
    # Stored in both branches, because registers do not hold s and dS beyond a branch.
    if positives.present:
        positive = is_positive(positives, SETTINGS.block_n)
        store_gradient(s, t, positive, row, column, positive_weight_ptr, by_id, moments, ds_ptr, tile, SETTINGS)
    else:
        store_gradient(s, t, None, row, column, positive_weight_ptr, by_id, moments, ds_ptr, tile, SETTINGS)


@triton.jit
def positive_sums_kernel(
    x_ptr, y_ptr, row_scale_ptr, row_shift_ptr, labels_ptr, last_ptr, first_tile_ptr, num_tiles_ptr,
    sum_ptr, similarity_ptr, moment_ptr,
    SETTINGS: tl.constexpr,
):  # fmt: skip
    """Reduce the positives by id of one row tile.

    It loops over the column tiles that contain positives.
    """
    BLOCK_M: tl.constexpr = SETTINGS.block_m
    tile_m = tl.program_id(0)
    start_m = tile_m * BLOCK_M
    offs_m = start_m + tl.arange(0, BLOCK_M)
    row_scale, row_shift = tl.load(row_scale_ptr + offs_m), tl.load(row_shift_ptr + offs_m)
    label, last = tl.load(labels_ptr + offs_m), tl.load(last_ptr + offs_m)
    sums = tl.full((BLOCK_M,), float("-inf") if SETTINGS.maxima else 0.0, tl.float32)
    similarity = tl.zeros((BLOCK_M,), tl.float32)
    moment = tl.zeros((BLOCK_M,), tl.float32)
    first_tile = tl.load(first_tile_ptr + tile_m)
    for index in range(tl.load(num_tiles_ptr + tile_m)):
        start_n = (first_tile + index) * SETTINGS.block_n
        s = similarity_tile(x_ptr, y_ptr, start_m, start_n, SETTINGS.gemm, SETTINGS)
        positive = is_positive(PositiveRange(label - start_n, last - start_n, True), SETTINGS.block_n)
        exponent = tl.where(positive, s * row_scale[:, None] - row_shift[:, None], float("-inf"))
        e = tl.exp2(exponent)
        s = tl.where(positive, s, 0.0)
        sums = tl.maximum(sums, tl.max(exponent, 1)) if SETTINGS.maxima else sums + tl.sum(e, 1)
        similarity += tl.sum(s, 1)
        moment += tl.sum(e * s, 1)
    tl.store(sum_ptr + offs_m, sums)
    tl.store(similarity_ptr + offs_m, similarity)
    tl.store(moment_ptr + offs_m, moment)
