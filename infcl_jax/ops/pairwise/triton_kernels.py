"""Triton kernels of all losses; importing them needs Triton.

A program computes one tile of similarities s `[block_m, block_n]` and the epilogue of a loss. The named tuples of the
operands and weights describe the vectors; a pointer that is None stands for an absent vector or a result that is not
needed. SETTINGS is a `triton.Settings`.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Tile(NamedTuple):
    """Tile of a program.

    Attributes:
      m: index of the row tile in the window.
      n: index of the column tile in the window.
      tiles_m: number of row tiles of the window.
      tiles_n: number of column tiles of the window.
      start_m: first row in the block.
      start_n: first column in the block.
    """

    m: Any
    n: Any
    tiles_m: Any
    tiles_n: Any
    start_m: Any
    start_n: Any


@triton.jit
def tile_of(window_ptr, SETTINGS):
    """Return the tile of this program."""
    tiles_m, tiles_n = tl.load(window_ptr + 2), tl.load(window_ptr + 3)
    program = tl.program_id(0)
    m, n = tl.swizzle2d(program // tiles_n, program % tiles_n, tiles_m, tiles_n, SETTINGS.group_m)
    start_m = tl.load(window_ptr) + m * SETTINGS.block_m
    start_n = tl.load(window_ptr + 1) + n * SETTINGS.block_n
    return Tile(m, n, tiles_m, tiles_n, start_m, start_n)


@triton.jit
def similarity_tile(x_ptr, y_ptr, start_m, start_n, GEMM, SETTINGS):
    """Compute one tile of s in a single loop over all pairs of terms."""
    BLOCK_M: tl.constexpr = SETTINGS.block_m
    BLOCK_N: tl.constexpr = SETTINGS.block_n
    BLOCK_D: tl.constexpr = SETTINGS.block_d
    offs_m, offs_n, offs_d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    x_ptrs = x_ptr + (start_m.to(tl.int64) * GEMM.stride + offs_m[:, None] * GEMM.stride + offs_d[None, :])
    y_ptrs = y_ptr + (start_n.to(tl.int64) * GEMM.stride + offs_n[None, :] * GEMM.stride + offs_d[:, None])
    s = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(GEMM.num_pairs * GEMM.width // BLOCK_D):
        digit = step // (GEMM.width // BLOCK_D) * 4
        start_d = step % (GEMM.width // BLOCK_D) * BLOCK_D
        x_offset = ((GEMM.x_terms >> digit) & 15) * GEMM.width + start_d
        y_offset = ((GEMM.y_terms >> digit) & 15) * GEMM.width + start_d
        s = tl.dot(tl.load(x_ptrs + x_offset), tl.load(y_ptrs + y_offset), s)
    return s


@triton.jit
def load_rows(ptr, tile, SETTINGS):
    """Load a row vector of a tile; None if it is absent."""
    return None if ptr is None else tl.load(ptr + tile.start_m + tl.arange(0, SETTINGS.block_m))


@triton.jit
def load_columns(ptr, tile, SETTINGS):
    """Load a column vector of a tile; None if it is absent."""
    return None if ptr is None else tl.load(ptr + tile.start_n + tl.arange(0, SETTINGS.block_n))


@triton.jit
def store_rows(ptr, tile, values):
    """Store one value for each row of a tile in `[tiles_n, rows]`."""
    BLOCK_M: tl.constexpr = values.shape[0]
    tl.store(ptr + tile.n * (tile.tiles_m.to(tl.int64) * BLOCK_M) + tile.m * BLOCK_M + tl.arange(0, BLOCK_M), values)


@triton.jit
def store_columns(ptr, tile, values):
    """Store one value for each column of a tile in `[tiles_m, columns]`."""
    BLOCK_N: tl.constexpr = values.shape[0]
    tl.store(ptr + tile.m * (tile.tiles_n.to(tl.int64) * BLOCK_N) + tile.n * BLOCK_N + tl.arange(0, BLOCK_N), values)


@triton.jit
def store_ds(ds_ptr, ds, tile, SETTINGS):
    """Store a tile of dS in bf16 terms; each is a rounding residual."""
    BLOCK_M: tl.constexpr = ds.shape[0]
    BLOCK_N: tl.constexpr = ds.shape[1]
    TERMS: tl.constexpr = SETTINGS.ds_terms
    columns = tile.tiles_n.to(tl.int64) * BLOCK_N
    ds_ptr += tile.m * BLOCK_M * columns * TERMS + tile.n * BLOCK_N
    stride_m = tile.tiles_n * BLOCK_N * TERMS
    offs = tl.arange(0, BLOCK_M)[:, None] * stride_m + tl.arange(0, BLOCK_N)[None, :]
    for _ in tl.static_range(TERMS):
        rounded = ds.to(tl.bfloat16)
        tl.store(ds_ptr + offs, rounded)
        ds -= rounded.to(tl.float32)
        ds_ptr += columns


class PositiveRange(NamedTuple):
    """Positives of a tile: one column of each row, or with ids the columns from `label` to `last`.

    Attributes:
      label: column of each row's first positive, relative to the tile; None for a block without positives.
      last: column of each row's last positive, relative to the tile; None without ids.
      present: whether the tile may contain positives. Few do, and only these compare every pair with the labels.
    """

    label: Any
    last: Any
    present: Any


@triton.jit
def find_positives(labels_ptr, last_ptr, tile, SETTINGS):
    """Find the positives of a tile."""
    label, last, present = load_rows(labels_ptr, tile, SETTINGS), load_rows(last_ptr, tile, SETTINGS), False
    if label is not None:
        label -= tile.start_n
        if last is not None:
            last -= tile.start_n
        inside = ((label if last is None else last) >= 0) & (label < SETTINGS.block_n)
        present = tl.max(inside.to(tl.int32), 0) > 0
    return PositiveRange(label, last, present)


@triton.jit
def is_positive(positives, BLOCK_N: tl.constexpr):
    """Mark the positives of a tile; None for a block without positives."""
    column, mask = tl.arange(0, BLOCK_N)[None, :], None
    if positives.last is not None:
        mask = (positives.label[:, None] <= column) & (column <= positives.last[:, None])
    elif positives.label is not None:
        mask = positives.label[:, None] == column
    return mask


@triton.jit
def replace_positives(values, positives, replacement: tl.constexpr):
    """Replace the values of a tile at its positives."""
    if positives.label is not None and positives.present:
        values = tl.where(is_positive(positives, values.shape[1]), replacement, values)
    return values


@triton.jit
def diagonal_kernel(x_ptr, y_ptr, s_ii_ptr, SETTINGS: tl.constexpr):
    """Compute the similarities s_ii on the diagonal of one tile."""
    BLOCK_M: tl.constexpr = SETTINGS.block_m
    BLOCK_N: tl.constexpr = SETTINGS.block_n
    start = tl.program_id(0) * min(BLOCK_M, BLOCK_N)
    start_m = start // BLOCK_M * BLOCK_M
    start_n = start // BLOCK_N * BLOCK_N
    s = similarity_tile(x_ptr, y_ptr, start_m, start_n, SETTINGS.gemm, SETTINGS)
    offs_m = start_m + tl.arange(0, BLOCK_M)
    offs_n = start_n + tl.arange(0, BLOCK_N)
    s_ii = tl.sum(tl.where(offs_m[:, None] == offs_n[None, :], s, 0.0), 1)
    tl.store(s_ii_ptr + offs_m, s_ii, mask=(offs_m >= start) & (offs_m < start + min(BLOCK_M, BLOCK_N)))
