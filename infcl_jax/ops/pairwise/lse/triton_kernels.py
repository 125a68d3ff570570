"""Triton kernels of `pairwise_lse`, which `triton` launches; importing them needs Triton.

See `pairwise.triton_kernels`. Further constants:

    EXCLUDE: whether the positives are excluded.
    MAXIMA: whether to reduce exponents to maxima instead of exponentials to sums.
"""

import triton
import triton.language as tl

from infcl_jax.ops.pairwise.triton_kernels import find_positives, load_vector, similarity_tile, store_ds, tile_of


@triton.jit
def exponentials(exponent, positive, EXCLUDE: tl.constexpr, MAXIMA: tl.constexpr):
    """Compute the exponentials in base 2, or return the exponents if `MAXIMA`."""
    if EXCLUDE and positive is not None:
        exponent = tl.where(positive, float("-inf"), exponent)
    return exponent if MAXIMA else tl.exp2(exponent)


@triton.jit
def store_partials(
    ptr, index, stride, start, e, s, MOMENTS: tl.constexpr, MAXIMA: tl.constexpr, AXIS: tl.constexpr
):  # fmt: skip
    """Reduce a tile over one axis and store the result.

    The reductions are sums of e, maxima of its exponents or moments sum(e * s). They are stored from `[index, start]`
    in an array with rows of `stride` elements.
    """
    partials = tl.max(e, AXIS) if MAXIMA else tl.sum(e * s if MOMENTS else e, AXIS)
    tl.store(ptr + index * stride + start + tl.arange(0, s.shape[1 - AXIS]), partials)


@triton.jit
def terms_by_id(s, exponent, row_scale, column_scale, by_id, offs_m, offs_n):
    """Compute the terms of positives by id in dS, see `kernel_api.WeightsByID`."""
    row_ptr, row_sum_ptr, column_ptr, column_sum_ptr, scale_ptr, row_shift_ptr, column_shift_ptr = by_id
    weight = tl.load(row_ptr + offs_m)[:, None]
    d_sum = tl.load(row_sum_ptr + offs_m)[:, None]
    if scale_ptr is not None:
        if column_ptr is not None:
            weight = weight + tl.load(column_ptr + offs_n)[None, :]
            d_sum = d_sum + tl.load(column_sum_ptr + offs_n)[None, :]
        terms = tl.where(weight == 0, 0.0, tl.exp2(exponent) * weight) + tl.load(scale_ptr) * d_sum
    else:
        row_shift = tl.load(row_shift_ptr + offs_m)[:, None]
        terms = tl.exp2(s * row_scale[:, None] - row_shift) * weight + d_sum
        if column_ptr is not None:
            column_shift = tl.load(column_shift_ptr + offs_n)[None, :]
            e = tl.exp2(s * column_scale[None, :] - column_shift)
            terms += e * tl.load(column_ptr + offs_n)[None, :] + tl.load(column_sum_ptr + offs_n)[None, :]
    return terms


@triton.jit
def epilogue(
    s, label, last, tile, row_vectors, column_vectors, weights, by_id, offs_m, offs_n, results,
    EXCLUDE: tl.constexpr, MAXIMA: tl.constexpr, DS_TERMS: tl.constexpr,
):  # fmt: skip
    """Convert a tile of s to sums, maxima, or dS and moments.

    `label` and `last` are relative to the tile; None for a tile without positives.
    """
    BLOCK_M: tl.constexpr = s.shape[0]
    BLOCK_N: tl.constexpr = s.shape[1]
    tile_m, tile_n, tiles_m, tiles_n = tile
    row_scale, row_shift, row_masked = row_vectors
    column_scale, column_shift, column_masked = column_vectors
    row_weight, column_weight, positive_weight = weights
    row_partials_ptr, column_partials_ptr, ds_ptr = results
    MOMENTS: tl.constexpr = row_weight is not None
    positive = None if label is None else find_positives(label, last, BLOCK_N)

    shift = row_shift[:, None]
    if column_scale is not None:
        shift += column_masked[None, :]
    elif column_shift is not None:
        shift += column_shift[None, :]
    row_exponent = s * row_scale[:, None] - shift
    e = exponentials(row_exponent, positive, EXCLUDE, MAXIMA)
    if row_partials_ptr is not None:
        rows = tiles_m.to(tl.int64) * BLOCK_M
        store_partials(row_partials_ptr, tile_n, rows, tile_m * BLOCK_M, e, s, MOMENTS, MAXIMA, 1)
    if ds_ptr is not None:
        if column_weight is None or column_scale is not None:
            ds = e * row_weight[:, None]
        else:
            ds = e * (row_weight[:, None] + column_weight[None, :])
    if column_scale is not None and (column_partials_ptr is not None or column_weight is not None):
        exponent = s * column_scale[None, :] - (column_shift[None, :] + row_masked[:, None])
        e = exponentials(exponent, positive, EXCLUDE, MAXIMA)
        if column_weight is not None:
            ds += e * column_weight[None, :]
    if column_partials_ptr is not None:
        columns = tiles_n.to(tl.int64) * BLOCK_N
        store_partials(column_partials_ptr, tile_m, columns, tile_n * BLOCK_N, e, s, MOMENTS, MAXIMA, 0)
    if ds_ptr is not None:
        if positive is not None and positive_weight is not None:
            ds += tl.where(positive, positive_weight[:, None], 0.0)
        if positive is not None and by_id[0] is not None:
            terms = terms_by_id(s, row_exponent, row_scale, column_scale, by_id, offs_m, offs_n)
            ds = tl.where(positive, ds + terms, ds)
        store_ds(ds_ptr, ds, tile, DS_TERMS)


