"""SMEM pipeline over the heads of a batch for Pallas Mosaic GPU kernels.

A producer warpgroup loads the operands of whole heads with TMA. TMA pads them with zeros to whole tiles of 64 positions
and drops the padding when results are stored. The compute warpgroups form teams. A team processes one head at a time,
and the head's tiles are assigned to the team's warpgroups round-robin. For sequences of one tile, a team is one
warpgroup.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from infcl_jax.ops.common import gpu

CHANNELS = gpu.SWIZZLE_BYTES // 2  # 16-bit channels of a head
TILE = 64  # positions of a query or key tile
MAX_BARRIERS = 32  # largest number of barriers in one array, a limit of Mosaic GPU
SPANS = ("start", "stop")  # operands of the first position of each position's sequence, and the one after the last
SYNC_POINTS = ("statistics", "queries")  # phases of a kernel body after which the warpgroups of a team may synchronize
WGMMA_K = 16  # positions; the contracted dimension of a 16-bit wgmma is a multiple of it
ATOM = 8  # positions; a copy into tiled SMEM takes a multiple of it

_SWIZZLE: Any = plgpu.SwizzleTransform(gpu.SWIZZLE_BYTES)  # type: ignore[abstract]
_TRANSFORMS: Any = (plgpu.TilingTransform((ATOM, CHANNELS)), _SWIZZLE)  # type: ignore[abstract]
WGMMA_LAYOUT = plgpu.Layout.WGMMA

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class HeadSlice:
    """Heads of one operand or result within an array.

    Attributes:
      array: name of the array, [b, t, heads of one or more operands, 64].
      first: index of the operand's first head in the array.
    """

    array: str
    first: int = 0


@dataclasses.dataclass(frozen=True)
class HeadPipeline:
    """Schedule and SMEM buffers of a kernel over the heads of a batch.

    Attributes:
      batch: number of sequences.
      positions: sequence length t.
      heads: number of heads of a sequence.
      dtype: dtype of the operands loaded into SMEM.
      programs: number of CTAs; head i is processed by CTA i modulo `programs`.
      vectors: number of float32 vectors per head that the warpgroups share through SMEM.
      warpgroups: number of compute warpgroups, a key of `gpu.WARPGROUP_REGISTERS`.
    """

    batch: int
    positions: int
    heads: int
    dtype: Any
    programs: int
    vectors: int
    warpgroups: int

    @classmethod
    def of(cls, packed: Array, sm_count: int, *, vectors: int, warpgroups: int) -> "HeadPipeline":
        """Build the pipeline for packed queries, keys and values."""
        b, t, heads, _ = packed.shape
        return cls(b, t, heads // 3, packed.dtype, min(sm_count, b * heads // 3), vectors, warpgroups)

    @property
    def packed(self) -> dict[str, HeadSlice]:
        """Slices of queries, keys and values in the packed array."""
        return {name: HeadSlice("packed", i * self.heads) for i, name in enumerate(("query", "key", "value"))}

    @property
    def batch_heads(self) -> int:
        """Number of heads of all sequences."""
        return self.batch * self.heads

    @property
    def tiles(self) -> int:
        """Number of tiles of a sequence."""
        return -(-self.positions // TILE)

    @property
    def rows(self) -> int:
        """Sequence length padded to whole tiles."""
        return self.tiles * TILE

    @property
    def team(self) -> int:
        """Number of warpgroups that share a head."""
        return min(self.tiles, self.warpgroups)

    @property
    def teams(self) -> int:
        """Number of heads processed concurrently in a CTA."""
        return self.warpgroups // self.team

    @property
    def vectors_shape(self) -> tuple[int, ...]:
        """Shape of the vectors in SMEM: [teams, 2, vectors, rows], double-buffered over heads."""
        return self.teams, 2, max(self.vectors, 1), self.rows

    @property
    def buffers(self) -> int:
        """Number of SMEM buffers of a team, each for one operand of one head."""
        free = gpu.SHARED_MEMORY - gpu.RESERVED_BYTES - 4 * math.prod(self.vectors_shape)
        return min(free // (self.rows * CHANNELS * self.dtype.itemsize), MAX_BARRIERS) // self.teams

    @property
    def copy_ranges(self) -> list[tuple[int, int]]:
        """Start and size of each TMA copy of an operand.

        The last tile is copied separately, since a TMA box has at most 256 rows.
        """
        return [(0, self.rows - TILE), (self.rows - TILE, TILE)] if self.tiles > 1 else [(0, TILE)]

    @property
    def last_width(self) -> int:
        """Number of positions of the last tile, padded to a multiple of `WGMMA_K`."""
        return WGMMA_K * -(-(self.positions - self.rows + TILE) // WGMMA_K)

    def run(
        self,
        body: Callable[["Head"], None],
        streamed: dict[str, HeadSlice],
        operands: dict[str, Array],
        results: dict[str, jax.ShapeDtypeStruct],
        *,
        release_after: tuple[str, ...],
    ) -> dict[str, Array]:
        """Run `body` on every head.

        Args:
          body: function of a `Head` that waits for its operands, and computes and stores its results.
          streamed: slices of the operands loaded into SMEM, by name, in the order in which buffers are assigned.
          operands: arrays by name; the body reads those without a slice in `streamed` from global memory.
          results: shapes and dtypes of the results by name.
          release_after: names in `streamed` whose buffers are released after the body; it must release the others.

        Returns:
          The results by name.
        """
        aligned = self.positions % ATOM == 0

        def kernel(*refs: Any) -> None:
            *global_refs, buffers, vectors, full, empty, team_barriers = refs
            arrays = dict(zip([*operands, *results], global_refs, strict=True))
            tiled, plain = (buffers, buffers) if aligned else buffers
            program, warpgroup = lax.axis_index("program"), lax.axis_index("warpgroup")
            count = lax.div(self.batch_heads - program + self.programs - 1, self.programs)

            def head_count(team: Any) -> Array:
                return lax.div(count - team + self.teams - 1, self.teams)

            def head(index: Array, team: Array, member: Array) -> Head:
                batch_index = program + index * self.programs
                barriers = full, empty, team_barriers
                return Head(self, index, team, member, batch_index, streamed, arrays, tiled, plain, vectors, *barriers)

            def produce() -> None:
                plgpu.set_max_registers(gpu.WARPGROUP_REGISTERS[self.warpgroups][0], action="decrease")

                @pl.loop(0, count)
                def _(index: Array) -> None:
                    head(index, lax.rem(index, self.teams), jnp.int32(0)).fetch()

                # Wait for the last release of each buffer, so that no barrier phase completes without a wait.
                for team in range(self.teams):
                    loads = head_count(team) * len(streamed)

                    @pl.loop(jnp.maximum(loads - self.buffers, 0), loads)
                    def _(load: Array, team: int = team) -> None:
                        plgpu.barrier_wait(empty.at[team * self.buffers + lax.rem(load, self.buffers)])

            def compute() -> None:
                plgpu.set_max_registers(gpu.WARPGROUP_REGISTERS[self.warpgroups][1], action="increase")
                team, member = lax.div(warpgroup, self.team), lax.rem(warpgroup, self.team)

                def team_head(i: Array) -> Head:
                    return head(i * self.teams + team, team, member)

                @pl.loop(0, head_count(team))
                def _(i: Array) -> None:
                    current = team_head(i)
                    body(current)
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    current.release(*release_after)

                plgpu.wait_smem_to_gmem(0)

            lax.cond(warpgroup == self.warpgroups, produce, compute)

        shape = (self.teams * self.buffers, self.rows, CHANNELS)
        tiled = plgpu.SMEM(shape, self.dtype, transforms=_TRANSFORMS)
        # Both have the same bytes in the same order, but copies to the untiled one take any number of positions.
        both = plgpu.RefUnion(tiled, plgpu.SMEM(shape, self.dtype, transforms=(_SWIZZLE,)))
        manual = jax.typeof(next(iter(operands.values()))).manual_axis_type
        outputs = plgpu.kernel(
            kernel,
            out_type=[r.update(manual_axis_type=manual) for r in results.values()],
            scratch_types=[
                tiled if aligned else both,
                plgpu.SMEM(self.vectors_shape, jnp.float32),
                plgpu.Barrier(num_arrivals=len(self.copy_ranges), num_barriers=shape[0]),
                plgpu.Barrier(num_arrivals=self.team, num_barriers=shape[0]),
                plgpu.Barrier(num_arrivals=self.team, num_barriers=len(SYNC_POINTS) * self.teams),
            ],
            grid=(self.programs,),
            grid_names=("program",),
            num_threads=self.warpgroups + 1,
            thread_name="warpgroup",
            compiler_params=plgpu.CompilerParams(
                approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
            ),
        )(*operands.values())
        return dict(zip(results, outputs, strict=True))


@dataclasses.dataclass(frozen=True)
class Head:
    """Operands, buffers and barriers of one head, as seen by one warpgroup.

    Attributes:
      pipeline: pipeline that schedules the head.
      index: index of the head among the CTA's.
      team: index of the team that processes the head.
      member: index of the warpgroup in the team.
      batch_index: index of the head among all sequences' heads.
      streamed: slices of the operands loaded into SMEM, by name.
      arrays: arrays in global memory, by name.
      tiled: SMEM buffers [buffers, rows, 64], tiled for wgmma.
      plain: the same buffers, untiled for copies.
      shared: SMEM of the vectors, of `HeadPipeline.vectors_shape`.
      full: barriers that complete when a buffer is loaded.
      empty: barriers that complete when the whole team has released a buffer.
      team_barriers: barriers of each team at `SYNC_POINTS`.
    """

    pipeline: HeadPipeline
    index: Array
    team: Array
    member: Array
    batch_index: Array
    streamed: dict[str, HeadSlice]
    arrays: dict[str, Any]
    tiled: Any
    plain: Any
    shared: Any
    full: Any
    empty: Any
    team_barriers: Any

    def positions(self, source: HeadSlice, rows: Any) -> Any:
        """Reference to `rows` of this head in global memory, [rows, 64]."""
        heads = self.pipeline.heads
        sequence, head = lax.div(self.batch_index, heads), lax.rem(self.batch_index, heads)
        return self.arrays[source.array].at[sequence, rows, head + source.first]

    def slot(self, name: str) -> Array:
        """Index of the buffer of an operand."""
        return self.team * self.pipeline.buffers + lax.rem(self._load_index(name), self.pipeline.buffers)

    def _load_index(self, name: str) -> Array:
        """Index of an operand's load among all loads of the team."""
        return lax.div(self.index, self.pipeline.teams) * len(self.streamed) + list(self.streamed).index(name)

    def __getitem__(self, name: str) -> Any:
        """Operand [rows, 64] in SMEM."""
        return self.tiled.at[self.slot(name)]

    @property
    def vectors(self) -> Any:
        """Vectors [vectors, rows] of this head in SMEM."""
        return self.shared.at[self.team, lax.rem(lax.div(self.index, self.pipeline.teams), 2)]

    def tile(self, i: Any, width: int = TILE) -> Any:
        """Slice of the first `width` positions of tile `i`."""
        return pl.ds(i * TILE if isinstance(i, int) else pl.multiple_of(i * TILE, TILE), width)

    def each_tile(self, body: Callable[["Head", Array], None], *, first: Array) -> None:
        """Call `body(head, i)` for every tile i of this warpgroup, starting with `first`."""
        team = self.pipeline.team

        @pl.loop(0, lax.div(self.pipeline.tiles - first + team - 1, team))
        def _(n: Array) -> None:
            body(self, first + n * team)

    def fetch(self) -> None:
        """Start the copy of each operand once its buffer is released."""
        for name, source in self.streamed.items():
            slot = self.slot(name)

            @pl.when(self._load_index(name) >= self.pipeline.buffers)
            def _(slot: Array = slot) -> None:
                plgpu.barrier_wait(self.empty.at[slot])

            for start, width in self.pipeline.copy_ranges:
                # Only a slice with a dynamic start may extend beyond the end of the array.
                rows = pl.ds(start + 0 * self.index, width)
                plgpu.copy_gmem_to_smem(
                    self.positions(source, rows),
                    self.plain.at[slot, pl.ds(start, width)],
                    self.full.at[slot],
                    oob_mode=plgpu.OOBFillMode.ZEROS,
                )

    def wait(self, *names: str) -> None:
        """Wait until operands are loaded."""
        for name in names:
            plgpu.barrier_wait(self.full.at[self.slot(name)])

    def release(self, *names: str) -> None:
        """Release buffers that this warpgroup no longer accesses."""
        for name in names:
            plgpu.barrier_arrive(self.empty.at[self.slot(name)])

    def arrive(self, point: str) -> None:
        """Signal the team that this warpgroup has reached one of `SYNC_POINTS`."""
        if self.pipeline.team > 1:
            plgpu.barrier_arrive(self._team_barrier(point))

    def wait_for_team(self, point: str) -> None:
        """Wait until the whole team has reached one of `SYNC_POINTS`."""
        if self.pipeline.team > 1:
            plgpu.barrier_wait(self._team_barrier(point))

    def _team_barrier(self, point: str) -> Any:
        return self.team_barriers.at[len(SYNC_POINTS) * self.team + SYNC_POINTS.index(point)]

    def write(self, values: dict[str, Array], rows: Any) -> None:
        """Overwrite rows of buffers that no other warpgroup accesses."""
        plgpu.commit_smem()  # synchronizes the warps of this warpgroup, which may still read the rows
        for name, value in values.items():
            self[name][rows] = value
        plgpu.commit_smem()

    def store(self, name: str, result: HeadSlice, rows: Any) -> None:
        """Start the copy of rows of a buffer to a result in global memory."""
        plgpu.copy_smem_to_gmem(self.plain.at[self.slot(name), rows], self.positions(result, rows))

    def mask(self, scores: Array, row: Any, column: Any, causal: bool, value: float, transposed: bool = False) -> Array:
        """Replace scores of masked query-key pairs.

        Args:
          scores: tile of scores or softmax weights; rows are queries, columns are keys.
          row: position of the first row.
          column: position of the first column.
          causal: whether to apply the causal mask, which also hides padded keys from valid queries, instead of the mask
            of padded keys.
          value: value of masked pairs.
          transposed: whether rows are keys and columns are queries; only with `causal` or spans.
        """
        rows, columns = (plgpu.broadcasted_iota(jnp.int32, scores.shape, axis, layout=WGMMA_LAYOUT) for axis in (0, 1))
        if not causal and not self.has_spans:
            return jnp.where(columns < self.pipeline.positions - column, scores, value)
        rows, columns = rows + row, columns + column
        limits = []
        if causal:
            limits.append(rows <= columns if transposed else columns <= rows)
        # Queries and keys of a sequence have the same span, so the rows' spans serve both orientations. The causal mask
        # implies one of the two limits.
        if self.has_spans and not (causal and transposed):
            limits.append(self._span("start", row, scores) <= columns)
        if self.has_spans and (transposed or not causal):
            limits.append(columns < self._span("stop", row, scores))
        return jnp.where(functools.reduce(operator.and_, limits), scores, value)

    def _span(self, name: str, first: Any, tile: Any) -> Array:
        """Broadcast the spans' starts or stops of a tile's rows, from position `first` on."""
        rows = pl.ds(first, tile.shape[0])
        vector = plgpu.load(self._spans(name).at[rows], layout=WGMMA_LAYOUT.reduce(1), optimized=False)
        return lax.broadcast_in_dim(vector, tile.shape, [0])

    @property
    def has_spans(self) -> bool:
        """True if several sequences are side by side."""
        return SPANS[0] in self.arrays

    def key_tiles(self, i: Array, causal: bool) -> tuple[Any, Any]:
        """Return the first and last key tile of query tile `i`'s spans."""
        return self._tile_of("start", i * TILE), i if causal else self._tile_of("stop", i * TILE + TILE - 1)

    def query_tiles(self, i: Array, causal: bool) -> tuple[Any, Any]:
        """Return the first and last query tile whose spans have keys of tile `i`."""
        return i if causal else self._tile_of("start", i * TILE), self._tile_of("stop", i * TILE + TILE - 1)

    def _tile_of(self, name: str, position: Array) -> Array:
        """Return the tile of the first or last key of a query's span."""
        key = self._spans(name)[position]
        return lax.div(key if name == "start" else key - 1, TILE)

    def _spans(self, name: str) -> Any:
        """Reference to the starts or stops of the spans of this head's sequence, [rows]."""
        return self.arrays[name].at[lax.div(self.batch_index, self.pipeline.heads)]
