"""Tile schedule of the Hopper kernels: sizes, order and position of the similarity tiles."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from infcl_jax.ops.common.gpu import SHARED_MEMORY, SWIZZLE_BYTES
from infcl_jax.ops.pairwise.base import Array
from infcl_jax.ops.pairwise.kernel_api import LABEL_RANGE_ROWS, Pairs

WARPGROUPS = 2  # compute warpgroups of a CTA
TILE_K = SWIZZLE_BYTES // 2  # bf16 features per copy to SMEM
SUBTILE = 64  # rows and columns of an epilogue subtile, which is stored at once
SEGMENTS = (8, 4, 2, 1)  # candidate numbers of row tiles per task
SEGMENT_COST = 0.25  # time to end a task, in times of a row tile
BARRIER_BYTES = 1024  # bytes of SMEM reserved for barriers
REDUCTION_BYTES = 16 * SUBTILE  # bytes of SMEM to reduce 8 columns of a subtile over rows: fp32 from each of four warps

WGMMA_LAYOUT = plgpu.Layout.WGMMA
ROW_LAYOUT, COLUMN_LAYOUT = WGMMA_LAYOUT.reduce(1), WGMMA_LAYOUT.reduce(0)

Refs = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Tile sizes and pipeline of one kernel.

    Attributes:
      rows: rows of one warpgroup's tile; a CTA's tile has twice as many.
      columns: columns of a tile.
      stages: pipeline stages in SMEM.
      slices: slices of `TILE_K` features in a stage. More of them need fewer barriers, and keep the loading warpgroup
        less busy.
      cluster: CTAs per cluster, 1 or 2. They work on adjacent column tiles and share the row tiles.
      lag: steps by which the second warpgroup starts after the first.
      delay: steps by which a slot is refilled later than this CTA frees it. Meanwhile the signals of the other CTA
        arrive, for which the warpgroup that loads would wait.
      store_slots: SMEM slots of a warpgroup for subtiles of dS that are being stored.
    """

    rows: int = 128
    columns: int = 128
    stages: int = 4
    slices: int = 1
    cluster: int = 2
    lag: int = 2
    delay: int = 0
    store_slots: int = 0

    def __post_init__(self) -> None:
        """Raise `ValueError` for sizes that the hardware or the kernels do not support."""
        if self.rows % SUBTILE or self.columns % SUBTILE or self.columns > 256 or self.cluster not in (1, 2):
            raise ValueError(
                f"expected rows and columns in multiples of {SUBTILE}, columns <= 256 and cluster 1 or 2, got {self}"
            )
        if not 0 <= self.lag < self.stages:
            raise ValueError(f"expected a lag of less than the {self.stages} stages, got {self.lag}")
        if not 0 <= self.delay < self.stages:
            raise ValueError(f"expected a delay of less than the {self.stages} stages, got {self.delay}")
        if self.store_slots and (self.rows // SUBTILE * self.columns // SUBTILE) % self.store_slots:
            raise ValueError(f"expected the subtiles of a tile to be a multiple of store_slots, got {self}")
        if self.shared_memory > SHARED_MEMORY:
            raise ValueError(
                f"expected at most {SHARED_MEMORY} bytes of shared memory, got {self.shared_memory} for {self}; "
                "use fewer stages or store slots"
            )

    @property
    def cta_rows(self) -> int:
        """Rows of a CTA's tile."""
        return WARPGROUPS * self.rows

    @property
    def cluster_columns(self) -> int:
        """Columns of a cluster's tiles."""
        return self.columns * self.cluster

    @property
    def shared_memory(self) -> int:
        """Bytes of SMEM that one CTA needs."""
        slots = self.stages * self.slices * (self.cta_rows + self.columns) * TILE_K
        return 2 * (slots + WARPGROUPS * self.store_slots * SUBTILE**2) + REDUCTION_BYTES + BARRIER_BYTES

    @property
    def reduction_bytes(self) -> int:
        """Bytes of SMEM for reductions of a subtile over rows, for as many columns at once as fit."""
        free = (SHARED_MEMORY - self.shared_memory) // REDUCTION_BYTES
        return REDUCTION_BYTES * min(1 + free, SUBTILE // 8)


def window_multiples(tiles: Iterable[Tiles]) -> tuple[int, int]:
    """Row and column multiples of windows that every kernel can divide into its tiles."""
    rows, columns = zip(*((t.cta_rows, t.cluster_columns) for t in tiles), strict=True)
    return math.lcm(*rows), math.lcm(*columns)


@dataclasses.dataclass(frozen=True)
class Product:
    """GEMM of similarities.

    Attributes:
      x: name of the operand with the row features.
      y: name of the operand with the column features.
      width: padded number of features, the contraction length of one GEMM.
      pairs: pairs of bf16 terms whose GEMMs are summed.
      slices: slices of a step, of `TILE_K` features each.
    """

    x: str
    y: str
    width: int
    pairs: Pairs
    slices: int

    @property
    def steps(self) -> int:
        """Steps of one tile."""
        return len(self.pairs) * self.width // (self.slices * TILE_K)

    def features(self, index: Array) -> tuple[Any, Any]:
        """Return which row and which column features a slice of a tile's steps multiplies."""
        length = self.width // TILE_K
        pair, first = lax.div(index, length), lax.rem(index, length) * TILE_K

        def features_of(terms: tuple[int, ...]) -> Any:
            """Return the slice in the pair's term."""
            term: Any = terms[0]
            for i in range(1, len(terms)):
                term = jnp.where(pair == i, terms[i], term)
            return pl.ds(pl.multiple_of(term * self.width + first, TILE_K), TILE_K)

        x_terms, y_terms = zip(*self.pairs, strict=True)
        return features_of(x_terms), features_of(y_terms)


@dataclasses.dataclass(frozen=True)
class TileSchedule:
    """Tile schedule of one kernel call.

    A task is a segment of consecutive row tiles in one column tile, so that column vectors stay in registers. In a band
    it is a row tile with the column tiles that contain its positives by id.

    Attributes:
      tiles: tile sizes.
      rows: rows of the result.
      columns: columns of the result.
      width: padded number of features, the contraction length of one GEMM.
      pairs: pairs of bf16 terms whose GEMMs are summed.
      sm_count: number of SMs.
      persistent: whether CTAs loop over tasks; otherwise each CTA runs one task.
      diagonal: whether to compute the tiles on the diagonal only.
      band: whether to compute the column tiles of each row tile in the operands `band_first` and `band_tiles` only.
      others: further GEMMs of each tile, after the one of the operands "x" and "y".
      group: clusters' column tiles per group. All rows of a group precede the next group, so that its column features
        stay in L2. 0: one group.
      longest_segment: most row tiles of a task. With 1, column vectors are not in registers during the GEMMs.
    """

    tiles: Tiles
    rows: int
    columns: int
    width: int
    pairs: Pairs
    sm_count: int
    persistent: bool
    diagonal: bool = False
    band: bool = False
    others: tuple[Product, ...] = ()
    group: int = 0
    longest_segment: int = max(SEGMENTS)

    @property
    def products(self) -> tuple[Product, ...]:
        """GEMMs of each tile, in their order."""
        return Product("x", "y", self.width, self.pairs, self.tiles.slices), *self.others

    @property
    def clusters(self) -> int:
        """Number of clusters on the GPU."""
        return self.sm_count // self.tiles.cluster

    @property
    def grid_clusters(self) -> int:
        """Number of clusters in the grid."""
        return self.clusters if self.persistent else self.tasks

    @property
    def column_tiles(self) -> int:
        """Number of column tiles."""
        return self.columns // self.tiles.columns

    @property
    def row_tiles(self) -> int:
        """Number of row tiles per column tile."""
        return 1 if self.diagonal else self.rows // self.tiles.cta_rows

    @property
    def tasks(self) -> int:
        """Number of tasks of all clusters."""
        if self.band:
            return self.row_tiles
        return self.row_tiles // self.segment * (self.columns // self.tiles.cluster_columns)

    def segment_and_columns(self, task: Array) -> tuple[Array, Array]:
        """Return the segment of a task and the index of its cluster's column tiles."""
        cluster_tiles = self.columns // self.tiles.cluster_columns
        if not self.group:
            return lax.div(task, cluster_tiles), lax.rem(task, cluster_tiles)
        segments = self.row_tiles // self.segment
        first = lax.div(task, self.group * segments) * self.group
        width = jnp.minimum(self.group, cluster_tiles - first)  # of the last group
        index = task - first * segments
        return lax.div(index, width), first + lax.rem(index, width)

    @property
    def column_partials(self) -> int:
        """Number of partial reductions over rows, one per warpgroup and segment."""
        return self.rows // self.tiles.rows // self.segment

    @functools.cached_property
    def segment(self) -> int:
        """Row tiles of one task: as many as possible with balanced CTAs."""

        def time(length: int) -> float:
            tasks = self.row_tiles // length * (self.columns // self.tiles.cluster_columns)
            return math.ceil(tasks / self.clusters) * (length + SEGMENT_COST)

        return min((s for s in SEGMENTS if s <= self.longest_segment and self.row_tiles % s == 0), key=time)


@dataclasses.dataclass(frozen=True)
class WorkTile:
    """Tile of similarities that one compute warpgroup processes.

    Attributes:
      schedule: tile schedule.
      refs: operands and results of the kernel by name.
      warpgroup: index of the warpgroup, 0 or 1.
      column_partial: index of this warpgroup's partial reduction over rows.
      column_tile: index of the column tile.
      first_row_tile: first row tile of the task.
      row_tile: current row tile; None at the start and the end of a task, except in a band.
    """

    schedule: TileSchedule
    refs: Refs
    warpgroup: Array
    column_partial: Array
    column_tile: Array
    first_row_tile: Array
    row_tile: Array | None = None

    @property
    def num_tiles(self) -> Any:
        """Number of tiles of the task."""
        return self.refs["band_tiles"][self.first_row_tile] if self.schedule.band else self.schedule.segment

    def tile(self, index: Array) -> "WorkTile":
        """Return a tile of the task."""
        if self.schedule.band:
            return dataclasses.replace(self, column_tile=self.column_tile + index)
        if self.schedule.diagonal:
            row_tile = lax.div(self.column, self.schedule.tiles.cta_rows)
        else:
            row_tile = self.first_row_tile + index
        return dataclasses.replace(self, row_tile=row_tile)

    @property
    def row(self) -> Array:
        """First row of the tile."""
        return self.row_tile * self.schedule.tiles.cta_rows + self.warpgroup * self.schedule.tiles.rows

    @property
    def column(self) -> Array:
        """First column of the tile."""
        return self.column_tile * self.schedule.tiles.columns

    @property
    def first_column(self) -> Array:
        """First column of the tile in the block."""
        return window_offset(self.refs, 1) + self.column

    def load_rows(self, name: str, i: int) -> Array:
        """Load `[SUBTILE]` of a row vector from row `i` of the tile."""
        rows = pl.ds(window_offset(self.refs, 0) + self.row + i, SUBTILE)
        return plgpu.load(self.refs[name].at[rows], layout=ROW_LAYOUT, optimized=False)

    def load_columns(self, name: str, j: int) -> Array:
        """Load `[SUBTILE]` of a column vector from column `j` of the tile."""
        columns = pl.ds(window_offset(self.refs, 1) + self.column + j, SUBTILE)
        return plgpu.load(self.refs[name].at[columns], layout=COLUMN_LAYOUT, optimized=False)

    def where_positive(self, values: Any, i: int, j: int, change: Callable[[Array], Array]) -> Any:
        """Apply `change` to the positives of the subtile at `[i, j]`.

        `values` is a pytree of subtiles. A tile outside the label range of its rows skips the comparison with labels.
        """
        first = self.first_column

        def changed(values: Any) -> Any:
            is_positive = self.is_positive(i, j, first)
            return jax.tree.map(lambda value: jnp.where(is_positive, change(value), value), values)

        return self.if_positive(i, first, changed, lambda values: values, values)

    def if_positive(
        self, i: int, first: Array, changed: Callable[..., Any], unchanged: Callable[..., Any], *values: Any
    ) -> Any:
        """Call `changed` if the tile may contain positives of the subtile rows from row `i`, else `unchanged`.

        `first` is `first_column`.
        """
        return lax.cond(self.may_contain_positives(i, first), changed, unchanged, *values)

    def may_contain_positives(self, i: int, first: Array) -> Array:
        """Return whether the tile's columns are in the label range of the subtile rows from row `i`.

        `first` is `first_column`.
        """
        label_range = lax.div(window_offset(self.refs, 0) + self.row + i, LABEL_RANGE_ROWS)
        lowest, highest = self.refs["lowest"][label_range], self.refs["highest"][label_range]
        return (lowest < first + self.schedule.tiles.columns) & (highest >= first)

    def is_positive(self, i: int, j: int, first: Array) -> Array:
        """Return a bool subtile, True at the positives of the subtile at `[i, j]`; `first` is `first_column`."""
        label = broadcast(self.load_rows("labels", i) - (first + j), 0)
        column = plgpu.broadcasted_iota(jnp.int32, label.shape, 1, layout=WGMMA_LAYOUT)
        if "last" not in self.refs:
            return column == label
        return (column >= label) & (column <= broadcast(self.load_rows("last", i) - (first + j), 0))

    @contextlib.contextmanager
    def serialized(self) -> Iterator[None]:
        """Serialize the warpgroups, whose reductions over rows share one SMEM buffer."""
        plgpu.barrier_wait(self.refs["reduction_order"].at[self.warpgroup])
        yield
        plgpu.barrier_arrive(self.refs["reduction_order"].at[1 - self.warpgroup])


def broadcast(vector: Array, axis: int) -> Array:
    """Broadcast a vector over the rows (`axis` 0) or columns (1) to a subtile."""
    return lax.broadcast_in_dim(vector, (SUBTILE, SUBTILE), [axis])


def window_offset(refs: Refs, axis: int) -> Array:
    """First row or column of the window."""
    return pl.multiple_of(refs[("first_row", "first_column")[axis]][0], SUBTILE)
