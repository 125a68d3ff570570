"""The heads of a batch on their way through shared memory, for kernels in Pallas Mosaic GPU.

A producer warpgroup streams the positions of whole heads in with the tensor memory accelerator, which fills up to whole
tiles of 64 positions with zeros, and leaves those out when results are stored. Tiles are taken in turn by a team of
compute warpgroups; a sequence of one tile is the work of one warpgroup.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

CHANNELS = 64  # of a head: with 16 bits the 128 bytes of the widest swizzle
TILE = 64  # positions
# Per thread of the producer and of so many compute warpgroups; together no more than the kernel starts with, which is a
# multiple of 8 for each thread of a multiprocessor's 64 Ki.
REGISTERS = {2: (40, 232), 3: (32, 160), 4: (24, 112)}
SHARED_MEMORY = 232_448
RESERVED = 2048  # bytes of it for barriers and alignment
BARRIERS = 32  # of one array of barriers
POINTS = ("rows", "queries")  # of a body, where the warpgroups of a team may wait for each other
DEPTH = 16  # positions of which products over them want a multiple
ATOM = 8  # positions of which copies into tiles want a multiple

_SWIZZLE: Any = plgpu.SwizzleTransform(128)  # type: ignore[abstract]
_TILES: Any = (plgpu.TilingTransform((ATOM, CHANNELS)), _SWIZZLE)  # type: ignore[abstract]
PIECE = plgpu.Layout.WGMMA

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the heads of an operand or a result are.

    Attributes:
      array: [b, t, heads of several, 64], by name.
      first: of its heads there.
    """

    array: str
    first: int = 0


