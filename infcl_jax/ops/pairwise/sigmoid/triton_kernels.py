"""Triton kernels of the sigmoid loss, which `triton` launches; importing them needs Triton.

`kernel_api` describes the vectors, `pairwise.triton_kernels` the constants.
"""

import triton
import triton.language as tl

from infcl_jax.ops.pairwise.sigmoid import softplus
from infcl_jax.ops.pairwise.triton_kernels import load_vector, similarity_tile, store_ds, store_rows, tile_of

LN2 = tl.constexpr(softplus.LN2)
SMALL = tl.constexpr(softplus.SMALL)
C0, C1, C2, C3, C4, C5 = (tl.constexpr(c) for c in softplus.COEFFICIENTS)


@triton.jit
def log1p(u):
    """Compute log(1 + u) for u >= 0 with full relative precision, see `softplus`."""
    polynomial = ((((C5 * u + C4) * u + C3) * u + C2) * u + C1) * u + C0
    return tl.where(u < SMALL, u * polynomial, tl.log2(1.0 + u) * LN2)


@triton.jit
def merge_halves(u):
    """Merge the left and the right half of the columns elementwise, see `softplus.merge`."""
    M: tl.constexpr = u.shape[0]
    N: tl.constexpr = u.shape[1] // 2
    left, right = tl.split(tl.permute(tl.reshape(u, (M, 2, N)), (0, 2, 1)))
    return left + (right + left * right)


@triton.jit
def row_sum(linear, e):
    """Sum linear * ln 2 + log1p(e) over the columns.

    One logarithm serves eight pairs.
    """
    u = merge_halves(merge_halves(merge_halves(e)))
    return tl.sum(linear, 1) * LN2 + tl.sum(log1p(u), 1)


@triton.jit
def ranges_overlap(row_lowest_ptr, row_highest_ptr, column_lowest_ptr, column_highest_ptr, m, n):
    """Return whether a tile may contain positives."""
    below = tl.load(row_lowest_ptr + m) <= tl.load(column_highest_ptr + n)
    return below & (tl.load(row_highest_ptr + m) >= tl.load(column_lowest_ptr + n))


@triton.jit
def logits_of(s, scale, row_bias, column_bias):
    """Compute the logits of a tile in base 2."""
    bias = row_bias[:, None]
    if column_bias is not None:
        bias += column_bias[None, :]
    return s * scale + bias


