"""Triton kernels of all losses; importing them needs Triton.

A program computes one tile of similarities s `[BLOCK_M, BLOCK_N]` and the epilogue of a loss. The named tuples of the
operands and weights describe the vectors; a pointer that is None stands for an absent vector or a result that is not
needed. Constants:

    WIDTH: padded number of features.
    STRIDE: elements between rows of x and y, which are concatenated bf16 terms of `WIDTH` features.
    NUM_PAIRS, X_TERMS, Y_TERMS: pairs of bf16 terms whose GEMMs are summed; a hexadecimal digit of the latter two is
      the index of one pair's term.
    DS_TERMS: number of bf16 terms of dS.
    GROUP_M: row tiles per group of the tile order, for L2 reuse.
"""

import triton
import triton.language as tl


@triton.jit
def similarity_tile(
    x_ptr,
    y_ptr,
    start_m,
    start_n,
    WIDTH: tl.constexpr,
    STRIDE: tl.constexpr,
    NUM_PAIRS: tl.constexpr,
    X_TERMS: tl.constexpr,
    Y_TERMS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Compute one tile of s in a single loop over all pairs of terms."""
    offs_d = tl.arange(0, BLOCK_D)
    x_ptrs = x_ptr + (start_m.to(tl.int64) * STRIDE + tl.arange(0, BLOCK_M)[:, None] * STRIDE + offs_d[None, :])
    y_ptrs = y_ptr + (start_n.to(tl.int64) * STRIDE + tl.arange(0, BLOCK_N)[None, :] * STRIDE + offs_d[:, None])
    s = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(NUM_PAIRS * WIDTH // BLOCK_D):
        digit = step // (WIDTH // BLOCK_D) * 4
        start_d = step % (WIDTH // BLOCK_D) * BLOCK_D
        x_offset = ((X_TERMS >> digit) & 15) * WIDTH + start_d
        y_offset = ((Y_TERMS >> digit) & 15) * WIDTH + start_d
        s = tl.dot(tl.load(x_ptrs + x_offset), tl.load(y_ptrs + y_offset), s)
    return s


@triton.jit
def load_vector(ptr, offs):
    """Load a vector; None if it is absent."""
    return None if ptr is None else tl.load(ptr + offs)


@triton.jit
def tile_of(window_ptr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """Return the tile of this program, its first row and its first column."""
    tiles_m, tiles_n = tl.load(window_ptr + 2), tl.load(window_ptr + 3)
    program = tl.program_id(0)
    tile_m, tile_n = tl.swizzle2d(program // tiles_n, program % tiles_n, tiles_m, tiles_n, GROUP_M)
    start_m = tl.load(window_ptr) + tile_m * BLOCK_M
    start_n = tl.load(window_ptr + 1) + tile_n * BLOCK_N
    return (tile_m, tile_n, tiles_m, tiles_n), start_m, start_n


@triton.jit
def store_rows(ptr, tile, values):
    """Store one value for each row of a tile in `[tiles_n, rows]`."""
    BLOCK_M: tl.constexpr = values.shape[0]
    tile_m, tile_n, tiles_m, _ = tile
    tl.store(ptr + tile_n * (tiles_m.to(tl.int64) * BLOCK_M) + tile_m * BLOCK_M + tl.arange(0, BLOCK_M), values)


@triton.jit
def store_columns(ptr, tile, values):
    """Store one value for each column of a tile in `[tiles_m, columns]`."""
    BLOCK_N: tl.constexpr = values.shape[0]
    tile_m, tile_n, _, tiles_n = tile
    tl.store(ptr + tile_m * (tiles_n.to(tl.int64) * BLOCK_N) + tile_n * BLOCK_N + tl.arange(0, BLOCK_N), values)


@triton.jit
def store_ds(ds_ptr, ds, tile, DS_TERMS: tl.constexpr):
    """Store a tile of dS in bf16 terms; each is a rounding residual."""
    BLOCK_M: tl.constexpr = ds.shape[0]
    BLOCK_N: tl.constexpr = ds.shape[1]
    tile_m, tile_n, _, tiles_n = tile
    columns = tiles_n.to(tl.int64) * BLOCK_N
    ds_ptr += tile_m * BLOCK_M * columns * DS_TERMS + tile_n * BLOCK_N
    stride_m = tiles_n * BLOCK_N * DS_TERMS
    offs = tl.arange(0, BLOCK_M)[:, None] * stride_m + tl.arange(0, BLOCK_N)[None, :]
    for _ in tl.static_range(DS_TERMS):
        rounded = ds.to(tl.bfloat16)
        tl.store(ds_ptr + offs, rounded)
        ds -= rounded.to(tl.float32)
        ds_ptr += columns


@triton.jit
def find_positives(label, last, BLOCK_N: tl.constexpr):
    """Mark the positives of a tile.

    They are one column of each row, or with ids the columns from `label` to `last`.
    """
    column = tl.arange(0, BLOCK_N)[None, :]
    return label[:, None] == column if last is None else (label[:, None] <= column) & (column <= last[:, None])


@triton.jit
def has_positives(label, BLOCK_N: tl.constexpr):
    """Return whether a tile contains positives; `label` is relative to the tile."""
    return tl.max(((label >= 0) & (label < BLOCK_N)).to(tl.int32), 0) > 0


@triton.jit
def diagonal_kernel(
    x_ptr,
    y_ptr,
    s_ii_ptr,
    WIDTH: tl.constexpr,
    STRIDE: tl.constexpr,
    NUM_PAIRS: tl.constexpr,
    X_TERMS: tl.constexpr,
    Y_TERMS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Compute the similarities s_ii on the diagonal of one tile."""
    start = tl.program_id(0) * min(BLOCK_M, BLOCK_N)
    start_m = start // BLOCK_M * BLOCK_M
    start_n = start // BLOCK_N * BLOCK_N
    s = similarity_tile(
        x_ptr, y_ptr, start_m, start_n, WIDTH, STRIDE, NUM_PAIRS, X_TERMS, Y_TERMS, BLOCK_M, BLOCK_N, BLOCK_D
    )  # fmt: skip
    offs_m = start_m + tl.arange(0, BLOCK_M)
    offs_n = start_n + tl.arange(0, BLOCK_N)
    s_ii = tl.sum(tl.where(offs_m[:, None] == offs_n[None, :], s, 0.0), 1)
    tl.store(s_ii_ptr + offs_m, s_ii, mask=(offs_m >= start) & (offs_m < start + min(BLOCK_M, BLOCK_N)))
