"""Triton kernels of `pairwise_lse`, which `triton` launches; importing them needs Triton.

See `pairwise.triton_kernels`.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from infcl_jax.ops.pairwise.triton_kernels import (
    Positives,
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
    """Vectors of the exponents in a tile, see `kernel_api.LseOperands`."""

    row_scale: Any
    row_shift: Any
    column_shift: Any
    column_scale: Any
    row_masked: Any
    column_masked: Any


@triton.jit
def load_vectors(
    row_scale_ptr, row_shift_ptr, column_shift_ptr, column_scale_ptr, row_masked_ptr, column_masked_ptr, tile, SETTINGS
):  # fmt: skip
    """Load the vectors of a tile, before the main loop to hide the latency."""
    return Vectors(
        load_rows(row_scale_ptr, tile, SETTINGS)[:, None],
        load_rows(row_shift_ptr, tile, SETTINGS)[:, None],
        load_columns(column_shift_ptr, tile, SETTINGS),
        load_columns(column_scale_ptr, tile, SETTINGS),
        load_rows(row_masked_ptr, tile, SETTINGS),
        load_columns(column_masked_ptr, tile, SETTINGS),
    )


@triton.jit
def row_exponents(s, v):
    """Compute the exponents of the row sums, and with a shared scale of the column sums."""
    shift = v.row_shift
    if v.column_scale is not None:
        shift += v.column_masked[None, :]
    elif v.column_shift is not None:
        shift += v.column_shift[None, :]
    return s * v.row_scale - shift


@triton.jit
def column_exponents(s, v):
    """Compute the exponents of the column sums with per-sample scales."""
    return s * v.column_scale[None, :] - (v.column_shift[None, :] + v.row_masked[:, None])


@triton.jit
def reduced(exponent, positives, AXIS: tl.constexpr, SETTINGS):
    """Reduce a tile over one axis: sums of exponentials or maxima of exponents."""
    if SETTINGS.exclude:
        exponent = replace_positives(exponent, positives, float("-inf"))
    return tl.max(exponent, AXIS) if SETTINGS.maxima else tl.sum(tl.exp2(exponent), AXIS)


@triton.jit
def sums_kernel(
    x_ptr, y_ptr, row_scale_ptr, row_shift_ptr, column_shift_ptr, column_scale_ptr, row_masked_ptr, column_masked_ptr,
    labels_ptr, last_ptr, window_ptr,
    row_ptr, column_ptr,
    SETTINGS: tl.constexpr,
):  # fmt: skip
    """Compute the sums or maxima of one tile over its columns and over its rows."""
    tile = tile_of(window_ptr, SETTINGS)
    v = load_vectors(
        row_scale_ptr, row_shift_ptr, column_shift_ptr, column_scale_ptr, row_masked_ptr, column_masked_ptr, tile,
        SETTINGS,
    )  # fmt: skip
    s = similarity_tile(x_ptr, y_ptr, tile.start_m, tile.start_n, SETTINGS.gemm, SETTINGS)
    positives = find_positives(labels_ptr, last_ptr, tile, SETTINGS)
    exponent = row_exponents(s, v)
    store_rows(row_ptr, tile, reduced(exponent, positives, 1, SETTINGS))
    if column_ptr is not None:
        if v.column_scale is not None:
            exponent = column_exponents(s, v)
        store_columns(column_ptr, tile, reduced(exponent, positives, 0, SETTINGS))


@triton.jit
def terms_by_id(s, v, rows, columns, scale_ptr, tile, SETTINGS):
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
        terms = tl.where(weight == 0, 0.0, tl.exp2(row_exponents(s, v)) * weight) + tl.load(scale_ptr) * d_sum
    else:
        terms = tl.exp2(s * v.row_scale - load_rows(rows[2], tile, SETTINGS)[:, None]) * weight + d_sum
        if columns[0] is not None:
            shift = load_columns(columns[2], tile, SETTINGS)[None, :]
            terms += tl.exp2(s * v.column_scale[None, :] - shift) * column_weight
    return terms


@triton.jit
def store_gradient(
    s, positive, v, row_weight, column_weight, positive_weight_ptr, by_id, moments, ds_ptr, tile, SETTINGS
):  # fmt: skip
    """Store dS and its moments; `positive` marks the positives, None for a tile without."""
    excluded: tl.constexpr = SETTINGS.exclude and positive is not None
    exponent = row_exponents(s, v)
    e = tl.exp2(tl.where(positive, float("-inf"), exponent) if excluded else exponent)
    if moments[0] is not None:
        store_rows(moments[0], tile, tl.sum(e * s, 1))
    ds = e * row_weight[:, None]
    if column_weight is not None:
        if v.column_scale is not None:
            exponent = column_exponents(s, v)
            e = tl.exp2(tl.where(positive, float("-inf"), exponent) if excluded else exponent)
        ds += e * column_weight[None, :]
        if moments[1] is not None:
            store_columns(moments[1], tile, tl.sum(e * s, 0))
    if positive is not None:
        if positive_weight_ptr is not None:
            ds += tl.where(positive, load_rows(positive_weight_ptr, tile, SETTINGS)[:, None], 0.0)
        if by_id[0][0] is not None:
            ds = tl.where(positive, ds + terms_by_id(s, v, *by_id, tile, SETTINGS), ds)
    store_ds(ds_ptr, ds, tile, SETTINGS)


@triton.jit
def ds_kernel(
    x_ptr, y_ptr, row_scale_ptr, row_shift_ptr, column_shift_ptr, column_scale_ptr, row_masked_ptr, column_masked_ptr,
    labels_ptr, last_ptr, row_weight_ptr, column_weight_ptr, positive_weight_ptr,
    by_id_row_ptr, by_id_row_sum_ptr, by_id_column_ptr, by_id_column_sum_ptr, by_id_scale_ptr, by_id_row_shift_ptr,
    by_id_column_shift_ptr, window_ptr,
    row_ptr, column_ptr, ds_ptr,
    SETTINGS: tl.constexpr,
):  # fmt: skip
    """Compute one tile of dS and its moments."""
    tile = tile_of(window_ptr, SETTINGS)
    v = load_vectors(
        row_scale_ptr, row_shift_ptr, column_shift_ptr, column_scale_ptr, row_masked_ptr, column_masked_ptr, tile,
        SETTINGS,
    )  # fmt: skip
    row_weight = load_rows(row_weight_ptr, tile, SETTINGS)
    column_weight = load_columns(column_weight_ptr, tile, SETTINGS)
    s = similarity_tile(x_ptr, y_ptr, tile.start_m, tile.start_n, SETTINGS.gemm, SETTINGS)
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
        store_gradient(
            s, positive, v, row_weight, column_weight, positive_weight_ptr, by_id, moments, ds_ptr, tile, SETTINGS
        )  # fmt: skip
    else:
        store_gradient(
            s, None, v, row_weight, column_weight, positive_weight_ptr, by_id, moments, ds_ptr, tile, SETTINGS
        )  # fmt: skip


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
        positive = is_positive(Positives(label - start_n, last - start_n, True), SETTINGS.block_n)
        exponent = tl.where(positive, s * row_scale[:, None] - row_shift[:, None], float("-inf"))
        e = tl.exp2(exponent)
        s = tl.where(positive, s, 0.0)
        sums = tl.maximum(sums, tl.max(exponent, 1)) if SETTINGS.maxima else sums + tl.sum(e, 1)
        similarity += tl.sum(s, 1)
        moment += tl.sum(e * s, 1)
    tl.store(sum_ptr + offs_m, sums)
    tl.store(similarity_ptr + offs_m, similarity)
    tl.store(moment_ptr + offs_m, moment)