@triton.jit
def sums_kernel(
    x_ptr, y_ptr, scale_ptr, row_bias_ptr, column_bias_ptr, match_row_ptr, match_column_ptr, match_row_lowest_ptr,
    match_row_highest_ptr, match_column_lowest_ptr, match_column_highest_ptr, window_ptr,
    negative_ptr, positive_ptr,
    WIDTH: tl.constexpr, STRIDE: tl.constexpr,
    NUM_PAIRS: tl.constexpr, X_TERMS: tl.constexpr, Y_TERMS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """Compute the row sums of one tile, of negatives and of positives."""
    tile, start_m, start_n = tile_of(window_ptr, BLOCK_M, BLOCK_N, GROUP_M)
    offs_m, offs_n = start_m + tl.arange(0, BLOCK_M), start_n + tl.arange(0, BLOCK_N)
    # Loaded before the main loop to hide the latency.
    scale, row_bias, column_bias = (
        tl.load(scale_ptr),
        tl.load(row_bias_ptr + offs_m),
        load_vector(column_bias_ptr, offs_n),
    )
    s = similarity_tile(
        x_ptr, y_ptr, start_m, start_n, WIDTH, STRIDE, NUM_PAIRS, X_TERMS, Y_TERMS, BLOCK_M, BLOCK_N, BLOCK_D
    )  # fmt: skip
    z = logits_of(s, scale, row_bias, column_bias)
    e = tl.exp2(-tl.abs(z))
    if match_row_ptr is None:
        store_rows(negative_ptr, tile, row_sum(tl.maximum(z, 0.0), e))
    else:
        # Few tiles contain positives. Only these compare the group numbers of every pair.
        if ranges_overlap(
            match_row_lowest_ptr, match_row_highest_ptr, match_column_lowest_ptr, match_column_highest_ptr,
            start_m // BLOCK_M, start_n // BLOCK_N,
        ):  # fmt: skip
            row, column = tl.load(match_row_ptr + offs_m), tl.load(match_column_ptr + offs_n)
            match = row[:, None] == column[None, :]
            negative = row_sum(tl.where(match, 0.0, tl.maximum(z, 0.0)), tl.where(match, 0.0, e))
            store_rows(negative_ptr, tile, negative)
            positive = row_sum(tl.where(match, tl.maximum(-z, 0.0), 0.0), tl.where(match, e, 0.0))
            store_rows(positive_ptr, tile, positive)
        else:
            store_rows(negative_ptr, tile, row_sum(tl.maximum(z, 0.0), e))
            store_rows(positive_ptr, tile, tl.zeros((BLOCK_M,), tl.float32))


@triton.jit
def store_epilogue(ds, s, tile, scale_moment_ptr, bias_moment_ptr, ds_ptr, DS_TERMS: tl.constexpr):
    """Store a tile of dS and its moments."""
    if scale_moment_ptr is not None:
        store_rows(scale_moment_ptr, tile, tl.sum(ds * s, 1))
        store_rows(bias_moment_ptr, tile, tl.sum(ds, 1))
    store_ds(ds_ptr, ds, tile, DS_TERMS)


@triton.jit
def ds_kernel(
    x_ptr, y_ptr, scale_ptr, row_bias_ptr, column_bias_ptr, match_row_ptr, match_column_ptr, match_row_lowest_ptr,
    match_row_highest_ptr, match_column_lowest_ptr, match_column_highest_ptr, window_ptr,
    negative_weight_ptr, positive_weight_ptr,
    scale_moment_ptr, bias_moment_ptr, ds_ptr,
    WIDTH: tl.constexpr, STRIDE: tl.constexpr,
    NUM_PAIRS: tl.constexpr, X_TERMS: tl.constexpr, Y_TERMS: tl.constexpr, DS_TERMS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """Compute one tile of dS and its row moments."""
    tile, start_m, start_n = tile_of(window_ptr, BLOCK_M, BLOCK_N, GROUP_M)
    offs_m, offs_n = start_m + tl.arange(0, BLOCK_M), start_n + tl.arange(0, BLOCK_N)
    # Loaded before the main loop to hide the latency.
    scale, row_bias, column_bias = (
        tl.load(scale_ptr),
        tl.load(row_bias_ptr + offs_m),
        load_vector(column_bias_ptr, offs_n),
    )
    weight, positive_weight = tl.load(negative_weight_ptr + offs_m), load_vector(positive_weight_ptr, offs_m)
    s = similarity_tile(
        x_ptr, y_ptr, start_m, start_n, WIDTH, STRIDE, NUM_PAIRS, X_TERMS, Y_TERMS, BLOCK_M, BLOCK_N, BLOCK_D
    )  # fmt: skip
    z = logits_of(s, scale, row_bias, column_bias)
    if match_row_ptr is None:
        ds = weight[:, None] / (1.0 + tl.exp2(-z))
        store_epilogue(ds, s, tile, scale_moment_ptr, bias_moment_ptr, ds_ptr, DS_TERMS)
    else:
        if ranges_overlap(
            match_row_lowest_ptr, match_row_highest_ptr, match_column_lowest_ptr, match_column_highest_ptr,
            start_m // BLOCK_M, start_n // BLOCK_N,
        ):  # fmt: skip
            row, column = tl.load(match_row_ptr + offs_m), tl.load(match_column_ptr + offs_n)
            match = row[:, None] == column[None, :]
            # sigmoid(-z) of the positives, without the cancellation of sigmoid(z) - 1.
            sigmoid = 1.0 / (1.0 + tl.exp2(tl.where(match, z, -z)))
            ds = tl.where(match, positive_weight[:, None], weight[:, None]) * sigmoid
            store_epilogue(ds, s, tile, scale_moment_ptr, bias_moment_ptr, ds_ptr, DS_TERMS)
        else:
            ds = weight[:, None] / (1.0 + tl.exp2(-z))
            store_epilogue(ds, s, tile, scale_moment_ptr, bias_moment_ptr, ds_ptr, DS_TERMS)
