"""SMEM pipeline over the heads of a batch for Pallas Mosaic GPU kernels.

TMA loads the operands of whole heads, pads them with zeros to whole tiles, and drops the padding when results are
stored. The warpgroup with the last tile of a head, which is the last to finish, loads the operands of later heads: it
refills a buffer once the whole team has released it. A warpgroup for the loads alone would need `setmaxnreg` to leave
enough registers to the others, which nvJitLink, the assembler of JAX 0.12, ignores.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from infcl_jax.ops.attention.pallas_mosaic_gpu_schedule import CHANNELS, TILE, Array, HeadSchedule, HeadSlice, Slots
from infcl_jax.ops.common import gpu

SPANS = ("start", "stop")  # operands of the first position of each position's sequence, and the one after the last
SYNC_POINTS = ("statistics", "queries")  # phases of a kernel body after which the warpgroups of a team may synchronize
ATOM = 8  # positions; a copy into tiled SMEM takes a multiple of it

_SWIZZLE: Any = plgpu.SwizzleTransform(gpu.SWIZZLE_BYTES)  # type: ignore[abstract]
_TRANSFORMS: Any = (plgpu.TilingTransform((ATOM, CHANNELS)), _SWIZZLE)  # type: ignore[abstract]
WGMMA_LAYOUT = plgpu.Layout.WGMMA
ROW, COLUMN = WGMMA_LAYOUT.reduce(1), WGMMA_LAYOUT.reduce(0)

Limits = tuple[Array | None, Array | None]  # first and last column of each row that is not masked; None for no limit


def run(
    schedule: HeadSchedule,
    body: Callable[["Head"], None],
    streamed: dict[str, HeadSlice],
    operands: dict[str, Array],
    results: dict[str, jax.ShapeDtypeStruct],
    *,
    released_early: tuple[str, ...],
) -> dict[str, Array]:
    """Run `body` on every head.

    Args:
      schedule: schedule of the heads.
      body: function of a `Head` that waits for its operands, and computes and stores its results.
      streamed: slices of the operands loaded into SMEM, by name, in the order of `HeadSchedule.slots`.
      operands: arrays by name; the body reads those without a slice in `streamed` from global memory.
      results: shapes and dtypes of the results by name.
      released_early: names in `streamed` whose buffers the body releases and refills.

    Returns:
      The results by name.
    """
    aligned = schedule.positions % ATOM == 0
    slots = schedule.slots(tuple(streamed))
    late = [name for name in slots.rarest_first if name not in released_early]

    def kernel(*refs: Any) -> None:
        *global_refs, buffers, vectors, columns, full, empty, team_barriers = refs
        arrays = dict(zip([*operands, *results], global_refs, strict=True))
        tiled, plain = (buffers, buffers) if aligned else buffers
        program, warpgroup = lax.axis_index("program"), lax.axis_index("warpgroup")
        # A constant, of a single team or warpgroup, needs no register.
        team = lax.div(warpgroup, schedule.team) if schedule.teams > 1 else jnp.int32(0)
        member = lax.rem(warpgroup, schedule.team) if schedule.team > 1 else jnp.int32(0)
        count = lax.div(schedule.batch_heads - program + schedule.programs - 1, schedule.programs)
        columns[warpgroup] = plgpu.broadcasted_iota(jnp.int32, (TILE,), 0, layout=COLUMN)
        plgpu.commit_smem()

        def head(index: Array) -> Head:
            batch_index = program + (index * schedule.teams + team) * schedule.programs
            smem = tiled, plain, vectors, columns.at[warpgroup]
            barriers = full, empty, team_barriers
            return Head(schedule, slots, index, team, member, batch_index, streamed, arrays, *smem, *barriers)

        @pl.loop(0, max(slots.copies.values()))
        def _(index: Array) -> None:
            head(index).load_first()

        @pl.loop(0, lax.div(count - team + schedule.teams - 1, schedule.teams))
        def _(index: Array) -> None:
            current = head(index)
            body(current)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            current.release(*late)
            current.refill(*late)

        plgpu.wait_smem_to_gmem(0)

    shape = (schedule.teams * slots.count, schedule.rows, CHANNELS)
    tiled = plgpu.SMEM(shape, schedule.dtype, transforms=_TRANSFORMS)
    # Both have the same bytes in the same order, but copies to the untiled one take any number of positions.
    both = plgpu.RefUnion(tiled, plgpu.SMEM(shape, schedule.dtype, transforms=(_SWIZZLE,)))
    manual = jax.typeof(next(iter(operands.values()))).manual_axis_type
    outputs = plgpu.kernel(
        kernel,
        out_type=[r.update(manual_axis_type=manual) for r in results.values()],
        scratch_types=[
            tiled if aligned else both,
            plgpu.SMEM(schedule.vectors_shape, jnp.float32),
            plgpu.SMEM(schedule.columns_shape, jnp.int32),
            plgpu.Barrier(num_arrivals=len(schedule.copy_ranges), num_barriers=shape[0]),
            plgpu.Barrier(num_arrivals=schedule.team, num_barriers=schedule.loaders * shape[0]),
            plgpu.Barrier(num_arrivals=schedule.team, num_barriers=len(SYNC_POINTS) * schedule.teams),
        ],
        grid=(schedule.programs,),
        grid_names=("program",),
        num_threads=schedule.warpgroups,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0),
    )(*operands.values())
    return dict(zip(results, outputs, strict=True))


@dataclasses.dataclass(frozen=True)
class Head:
    """Operands, buffers and barriers of one head, as seen by one warpgroup.

    Attributes:
      schedule: schedule of the heads.
      slots: assignment of the team's buffers.
      index: index of the head among the team's.
      team: index of the team that processes the head.
      member: index of the warpgroup in the team.
      batch_index: index of the head among all sequences' heads.
      streamed: slices of the operands loaded into SMEM, by name.
      arrays: arrays in global memory, by name.
      tiled: SMEM buffers [buffers, rows, 64], tiled for wgmma.
      plain: the same buffers, untiled for copies.
      shared: SMEM of the vectors, of `HeadSchedule.vectors_shape`.
      columns: SMEM of the warpgroup's column indices, 0 to 63.
      full: barriers that complete when a buffer is loaded.
      empty: barriers of each loader that complete when the whole team has released a buffer.
      team_barriers: barriers of each team at `SYNC_POINTS`.
    """

    schedule: HeadSchedule
    slots: Slots
    index: Array
    team: Array
    member: Array
    batch_index: Array
    streamed: dict[str, HeadSlice]
    arrays: dict[str, Any]
    tiled: Any
    plain: Any
    shared: Any
    columns: Any
    full: Any
    empty: Any
    team_barriers: Any

    def positions(self, source: HeadSlice, rows: Any) -> Any:
        """Reference to `rows` of this head in global memory, [rows, 64]."""
        heads = self.schedule.heads
        sequence, head = lax.div(self.batch_index, heads), lax.rem(self.batch_index, heads)
        return self.arrays[source.array].at[sequence, rows, head + source.first]

    def buffer(self, name: str) -> Array:
        """Index of the buffer of an operand."""
        return self.team * self.slots.count + self.slots.index(name, self.index)

    def __getitem__(self, name: str) -> Any:
        """Operand [rows, 64] in SMEM."""
        return self.tiled.at[self.buffer(name)]

    @property
    def vectors(self) -> Any:
        """Vectors [vectors, rows] of this head in SMEM."""
        return self.shared.at[self.team, lax.rem(self.index, 2)]

    def tile(self, i: Any, width: int = TILE) -> Any:
        """Slice of the first `width` positions of tile `i`."""
        return pl.ds(i * TILE if isinstance(i, int) else pl.multiple_of(i * TILE, TILE), width)

    def each_tile(self, body: Callable[["Head", Array], None], *, first: Array) -> None:
        """Call `body(head, i)` for every tile i of this warpgroup, starting with `first`."""
        team = self.schedule.team

        @pl.loop(0, lax.div(self.schedule.tiles - first + team - 1, team))
        def _(n: Array) -> None:
            body(self, first + n * team)

    @property
    def first_tile(self) -> Array:
        """First tile of this warpgroup in the last phase of the body."""
        team = self.schedule.team
        return lax.rem(self.member + self.index, team) if self.schedule.rotates else team - 1 - self.member

    @property
    def is_loader(self) -> Array:
        """True in the warpgroup of the last tile, which refills the buffers."""
        return self.first_tile == (self.schedule.tiles - 1) % self.schedule.team

    def load_first(self) -> None:
        """Load the operands that have a buffer at the start of the kernel."""
        for name in self.streamed:
            has_buffer = self.index < self.slots.copies[name]
            pl.when(self.is_loader & has_buffer)(functools.partial(self._load, name, self.buffer(name)))

    def refill(self, *names: str) -> None:
        """Wait until the team has released buffers, and load their next operands."""

        @pl.when(self.is_loader)
        def _() -> None:
            for name in names:
                # Every phase of a barrier needs a wait, even without a next head.
                plgpu.barrier_wait(self._empty_barrier(name))
                heads = self.slots.copies[name] * self.schedule.teams
                batch_index = self.batch_index + heads * self.schedule.programs
                dataclasses.replace(self, batch_index=batch_index)._load(name, self.buffer(name))

    def _load(self, name: str, buffer: Array) -> None:
        """Start the copy of an operand if the head exists."""

        @pl.when(self.batch_index < self.schedule.batch_heads)
        def _() -> None:
            for start, width in self.schedule.copy_ranges:
                # Only a slice with a dynamic start may extend beyond the end of the array.
                rows = pl.ds(start + 0 * self.batch_index, width)
                plgpu.copy_gmem_to_smem(
                    self.positions(self.streamed[name], rows),
                    self.plain.at[buffer, pl.ds(start, width)],
                    self.full.at[buffer],
                    oob_mode=plgpu.OOBFillMode.ZEROS,
                )

    def wait(self, *names: str) -> None:
        """Wait until operands are loaded."""
        for name in names:
            plgpu.barrier_wait(self.full.at[self.buffer(name)])

    def release(self, *names: str) -> None:
        """Release buffers that this warpgroup no longer accesses."""
        for name in names:
            plgpu.barrier_arrive(self._empty_barrier(name))

    def _empty_barrier(self, name: str) -> Any:
        # A warpgroup keeps track of a barrier's phase by its own waits, so each loader needs barriers of its own.
        loader = lax.rem(self.index, self.schedule.loaders)
        return self.empty.at[loader * self.schedule.teams * self.slots.count + self.buffer(name)]

    def arrive(self, point: str) -> None:
        """Signal the team that this warpgroup has reached one of `SYNC_POINTS`."""
        if self.schedule.team > 1:
            plgpu.barrier_arrive(self._team_barrier(point))

    def wait_for_team(self, point: str) -> None:
        """Wait until the whole team has reached one of `SYNC_POINTS`."""
        if self.schedule.team > 1:
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
        plgpu.copy_smem_to_gmem(self.plain.at[self.buffer(name), rows], self.positions(result, rows))

    def limits(self, i: Array, causal: bool, transposed: bool = False) -> Limits:
        """Return the first and last column of each row that is not masked.

        Args:
          i: index of the row tile.
          causal: whether to apply the causal mask, which also hides padded keys from valid queries.
          transposed: whether rows are keys and columns are queries; only with `causal` or spans.
        """
        first, last = None, None
        if self.has_spans:  # queries and keys of a sequence have the same span, so these serve both orientations
            first, stop = (plgpu.load(self._spans(n).at[self.tile(i)], layout=ROW, optimized=False) for n in SPANS)
            last = stop - 1
        if causal:
            position = plgpu.broadcasted_iota(jnp.int32, (TILE,), 0, layout=ROW) + i * TILE
            return (position, last) if transposed else (first, position)
        if last is None:
            last = plgpu.layout_cast(jnp.full((TILE,), self.schedule.positions - 1, jnp.int32), ROW)
        return first, last

    def mask(self, scores: Array, limits: Limits, origin: Any, value: float) -> Array:
        """Replace scores of masked query-key pairs.

        Args:
          scores: tile of scores or softmax weights.
          limits: limits of the tile's rows.
          origin: position of the first column.
          value: value of masked pairs.
        """
        # From SMEM, since the compiler keeps the columns of an iota in registers throughout the kernel.
        columns = plgpu.load(self.columns.at[pl.ds(0, scores.shape[1])], layout=COLUMN, optimized=False)
        columns = lax.broadcast_in_dim(columns, scores.shape, [1])
        inside = [
            compare(columns, lax.broadcast_in_dim(limit - origin, scores.shape, [0]))
            for compare, limit in zip((operator.ge, operator.le), limits, strict=True)
            if limit is not None
        ]
        return jnp.where(functools.reduce(operator.and_, inside), scores, value)

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
        return self.arrays[name].at[lax.div(self.batch_index, self.schedule.heads)]