@dataclasses.dataclass(frozen=True)
class Heads:
    """The heads of a batch on their way through shared memory.

    Attributes:
      batch: sequences.
      positions: of a sequence.
      heads_each: of a sequence.
      dtype: of what is streamed.
      programs: thread blocks, each with every so many-th head.
      vectors: float32 numbers of each position that warpgroups leave for each other.
      warpgroups: that compute, of `REGISTERS`.
    """

    batch: int
    positions: int
    heads_each: int
    dtype: Any
    programs: int
    vectors: int
    warpgroups: int

    @classmethod
    def of(cls, packed: Array, cores: int, *, vectors: int, warpgroups: int) -> "Heads":
        """Those of queries, keys and values [b, t, 3 heads, 64], for so many multiprocessors."""
        b, t, heads, _ = packed.shape
        return cls(b, t, heads // 3, packed.dtype, min(cores, b * heads // 3), vectors, warpgroups)

    @property
    def packed(self) -> dict[str, Place]:
        """Queries, keys and values in one array."""
        return {name: Place("packed", i * self.heads_each) for i, name in enumerate(("query", "key", "value"))}

    @property
    def heads(self) -> int:
        """In all."""
        return self.batch * self.heads_each

    @property
    def tiles(self) -> int:
        """Of a head."""
        return -(-self.positions // TILE)

    @property
    def rows(self) -> int:
        """Positions of whole tiles."""
        return self.tiles * TILE

    @property
    def team(self) -> int:
        """Warpgroups that share a head."""
        return min(self.tiles, self.warpgroups)

    @property
    def teams(self) -> int:
        """Heads that are worked on at a time."""
        return self.warpgroups // self.team

    @property
    def shared(self) -> tuple[int, ...]:
        """Shape of the shared memory for vectors: of each team, for two heads in turn."""
        return self.teams, 2, max(self.vectors, 1), self.rows

    @property
    def buffers(self) -> int:
        """Of a team, each for an operand of one head."""
        room = SHARED_MEMORY - RESERVED - 4 * math.prod(self.shared)
        return min(room // (self.rows * CHANNELS * self.dtype.itemsize), BARRIERS) // self.teams

    @property
    def parts(self) -> list[tuple[int, int]]:
        """First position and number of positions of what one copy or product takes; the last tile by itself."""
        return [(0, self.rows - TILE), (self.rows - TILE, TILE)] if self.tiles > 1 else [(0, TILE)]

    @property
    def rest(self) -> int:
        """Positions that products take of the last tile."""
        return DEPTH * -(-(self.positions - self.rows + TILE) // DEPTH)

    def run(
        self,
        body: Callable[["Head"], None],
        streamed: dict[str, Place],
        operands: dict[str, Array],
        results: dict[str, jax.ShapeDtypeStruct],
        *,
        last: tuple[str, ...],
    ) -> dict[str, Array]:
        """Calls `body` for every head.

        Args:
          body: waits for operands, and stores the results of the head.
          streamed: what goes through shared memory, by name, with buffers in that order.
          operands: the arrays, by name; those without a place in `streamed` the body reads where they are.
          results: by name.
          last: of `streamed`, what it does not give back itself.

        Returns:
          The results by name.
        """
        whole = self.positions % ATOM == 0

        def kernel(*refs: Any) -> None:
            *arrays, buffers, vectors, full, empty, met = refs
            named = dict(zip([*operands, *results], arrays, strict=True))
            tiled, plain = (buffers, buffers) if whole else buffers
            program, warpgroup = lax.axis_index("program"), lax.axis_index("warpgroup")
            count = lax.div(self.heads - program + self.programs - 1, self.programs)

            def count_of(team: Any) -> Array:
                return lax.div(count - team + self.teams - 1, self.teams)

            def head(turn: Array, team: Array, member: Array) -> Head:
                number = program + turn * self.programs
                barriers = full, empty, met
                return Head(self, turn, team, member, number, streamed, named, tiled, plain, vectors, *barriers)

            def produce() -> None:
                plgpu.set_max_registers(REGISTERS[self.warpgroups][0], action="decrease")

                @pl.loop(0, count)
                def _(turn: Array) -> None:
                    head(turn, lax.rem(turn, self.teams), jnp.int32(0)).fetch()

                for team in range(self.teams):
                    steps = count_of(team) * len(streamed)

                    @pl.loop(jnp.maximum(steps - self.buffers, 0), steps)
                    def _(step: Array, team: int = team) -> None:
                        plgpu.barrier_wait(empty.at[team * self.buffers + lax.rem(step, self.buffers)])

            def compute() -> None:
                plgpu.set_max_registers(REGISTERS[self.warpgroups][1], action="increase")
                team, member = lax.div(warpgroup, self.team), lax.rem(warpgroup, self.team)

                def mine(number: Array) -> Head:
                    return head(number * self.teams + team, team, member)

                @pl.loop(0, count_of(team))
                def _(number: Array) -> None:
                    at = mine(number)
                    body(at)
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    at.release(*last)

                plgpu.wait_smem_to_gmem(0)

            lax.cond(warpgroup == self.warpgroups, produce, compute)

        shape = (self.teams * self.buffers, self.rows, CHANNELS)
        tiles = plgpu.SMEM(shape, self.dtype, transforms=_TILES)
        # The same bytes in the same order; without tiles a copy may end within eight positions.
        both = plgpu.RefUnion(tiles, plgpu.SMEM(shape, self.dtype, transforms=(_SWIZZLE,)))
        manual = jax.typeof(next(iter(operands.values()))).manual_axis_type
        found = plgpu.kernel(
            kernel,
            out_type=[r.update(manual_axis_type=manual) for r in results.values()],
            scratch_types=[
                tiles if whole else both,
                plgpu.SMEM(self.shared, jnp.float32),
                plgpu.Barrier(num_arrivals=len(self.parts), num_barriers=shape[0]),
                plgpu.Barrier(num_arrivals=self.team, num_barriers=shape[0]),
                plgpu.Barrier(num_arrivals=self.team, num_barriers=len(POINTS) * self.teams),
            ],
            grid=(self.programs,),
            grid_names=("program",),
            num_threads=self.warpgroups + 1,
            thread_name="warpgroup",
            compiler_params=plgpu.CompilerParams(
                approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
            ),
        )(*operands.values())
        return dict(zip(results, found, strict=True))


@dataclasses.dataclass(frozen=True)
class Head:
    """A head as a warpgroup sees it.

    Attributes:
      loop: that it is of.
      turn: number of the head in this thread block.
      team: of warpgroups that it belongs to.
      member: which of the team.
      number: of the head in the batch.
      streamed: what comes through shared memory, by name.
      arrays: in global memory, by name.
      tiled: buffers of shared memory [buffers, rows, 64], as products want them.
      plain: the same buffers, as copies want them.
      shared: shared memory for vectors.
      full: barriers of the buffers.
      empty: likewise.
      met: barriers of the teams.
    """

    loop: Heads
    turn: Array
    team: Array
    member: Array
    number: Array
    streamed: dict[str, Place]
    arrays: dict[str, Any]
    tiled: Any
    plain: Any
    shared: Any
    full: Any
    empty: Any
    met: Any

    def positions(self, place: Place, rows: Any) -> Any:
        """Some of its positions in an array, [rows, 64]."""
        sequence, head = lax.div(self.number, self.loop.heads_each), lax.rem(self.number, self.loop.heads_each)
        return self.arrays[place.array].at[sequence, rows, head + place.first]

    def slot(self, name: str) -> Array:
        """Which buffer an operand is in."""
        return self.team * self.loop.buffers + lax.rem(self._step(name), self.loop.buffers)

    def _step(self, name: str) -> Array:
        """How many operands the team had before."""
        return lax.div(self.turn, self.loop.teams) * len(self.streamed) + list(self.streamed).index(name)

    def __getitem__(self, name: str) -> Any:
        """An operand [rows, 64] in shared memory."""
        return self.tiled.at[self.slot(name)]

    @property
    def vectors(self) -> Any:
        """[vectors, rows] of shared memory, another one for every other head."""
        return self.shared.at[self.team, lax.rem(lax.div(self.turn, self.loop.teams), 2)]

    def tile(self, i: Any, width: int = TILE) -> Any:
        """Positions of a tile, or the first of them."""
        return pl.ds(i * TILE if isinstance(i, int) else pl.multiple_of(i * TILE, TILE), width)

    def each_tile(self, body: Callable[["Head", Array], None], *, first: Array) -> None:
        """Calls `body(head, tile)` for every tile of this warpgroup."""
        team = self.loop.team

        @pl.loop(0, lax.div(self.loop.tiles - first + team - 1, team))
        def _(n: Array) -> None:
            body(self, first + n * team)

    def fetch(self) -> None:
        """Starts the copies of all operands, each when its buffer is empty."""
        for name, place in self.streamed.items():
            slot = self.slot(name)

            @pl.when(self._step(name) >= self.loop.buffers)
            def _(slot: Array = slot) -> None:
                plgpu.barrier_wait(self.empty.at[slot])

            for j, width in self.loop.parts:
                # A first position that the compiler does not know may be followed by some beyond the end.
                rows = pl.ds(j + 0 * self.turn, width)
                plgpu.copy_gmem_to_smem(
                    self.positions(place, rows),
                    self.plain.at[slot, pl.ds(j, width)],
                    self.full.at[slot],
                    oob_mode=plgpu.OOBFillMode.ZEROS,
                )

    def wait(self, *names: str) -> None:
        """Until operands are there."""
        for name in names:
            plgpu.barrier_wait(self.full.at[self.slot(name)])

    def release(self, *names: str) -> None:
        """Gives buffers back, which this warpgroup has read."""
        for name in names:
            plgpu.barrier_arrive(self.empty.at[self.slot(name)])

    def arrive(self, point: str) -> None:
        """Tells the team that this warpgroup has come to one of `POINTS`."""
        if self.loop.team > 1:
            plgpu.barrier_arrive(self._point(point))

    def wait_for_team(self, point: str) -> None:
        """Until all of the team have."""
        if self.loop.team > 1:
            plgpu.barrier_wait(self._point(point))

    def _point(self, name: str) -> Any:
        return self.met.at[len(POINTS) * self.team + POINTS.index(name)]

    def put(self, found: dict[str, Array], rows: Any) -> None:
        """Writes rows of buffers that the warpgroup alone has still read."""
        plgpu.commit_smem()  # all of its warps have
        for name, piece in found.items():
            self[name][rows] = piece
        plgpu.commit_smem()

    def store(self, name: str, result: Place, rows: Any) -> None:
        """Starts copying rows of a buffer to a result."""
        plgpu.copy_smem_to_gmem(self.plain.at[self.slot(name), rows], self.positions(result, rows))

    def where_seen(
        self, piece: Array, row: Any, column: Any, causal: bool, value: float, transposed: bool = False
    ) -> Array:
        """Scores of queries from `row` and keys from `column`, `transposed` or not; the value for pairs without."""
        rows, columns = (plgpu.broadcasted_iota(jnp.int32, piece.shape, axis, layout=PIECE) for axis in (0, 1))
        if not causal:
            return jnp.where(columns < self.loop.positions - column, piece, value)
        seen = rows + row <= columns + column if transposed else columns + column <= rows + row
        return jnp.where(seen, piece, value)
