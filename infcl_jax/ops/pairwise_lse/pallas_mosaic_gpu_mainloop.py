"""Warp-specialized main loop of the Hopper kernels, in Pallas Mosaic GPU.

One loop over similarity tiles serves every kernel. A producer warpgroup streams feature tiles into SMEM with TMA. Two
compute warpgroups run `wgmma` and the epilogue of each tile in registers. CTAs work in clusters of two that share row
tiles by multicast. Persistent CTAs stay on the GPU until all tiles are done. The second warpgroup starts a few steps
after the first, so that the epilogue of one overlaps with the GEMM of the other.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from infcl_jax.ops.pairwise_lse.base import Array
from infcl_jax.ops.pairwise_lse.fused_kernel_api import RANGE, Pairs

WARPGROUPS = 2
PRODUCER = WARPGROUPS
# Registers per thread. The producer needs few; the compute warpgroups get the rest of the SM's 64 Ki.
PRODUCER_REGISTERS, COMPUTE_REGISTERS = 40, 232
SHARED_MEMORY = 232_448
DEPTH = 64  # features per step: the 128 bytes of the widest swizzle in bf16
PIECE = 64  # rows and columns of one store
SEGMENTS = (8, 4, 2, 1)  # candidate numbers of row tiles per task
SEGMENT_COST = 0.25  # cost of ending a task, in row tiles
BARRIERS = 1024  # bytes of SMEM reserved for barriers
REDUCTION = 16 * PIECE  # bytes of SMEM for row reductions of a piece: fp32 from each of four warps

_SWIZZLED: Any = (plgpu.TilingTransform((8, DEPTH)), plgpu.SwizzleTransform(128))  # type: ignore[abstract]
TILE, ROW, COLUMN = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)

Refs = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Sizes of one kernel's main loop.

    Attributes:
      rows: rows of one warpgroup's tile; a CTA's tile has twice as many.
      columns: columns of a tile.
      stages: pipeline stages in SMEM.
      cluster: CTAs per cluster, 1 or 2. They work on adjacent column panels and share the row tiles.
      lag: steps by which the second warpgroup starts after the first.
      pieces: SMEM slots for pieces of dS that are being stored.
    """

    rows: int = 128
    columns: int = 128
    stages: int = 4
    cluster: int = 2
    lag: int = 2
    pieces: int = 0

    def __post_init__(self) -> None:
        """Raises `ValueError` for sizes that the hardware does not support."""
        if self.rows % PIECE or self.columns % PIECE or self.columns > 256 or self.cluster not in (1, 2):
            raise ValueError(
                f"expected rows and columns in multiples of {PIECE}, columns <= 256, cluster 1 or 2: {self}"
            )
        if not 0 <= self.lag < self.stages:
            raise ValueError(f"expected a lag of less than the {self.stages} stages, got {self.lag}")
        if self.pieces and (self.rows // PIECE * self.columns // PIECE) % self.pieces:
            raise ValueError(f"expected the pieces of a tile to be a multiple of those that wait: {self}")
        if self.shared_memory > SHARED_MEMORY:
            raise ValueError(
                f"expected at most {SHARED_MEMORY} bytes of shared memory, got {self.shared_memory}: {self}"
            )

    @property
    def block_rows(self) -> int:
        """Rows of a CTA's tile."""
        return WARPGROUPS * self.rows

    @property
    def cluster_columns(self) -> int:
        """Columns of a cluster's tiles."""
        return self.columns * self.cluster

    @property
    def shared_memory(self) -> int:
        """Bytes of SMEM of one CTA."""
        steps = self.stages * (self.block_rows + self.columns) * DEPTH
        return 2 * (steps + WARPGROUPS * self.pieces * PIECE * PIECE) + REDUCTION + BARRIERS


@dataclasses.dataclass(frozen=True)
class Loop:
    """Tile schedule of one kernel call.

    A task is a segment of row tiles and one panel of columns (the columns of one tile), so that column vectors stay in
    registers. The CTAs of a cluster process adjacent panels.

    Attributes:
      tiles: tile sizes.
      rows: rows of the result.
      columns: columns of the result.
      depth: contraction length of one GEMM.
      pairs: pairs of operand parts whose GEMMs are summed.
      blocks: number of SMs.
      persistent: whether CTAs loop over tasks; otherwise each CTA runs one task.
      diagonal: whether to compute the tiles on the diagonal only.
    """

    tiles: Tiles
    rows: int
    columns: int
    depth: int
    pairs: Pairs
    blocks: int
    persistent: bool
    diagonal: bool = False

    @property
    def steps(self) -> int:
        """Steps of one tile."""
        return len(self.pairs) * self.depth // DEPTH

    @property
    def clusters(self) -> int:
        """Number of clusters on the GPU."""
        return self.blocks // self.tiles.cluster

    @property
    def launched(self) -> int:
        """Number of clusters in the grid."""
        return self.clusters if self.persistent else self.tasks

    @property
    def panels(self) -> int:
        """Number of column panels."""
        return self.columns // self.tiles.columns

    @property
    def row_tiles(self) -> int:
        """Number of row tiles of a cluster."""
        return 1 if self.diagonal else self.rows // self.tiles.block_rows

    @property
    def tasks(self) -> int:
        """Number of tasks of all clusters."""
        return self.row_tiles // self.segment * (self.columns // self.tiles.cluster_columns)

    @property
    def folds(self) -> int:
        """Number of partial sums over rows, one per warpgroup and segment."""
        return self.rows // self.tiles.rows // self.segment

    @functools.cached_property
    def segment(self) -> int:
        """Row tiles of one task: as many as possible with balanced CTAs."""

        def time(length: int) -> float:
            tasks = self.row_tiles // length * (self.columns // self.tiles.cluster_columns)
            return math.ceil(tasks / self.clusters) * (length + SEGMENT_COST)

        return min((s for s in SEGMENTS if self.row_tiles % s == 0), key=time)


@dataclasses.dataclass(frozen=True)
class Place:
    """Position of a compute warpgroup.

    Attributes:
      loop: tile schedule.
      refs: operands and results of the kernel by name.
      warpgroup: index of the warpgroup, 0 or 1.
      fold: index of this warpgroup's partial sum over rows.
      panel: index of the column panel.
      first_tile: first row tile of the task.
      row_tile: current row tile; None at the start and the end of a task.
    """

    loop: Loop
    refs: Refs
    warpgroup: Array
    fold: Array
    panel: Array
    first_tile: Array
    row_tile: Array | None = None

    @property
    def row(self) -> Array:
        """First row of the tile."""
        return self.row_tile * self.loop.tiles.block_rows + self.warpgroup * self.loop.tiles.rows

    @property
    def column(self) -> Array:
        """First column of the tile."""
        return self.panel * self.loop.tiles.columns

    def rows(self, name: str, i: int) -> Array:
        """Loads `[PIECE]` of a row vector from row `i` of the tile."""
        at = pl.ds(_offset(self.refs, 0) + self.row + i, PIECE)
        return plgpu.load(self.refs[name].at[at], layout=ROW, optimized=False)

    def columns(self, name: str, j: int) -> Array:
        """Loads `[PIECE]` of a column vector from column `j` of the tile."""
        at = pl.ds(_offset(self.refs, 1) + self.column + j, PIECE)
        return plgpu.load(self.refs[name].at[at], layout=COLUMN, optimized=False)

    def where_positive(self, pieces: Any, i: int, j: int, change: Callable[[Array], Array]) -> Any:
        """Applies `change` to the positives of the piece at `[i, j]`.

        `pieces` may be a pytree of pieces. A tile outside the label range of its rows skips the comparison with labels.
        """
        first = _offset(self.refs, 1) + self.column
        number = lax.div(_offset(self.refs, 0) + self.row + i, RANGE)
        lowest, highest = self.refs["lowest"][number], self.refs["highest"][number]

        def changed(pieces: Any) -> Any:
            wanted = spread(self.rows("labels", i) - (first + j), 0)
            is_positive = plgpu.broadcasted_iota(jnp.int32, wanted.shape, 1, layout=TILE) == wanted
            return jax.tree.map(lambda piece: jnp.where(is_positive, change(piece), piece), pieces)

        return lax.cond((lowest < first + self.loop.tiles.columns) & (highest >= first), changed, lambda p: p, pieces)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Serializes the warpgroups: their row reductions share one SMEM buffer."""
        plgpu.barrier_wait(self.refs["turn"].at[self.warpgroup])
        yield
        plgpu.barrier_arrive(self.refs["turn"].at[1 - self.warpgroup])


def spread(vector: Array, axis: int) -> Array:
    """Broadcasts a vector along `axis` (0: rows, 1: columns) to a piece."""
    return lax.broadcast_in_dim(vector, (PIECE, PIECE), [axis])


def _offset(refs: Refs, axis: int) -> Array:
    """First row or column of the window."""
    return pl.multiple_of(refs[("first_row", "first_column")[axis]][0], PIECE)


def run(
    loop: Loop,
    operands: dict[str, Array],
    results: dict[str, jax.ShapeDtypeStruct],
    *,
    begin: Callable[[Place], Any],
    prepare: Callable[[Place], Any],
    finish: Callable[[Place, Array, Any, Any], Any],
    end: Callable[[Place, Any], None],
) -> dict[str, Array]:
    """Computes the tiles of `x @ y.T` and calls the epilogue on each.

    Args:
      loop: tile schedule.
      operands: arrays by name, including "x" and "y" (concatenated bf16 parts of the features), and "first_row" and
        "first_column" of the window, int32 `[1]`.
      results: shapes and dtypes of the results by name.
      begin: returns the initial carry of a task.
      prepare: loads the inputs of `finish` before the GEMM.
      finish: `finish(place, tile, prepared, carry) -> carry`, the epilogue; tiles are fp32 `[rows, columns]` in
        registers.
      end: stores the carry at the end of a task.

    Returns:
      The results by name.
    """
    t = loop.tiles
    lag = min(t.lag, loop.steps)
    shared = "member" if t.cluster > 1 else None

    def kernel(*refs: Any) -> None:
        *arrays, x_s, y_s, pieces, full, empty, started, turn = refs
        named = dict(zip([*operands, *results], arrays, strict=True), pieces=pieces, turn=turn)
        warpgroup, member, cluster = (lax.axis_index(a) for a in ("warpgroup", "member", "cluster"))
        tasks = lax.div(loop.tasks - cluster + loop.launched - 1, loop.launched)

        def place(i: Array) -> Place:
            """Returns the position of the i-th task of this CTA."""
            across = loop.columns // t.cluster_columns
            task = cluster + i * loop.launched
            segment, panel = lax.div(task, across), lax.rem(task, across) * t.cluster + member
            return Place(loop, named, warpgroup, segment * WARPGROUPS + warpgroup, panel, segment * loop.segment)

        def row_tile(at: Place, r: Array) -> Place:
            tile = lax.div(at.column, t.block_rows) if loop.diagonal else at.first_tile + r
            return dataclasses.replace(at, row_tile=tile)

        def produce() -> None:
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")

            def load_tile(i: Array, r: Array, step: Array) -> Array:
                at = row_tile(place(i), r)
                for p, q in loop.pairs:

                    def load(k: Array, step: Array, p: int = p, q: int = q) -> Array:
                        slot = lax.rem(step, t.stages)

                        @pl.when(step >= t.stages)
                        def _() -> None:
                            plgpu.barrier_wait(empty.at[slot])

                        def features(part: int, k: Array = k) -> Any:
                            return pl.ds(part * loop.depth + k * DEPTH, DEPTH)

                        rows = pl.ds(_offset(named, 0) + at.row_tile * t.block_rows, t.block_rows)
                        columns = pl.ds(_offset(named, 1) + at.column, t.columns)
                        x, y = named["x"].at[rows, features(p)], named["y"].at[columns, features(q)]
                        plgpu.copy_gmem_to_smem(x, x_s.at[slot], full.at[slot], collective_axes=shared)
                        plgpu.copy_gmem_to_smem(y, y_s.at[slot], full.at[slot])
                        return step + 1

                    step = lax.fori_loop(0, loop.depth // DEPTH, load, step)
                return step

            def load_task(i: Array, step: Array) -> Array:
                return lax.fori_loop(0, loop.segment, functools.partial(load_tile, i), step)

            steps = lax.fori_loop(0, tasks, load_task, jnp.int32(0))

            @pl.loop(jnp.maximum(steps - t.stages, 0), steps)
            def _(step: Array) -> None:
                # The peer CTA may still multicast tiles to this CTA and signal its barriers.
                plgpu.barrier_wait(empty.at[lax.rem(step, t.stages)])

        def compute() -> None:
            plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")

            @pl.when((warpgroup == 1) & (tasks > 0) & (lag > 0))
            def _() -> None:
                plgpu.barrier_wait(started)

            @pl.when(warpgroup == 1)
            def _() -> None:
                plgpu.barrier_arrive(turn.at[0])

            def multiply(acc: Any, k: Array, step: Array) -> Array:
                slot = lax.rem(step, t.stages)
                plgpu.barrier_wait(full.at[slot])
                mine = pl.ds(warpgroup * t.rows, t.rows)
                plgpu.wgmma(acc, x_s.at[slot, mine], y_s.at[slot].T)
                plgpu.wgmma_wait(1)
                plgpu.barrier_arrive(empty.at[lax.rem(step + t.stages - 1, t.stages)], predicate=k > 0)
                if lag:

                    @pl.when((step == lag - 1) & (warpgroup == 0))
                    def _() -> None:
                        plgpu.barrier_arrive(started)

                return step + 1

            def compute_tile(task: Place, r: Array, state: tuple[Array, Any]) -> tuple[Array, Any]:
                step, carry = state
                at = row_tile(task, r)
                prepared = prepare(at)

                def scope(acc: Any) -> tuple[Array, Any]:
                    after = lax.fori_loop(0, loop.steps, functools.partial(multiply, acc), step)
                    tile = acc[...]
                    plgpu.barrier_arrive(empty.at[lax.rem(after - 1, t.stages)])
                    return after, finish(at, tile, prepared, carry)

                return pl.run_scoped(scope, plgpu.ACC((t.rows, t.columns), jnp.float32))

            def compute_task(i: Array, step: Array) -> Array:
                task = place(i)
                body = functools.partial(compute_tile, task)
                step, carry = lax.fori_loop(0, loop.segment, body, (step, begin(task)))
                end(task, carry)
                return step

            lax.fori_loop(0, tasks, compute_task, jnp.int32(0))
            plgpu.wait_smem_to_gmem(0)

            @pl.when(warpgroup == 0)
            def _() -> None:
                plgpu.barrier_wait(turn.at[0])

        lax.cond(warpgroup == PRODUCER, produce, compute)

    swizzled = functools.partial(plgpu.SMEM, dtype=jnp.bfloat16, transforms=_SWIZZLED)
    answers: Any = {"num_arrivals": WARPGROUPS, "num_barriers": t.stages}
    out = plgpu.kernel(
        kernel,
        out_type=[r.update(manual_axis_type=jax.typeof(operands["x"]).manual_axis_type) for r in results.values()],
        scratch_types=[
            swizzled((t.stages, t.block_rows, DEPTH)),
            swizzled((t.stages, t.columns, DEPTH)),
            swizzled((WARPGROUPS, t.pieces, PIECE, PIECE)) if t.pieces else plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=2, num_barriers=t.stages),
            plgpu.ClusterBarrier(collective_axes=("member",), **answers) if t.cluster > 1 else plgpu.Barrier(**answers),
            plgpu.Barrier(),
            plgpu.Barrier(num_barriers=WARPGROUPS),
        ],
        grid=(loop.launched,),
        grid_names=("cluster",),
        cluster=(t.cluster,),
        cluster_names=("member",),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=REDUCTION),
    )(*operands.values())
    return dict(zip(results, out, strict=True))
