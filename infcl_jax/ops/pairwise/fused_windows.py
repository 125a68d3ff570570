"""Window sizes of the fused backend, and its workspace.

A window is the row and column range of a block that one kernel call computes. A column group is one or several windows
wide. Its fp32 gradients stay in memory while the windows of all rows are added to them.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp

from infcl_jax.ops.common.gpu import CUBLAS_WORKSPACE, SM_COUNT
from infcl_jax.ops.pairwise.base import FP32_BYTES, accumulator_bytes, round_up
from infcl_jax.ops.pairwise.ring import slice_columns

BF16_BYTES = 2
# bf16 terms of fp32 features, see `fused_operands`.
FP32_TERMS = 3
# Rows and columns of a tile of a cuBLAS GEMM on Hopper.
GEMM_TILE = (128, 256)
# Launch overhead of one window, in the depth (contraction length) of a GEMM of one wave.
WINDOW_COST = 512
# Narrower windows are not considered.
MIN_COLUMNS = 4096
# Number of fp32 vectors `[rows]` in the fused backend, fitted to the memory in docs/archive/measurements.md.
NUM_VECTORS = 14


class WindowSizes(NamedTuple):
    """Sizes of the windows of one block.

    Attributes:
      rows: rows of a window.
      columns: columns of a window.
      group: columns of a column group, a multiple of `columns`.
    """

    rows: int
    columns: int
    group: int


@dataclasses.dataclass(frozen=True)
class WindowConfig:
    """Limits of windows.

    The defaults were chosen by measurements on an H200, see docs/archive/measurements.md.

    Attributes:
      sm_count: SMs of the GPU, which the GEMMs of a window should fill.
      max_pairs: most pairs of a window of dS: 256 MiB in bf16.
      max_forward_pairs: most pairs of a window of sums: at most 256 MiB of partial sums, one per 128 columns.
      large_block: rows plus columns from which `max_pairs` is halved, to leave memory for vectors.
      fp32_divisor: factor by which windows shrink with fp32 features. Tensor cores truncate at every accumulation, and
        the error grows with the length of a GEMM.
      max_ring_pairs: most pairs of a window of dS per row and feature of the block, in a ring with bf16 features and
        fp32 accumulators. The window then also has at most half of `max_pairs`.
      row_slices: most row slices in a ring. Slices have separate accumulators and are unrolled, because XLA overlaps
        transfers with GEMMs but not with loops.
      slice_rows: most rows of one of several row slices. A block of more than `row_slices * slice_rows` rows has a
        single slice.
      group_bytes: most bytes of the fp32 gradients of a column group of several windows.
    """

    sm_count: int = SM_COUNT
    max_pairs: int = 1 << 27
    max_forward_pairs: int = 1 << 32
    large_block: int = 1 << 18
    fp32_divisor: int = 8
    max_ring_pairs: int = 6
    row_slices: int = 4
    slice_rows: int = 1 << 14
    group_bytes: int = 128 << 20

    def sums(self, rows: int, columns: int, width: int, num_gemms: int, tile: tuple[int, int]) -> tuple[int, int]:
        """Choose the rows and columns of a window of sums.

        Args:
          rows: padded rows of the block.
          columns: padded columns of the block.
          width: padded number of features.
          num_gemms: number of bf16 GEMMs whose results sum to the similarities.
          tile: multiples of the rows and columns of a window.
        """
        return self.best_size(rows, columns, self.max_forward_pairs // num_gemms, width, tile)

    def gradients(
        self,
        block: tuple[int, int],
        slice_rows: int,
        width: int,
        tile: tuple[int, int],
        *,
        fp32: bool,
        fp32_accumulators: bool,
    ) -> WindowSizes:
        """Choose the sizes of windows of dS.

        Args:
          block: padded rows and columns of the block.
          slice_rows: rows of a row slice.
          width: padded number of features.
          tile: multiples of the rows and columns of a window.
          fp32: whether the features are in fp32.
          fp32_accumulators: whether an accumulator of the features' gradients is in fp32, as in a ring.
        """
        rows, columns = block
        limit = self.max_pairs if rows + columns < self.large_block else self.max_pairs // 2
        if fp32:
            limit //= self.fp32_divisor
        elif fp32_accumulators:
            limit = min(self.max_pairs // 2, self.max_ring_pairs * rows * width)
        window = self.best_size(slice_rows, columns, limit, width, tile)
        return WindowSizes(*window, max(window[1], self.group_bytes // (FP32_BYTES * width) // window[1] * window[1]))

    def row_slice(self, rows: int, tile_rows: int) -> int:
        """Return the number of rows of a row slice in a ring."""
        if rows > self.row_slices * self.slice_rows:
            return rows
        return max(round_up(-(-rows // self.row_slices), tile_rows), self.slice_rows // 2)

    def best_size(self, rows: int, columns: int, limit: int, width: int, tile: tuple[int, int]) -> tuple[int, int]:
        """Choose the rows and columns of a window of at most `limit` pairs.

        It minimizes the estimated time of all windows: the GEMM waves of dX and dY, and the launch overhead.
        """

        def time(size: tuple[int, int]) -> float:
            gemms = (size, size[::-1])
            work = sum(self._waves(gemm_rows, width) * depth for gemm_rows, depth in gemms)
            return -(-rows // size[0]) * -(-columns // size[1]) * (work + WINDOW_COST)

        sizes = list(_candidates(rows, columns, limit, tile))
        return min((s for s in sizes if s[0] * s[1] <= limit or s == sizes[-1]), key=time)

    def _waves(self, rows: int, width: int) -> int:
        """Number of waves of a GEMM with result `[rows, width]`."""
        return -(-(-(-rows // GEMM_TILE[0]) * -(-width // GEMM_TILE[1])) // self.sm_count)

    def workspace_bytes(self, rows: int, width: int, dtype: Any, devices: int) -> int:
        """Bytes of the fused backend on each device, without `ring.rotating_bytes`.

        These are dS of a window, fp32 accumulators, vectors, bf16 terms of fp32 features and the workspace of cuBLAS.
        """
        itemsize = jnp.dtype(dtype).itemsize
        fp32 = itemsize != BF16_BYTES
        limit = self.max_pairs // self.fp32_divisor * 2 if fp32 else self.max_pairs
        terms = 2 * FP32_TERMS * rows * width * BF16_BYTES if fp32 else 0
        features = rows * width * FP32_BYTES
        if devices == 1:
            pairs = min(rows * rows, limit)
            accumulators = min(features, self.group_bytes) + min(features, limit // rows * width * FP32_BYTES)
        else:
            pairs = min(rows * slice_columns(rows), limit // 2, self.max_ring_pairs * rows * width)
            in_place = not fp32 and rows <= self.row_slices * self.slice_rows
            gemm_results = 0 if in_place else rows * width * itemsize
            accumulators = accumulator_bytes(rows, width) + gemm_results
        return BF16_BYTES * pairs + accumulators + terms + NUM_VECTORS * rows * FP32_BYTES + CUBLAS_WORKSPACE


def _candidates(rows: int, columns: int, limit: int, tile: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """Yield window sizes, from the widest to the narrowest.

    Windows have equal shares of the columns, and at most `limit` pairs unless one row of tiles has more.
    """

    def share(length: int, windows: int, multiple: int) -> int:
        return round_up(-(-length // windows), multiple)

    for windows in range(1, max(2, columns // tile[1] + 1)):
        window_columns = share(columns, windows, tile[1])
        window_rows = max(tile[0], limit // window_columns // tile[0] * tile[0])
        yield share(rows, -(-rows // window_rows), tile[0]), window_columns
        if window_columns <= min(columns, MIN_COLUMNS):
            return
