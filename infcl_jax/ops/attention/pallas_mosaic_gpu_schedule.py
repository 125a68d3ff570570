"""Schedule of heads and their SMEM buffers for Pallas Mosaic GPU kernels.

The warpgroups of a CTA form teams. A team processes one head at a time, and the head's tiles of 64 positions are
assigned to the team's warpgroups round-robin. For sequences of one tile, a team is one warpgroup.
"""

import dataclasses
import math
from typing import Any

import jax
from jax import lax

from infcl_jax.ops.common import gpu

CHANNELS = gpu.SWIZZLE_BYTES // 2  # 16-bit channels of a head
TILE = 64  # positions of a query or key tile
MAX_BARRIERS = 32  # largest number of barriers in one array, a limit of Mosaic GPU
WGMMA_K = 16  # positions; the contracted dimension of a 16-bit wgmma is a multiple of it

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
class Slots:
    """SMEM buffers of a team, assigned to the operands of its heads.

    Each operand has buffers of its own, which successive heads use in turn. The buffers of a head are then at constant
    distances, so that few registers address them.

    Attributes:
      copies: number of buffers by operand.
    """

    copies: dict[str, int]

    @classmethod
    def of(cls, names: tuple[str, ...], buffers: int) -> "Slots":
        """Divide `buffers` buffers among operands, the remainder to the first ones."""
        every, rest = divmod(buffers, len(names))
        return cls({name: every + (i < rest) for i, name in enumerate(names)})

    @property
    def count(self) -> int:
        """Number of buffers."""
        return sum(self.copies.values())

    @property
    def single(self) -> tuple[str, ...]:
        """Operands with one buffer."""
        return tuple(name for name, copies in self.copies.items() if copies == 1)

    @property
    def rarest_first(self) -> tuple[str, ...]:
        """Operands in the order in which the next heads need their buffers."""
        return tuple(sorted(self.copies, key=self.copies.__getitem__))

    def index(self, name: str, head: Array) -> Array:
        """Index of the buffer of an operand; `head` is the index of the head."""
        names = list(self.copies)
        return sum(self.copies[n] for n in names[: names.index(name)]) + lax.rem(head, self.copies[name])


@dataclasses.dataclass(frozen=True)
class HeadSchedule:
    """Schedule of a kernel over the heads of a batch.

    Attributes:
      batch: number of sequences.
      positions: sequence length t.
      heads: number of heads of a sequence.
      dtype: dtype of the operands loaded into SMEM.
      programs: number of CTAs; head i is processed by CTA i modulo `programs`.
      vectors: number of float32 vectors per head that the warpgroups share through SMEM.
      warpgroups: number of warpgroups.
      rotates: whether the tiles of a team's warpgroups rotate from head to head. Then each has the extra tile in turn.
    """

    batch: int
    positions: int
    heads: int
    dtype: Any
    programs: int
    vectors: int
    warpgroups: int
    rotates: bool

    @classmethod
    def of(cls, packed: Array, sm_count: int, *, vectors: int, warpgroups: int, rotates: bool) -> "HeadSchedule":
        """Build the schedule for packed queries, keys and values."""
        b, t, heads, _ = packed.shape
        return cls(b, t, heads // 3, packed.dtype, min(sm_count, b * heads // 3), vectors, warpgroups, rotates)

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
    def loaders(self) -> int:
        """Number of warpgroups of a team that load operands, in turn."""
        return self.team if self.rotates else 1

    @property
    def vectors_shape(self) -> tuple[int, ...]:
        """Shape of the vectors in SMEM: [teams, 2, vectors, rows], double-buffered over heads."""
        return self.teams, 2, max(self.vectors, 1), self.rows

    @property
    def columns_shape(self) -> tuple[int, ...]:
        """Shape of each warpgroup's column indices in SMEM, see `Head.mask`."""
        return self.warpgroups, TILE

    def slots(self, names: tuple[str, ...]) -> Slots:
        """Assign a team's buffers, each for one operand of one head."""
        vectors = 4 * (math.prod(self.vectors_shape) + math.prod(self.columns_shape))
        free = gpu.SHARED_MEMORY - gpu.RESERVED_BYTES - vectors
        buffers = min(free // (self.rows * CHANNELS * self.dtype.itemsize), MAX_BARRIERS // self.loaders)
        return Slots.of(names, buffers // self.teams)

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
