"""Triton kernels of the sigmoid loss, which `triton` launches; importing them needs Triton.

`kernel_api` describes the vectors, see `pairwise.triton_kernels`.
"""

import triton
import triton.language as tl

from infcl_jax.ops.pairwise.sigmoid import softplus
from infcl_jax.ops.pairwise.triton_kernels import (
    load_columns,
    load_rows,
    similarity_tile,
    store_ds,
    store_rows,
    tile_of,
)

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
def softplus_sum(z):
    """Sum softplus of the logits over the columns, in nats.

    One logarithm serves eight pairs.
    """
    u = merge_halves(merge_halves(merge_halves(tl.exp2(-tl.abs(z)))))
    return tl.sum(tl.maximum(z, 0.0), 1) * LN2 + tl.sum(log1p(u), 1)


@triton.jit
def logits_of(s, scale, row_bias, column_bias):
    """Compute the logits of a tile in base 2."""
    bias = row_bias[:, None]
    if column_bias is not None:
        bias += column_bias[None, :]
    return s * scale + bias


@triton.jit
def may_match(row_lowest_ptr, row_highest_ptr, column_lowest_ptr, column_highest_ptr, tile, SETTINGS):
    """Return whether a tile may contain positives. Few do, and only these compare the group numbers of every pair."""
    overlap = False
    if row_lowest_ptr is not None:
        m, n = tile.start_m // SETTINGS.block_m, tile.start_n // SETTINGS.block_n
        below = tl.load(row_lowest_ptr + m) <= tl.load(column_highest_ptr + n)
        overlap = below & (tl.load(row_highest_ptr + m) >= tl.load(column_lowest_ptr + n))
    return overlap


@triton.jit
def matches(row_ptr, column_ptr, tile, SETTINGS):
    """Mark the positives of a tile."""
    return load_rows(row_ptr, tile, SETTINGS)[:, None] == load_columns(column_ptr, tile, SETTINGS)[None, :]


@triton.jit
def sums_kernel(
    x_ptr, y_ptr, scale_ptr, row_bias_ptr, column_bias_ptr, match_row_ptr, match_column_ptr, match_row_lowest_ptr,
    match_row_highest_ptr, match_column_lowest_ptr, match_column_highest_ptr, window_ptr,
    negative_ptr, positive_ptr,
    SETTINGS: tl.constexpr,
):  # fmt: skip
    """Compute the row sums of one tile, of negatives and of positives."""
    tile = tile_of(window_ptr, SETTINGS)
    # Loaded before the main loop to hide the latency.
    scale, row_bias = tl.load(scale_ptr), load_rows(row_bias_ptr, tile, SETTINGS)
    column_bias = load_columns(column_bias_ptr, tile, SETTINGS)
    s = similarity_tile(x_ptr, y_ptr, tile.start_m, tile.start_n, SETTINGS.gemm, SETTINGS)
    z = logits_of(s, scale, row_bias, column_bias)
    if match_row_ptr is not None:
        positive = tl.zeros_like(row_bias)
        ranges = match_row_lowest_ptr, match_row_highest_ptr, match_column_lowest_ptr, match_column_highest_ptr
        if may_match(*ranges, tile, SETTINGS):
            match = matches(match_row_ptr, match_column_ptr, tile, SETTINGS)
            positive = softplus_sum(tl.where(match, -z, float("-inf")))
            z = tl.where(match, float("-inf"), z)
        store_rows(positive_ptr, tile, positive)
    store_rows(negative_ptr, tile, softplus_sum(z))


@triton.jit
def store_gradient(ds, s, tile, scale_moment_ptr, bias_moment_ptr, ds_ptr, SETTINGS):
    """Store a tile of dS and its moments."""
    if scale_moment_ptr is not None:
        store_rows(scale_moment_ptr, tile, tl.sum(ds * s, 1))
        store_rows(bias_moment_ptr, tile, tl.sum(ds, 1))
    store_ds(ds_ptr, ds, tile, SETTINGS)


@triton.jit
def ds_kernel(
    x_ptr, y_ptr, scale_ptr, row_bias_ptr, column_bias_ptr, match_row_ptr, match_column_ptr, match_row_lowest_ptr,
    match_row_highest_ptr, match_column_lowest_ptr, match_column_highest_ptr, window_ptr,
    negative_weight_ptr, positive_weight_ptr,
    scale_moment_ptr, bias_moment_ptr, ds_ptr,
    SETTINGS: tl.constexpr,
):  # fmt: skip
    """Compute one tile of dS and its row moments."""
    tile = tile_of(window_ptr, SETTINGS)
    # Loaded before the main loop to hide the latency.
    scale, row_bias = tl.load(scale_ptr), load_rows(row_bias_ptr, tile, SETTINGS)
    column_bias = load_columns(column_bias_ptr, tile, SETTINGS)
    weight = load_rows(negative_weight_ptr, tile, SETTINGS)[:, None]
    s = similarity_tile(x_ptr, y_ptr, tile.start_m, tile.start_n, SETTINGS.gemm, SETTINGS)
    ranges = match_row_lowest_ptr, match_row_highest_ptr, match_column_lowest_ptr, match_column_highest_ptr
    # Stored in both branches, because registers do not hold s and dS beyond a branch.
    if may_match(*ranges, tile, SETTINGS):
        if match_row_ptr is not None:
            match = matches(match_row_ptr, match_column_ptr, tile, SETTINGS)
            # sigmoid(-z) of the positives, without the cancellation of sigmoid(z) - 1.
            z = logits_of(s, scale, row_bias, column_bias)
            sigmoid = 1.0 / (1.0 + tl.exp2(tl.where(match, z, -z)))
            ds = tl.where(match, load_rows(positive_weight_ptr, tile, SETTINGS)[:, None], weight) * sigmoid
            store_gradient(ds, s, tile, scale_moment_ptr, bias_moment_ptr, ds_ptr, SETTINGS)
    else:
        ds = weight / (1.0 + tl.exp2(-logits_of(s, scale, row_bias, column_bias)))
        store_gradient(ds, s, tile, scale_moment_ptr, bias_moment_ptr, ds_ptr, SETTINGS)