@triton.jit
def tile_kernel(
    x_ptr, y_ptr, row_scale_ptr, row_shift_ptr, column_shift_ptr, column_scale_ptr, row_masked_ptr, column_masked_ptr,
    labels_ptr, last_ptr, row_weight_ptr, column_weight_ptr, positive_weight_ptr,
    by_id_row_ptr, by_id_row_sum_ptr, by_id_column_ptr, by_id_column_sum_ptr, by_id_scale_ptr, by_id_row_shift_ptr,
    by_id_column_shift_ptr, window_ptr,
    row_partials_ptr, column_partials_ptr, ds_ptr,
    WIDTH: tl.constexpr, STRIDE: tl.constexpr,
    NUM_PAIRS: tl.constexpr, X_TERMS: tl.constexpr, Y_TERMS: tl.constexpr,
    EXCLUDE: tl.constexpr, MAXIMA: tl.constexpr, DS_TERMS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """Compute one tile of sums or maxima, or of dS with moments.

    Without `row_weight_ptr` the results are sums of e or maxima of its exponents, else dS and moments.
    """
    tile, start_m, start_n = tile_of(window_ptr, BLOCK_M, BLOCK_N, GROUP_M)
    offs_m, offs_n = start_m + tl.arange(0, BLOCK_M), start_n + tl.arange(0, BLOCK_N)
    # Loaded before the main loop to hide the latency.
    row_scale, row_shift = tl.load(row_scale_ptr + offs_m), tl.load(row_shift_ptr + offs_m)
    column_shift, column_scale = load_vector(column_shift_ptr, offs_n), load_vector(column_scale_ptr, offs_n)
    row_vectors = row_scale, row_shift, load_vector(row_masked_ptr, offs_m)
    column_vectors = column_scale, column_shift, load_vector(column_masked_ptr, offs_n)
    weights = (
        load_vector(row_weight_ptr, offs_m),
        load_vector(column_weight_ptr, offs_n),
        load_vector(positive_weight_ptr, offs_m),
    )
    s = similarity_tile(
        x_ptr, y_ptr, start_m, start_n, WIDTH, STRIDE, NUM_PAIRS, X_TERMS, Y_TERMS, BLOCK_M, BLOCK_N, BLOCK_D
    )  # fmt: skip
    results = row_partials_ptr, column_partials_ptr, ds_ptr
    by_id = (
        by_id_row_ptr, by_id_row_sum_ptr, by_id_column_ptr, by_id_column_sum_ptr, by_id_scale_ptr, by_id_row_shift_ptr,
        by_id_column_shift_ptr,
    )  # fmt: skip
    # Few tiles contain positives. Only these compare every pair with the labels.
    label, last, any_positive = None, None, False
    if labels_ptr is not None:
        label, last = tl.load(labels_ptr + offs_m) - start_n, load_vector(last_ptr, offs_m)
        if last is None:
            inside = (label >= 0) & (label < BLOCK_N)
        else:
            last -= start_n
            inside = (last >= 0) & (label < BLOCK_N)
        any_positive = tl.max(inside.to(tl.int32), 0) > 0
    if any_positive:
        epilogue(
            s, label, last, tile, row_vectors, column_vectors, weights, by_id, offs_m, offs_n, results,
            EXCLUDE, MAXIMA, DS_TERMS,
        )  # fmt: skip
    else:
        epilogue(
            s, None, None, tile, row_vectors, column_vectors, weights, by_id, offs_m, offs_n, results,
            EXCLUDE, MAXIMA, DS_TERMS,
        )  # fmt: skip


@triton.jit
def positive_sums_kernel(
    x_ptr, y_ptr, row_scale_ptr, row_shift_ptr, labels_ptr, last_ptr, first_tile_ptr, num_tiles_ptr,
    sum_ptr, similarity_ptr, moment_ptr,
    WIDTH: tl.constexpr, STRIDE: tl.constexpr,
    NUM_PAIRS: tl.constexpr, X_TERMS: tl.constexpr, Y_TERMS: tl.constexpr,
    MAXIMA: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Reduce the positives by id of one row tile.

    It loops over the column tiles that contain positives.
    """
    tile_m = tl.program_id(0)
    start_m = tile_m * BLOCK_M
    offs_m = start_m + tl.arange(0, BLOCK_M)
    row_scale, row_shift = tl.load(row_scale_ptr + offs_m), tl.load(row_shift_ptr + offs_m)
    label, last = tl.load(labels_ptr + offs_m), tl.load(last_ptr + offs_m)
    sums = tl.full((BLOCK_M,), float("-inf") if MAXIMA else 0.0, tl.float32)
    similarity = tl.zeros((BLOCK_M,), tl.float32)
    moment = tl.zeros((BLOCK_M,), tl.float32)
    first_tile = tl.load(first_tile_ptr + tile_m)
    for index in range(tl.load(num_tiles_ptr + tile_m)):
        start_n = (first_tile + index) * BLOCK_N
        s = similarity_tile(
            x_ptr, y_ptr, start_m, start_n, WIDTH, STRIDE, NUM_PAIRS, X_TERMS, Y_TERMS, BLOCK_M, BLOCK_N, BLOCK_D
        )  # fmt: skip
        positive = find_positives(label - start_n, last - start_n, BLOCK_N)
        exponent = tl.where(positive, s * row_scale[:, None] - row_shift[:, None], float("-inf"))
        e = tl.exp2(exponent)
        s = tl.where(positive, s, 0.0)
        sums = tl.maximum(sums, tl.max(exponent, 1)) if MAXIMA else sums + tl.sum(e, 1)
        similarity += tl.sum(s, 1)
        moment += tl.sum(e * s, 1)
    tl.store(sum_ptr + offs_m, sums)
    tl.store(similarity_ptr + offs_m, similarity)
    tl.store(moment_ptr + offs_m, moment)
