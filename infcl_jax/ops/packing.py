"""Packing of short sequences: several in each row, so no padding is computed.

A sequence is a run of tokens of one row. It attends only to itself, its positions start at 0, and its feature is taken
at one of its tokens. The results are those of padded sequences, up to rounding.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float32, Int32, Shaped

from infcl_jax.ops.common.sharding import automatic_axes, on_each_device


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("tokens", "row", "offset", "length"),
    meta_fields=("row_length", "rows", "shard"),
)
@dataclasses.dataclass(frozen=True)
class PackedTokens:
    """Padded sequences, each with its place in the rows of its shard.

    The arrays have one row per sequence, so they are sharded and cut into chunks like padded sequences. A shard is what
    one device encodes at once: its sequences, or with gradient caching those of one chunk. `infcl_jax.data.Packing`
    makes the plan. In a plan for other shards, such as shards of fewer devices, sequences without a place of their own
    have NaN features, since compiled code cannot raise.

    Examples:
      >>> ids = jnp.array([[1, 2, 0], [3, 4, 5]])  # of 2 and 3 tokens
      >>> row, offset, length = jnp.array([[0, 0], [0, 2], [2, 3]])
      >>> PackedTokens(ids, row, offset, length, row_length=5, rows=1, shard=2).unpacked().tokens.tolist()
      [[1, 2, 3, 4, 5]]

    Attributes:
      tokens: integer [b, t], token ids.
      row: int32 [b], row of each sequence in its shard.
      offset: int32 [b], position of its first token in the row.
      length: int32 [b], number of its tokens; 0 for a sequence to leave out, whose feature means nothing.
      row_length: tokens of a row.
      rows: rows of a full shard.
      shard: sequences of a full shard; fewer sequences get rows in proportion.
    """

    tokens: Any  # also shapes, shardings: a pytree may have any leaves
    row: Any
    offset: Any
    length: Any
    row_length: int
    rows: int
    shard: int

    def unpacked(self) -> "PackedRows":
        """Lay out the rows of every shard, on the device."""
        devices = math.prod(jax.sharding.get_abstract_mesh().shape[axis] for axis in automatic_axes())
        sequences = len(self.tokens)
        rows = rows_of(sequences // devices, self.rows, self.shard)
        lay_out = functools.partial(_lay_out, shape=(rows, self.row_length))
        sequence = jnp.arange(sequences, dtype=jnp.int32)
        return PackedRows(*_on_each_shard(lay_out)(self.tokens, sequence, self.row, self.offset, self.length))


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("tokens", "padded_index", "start", "stop", "first", "last"),
    meta_fields=(),
)
@dataclasses.dataclass(frozen=True)
class PackedRows:
    """Rows of tokens of all shards.

    A token that belongs to no sequence is a sequence of its own.

    Attributes:
      tokens: integer [r, l], token ids.
      padded_index: int32 [r, l], index of each token among the tokens of all padded sequences, over all shards; 0 for a
        token that belongs to no sequence.
      start: int32 [r, l], position in the row of the first token of each token's sequence.
      stop: int32 [r, l], position after the last one.
      first: int32 [b], index of each sequence's first token among all tokens of its shard.
      last: int32 [b], index of its last token.
    """

    tokens: Any
    padded_index: Any
    start: Any
    stop: Any
    first: Any
    last: Any

    @property
    def positions(self) -> Int32[Array, "r l"]:
        """Position of each token in its sequence."""
        return jnp.arange(self.tokens.shape[1], dtype=jnp.int32)[None] - self.start

    def take(self, states: Shaped[Array, "tokens *rest"], index: Int32[Array, "b"]) -> Shaped[Array, "b *rest"]:
        """Gather the states of one token of each sequence, `index` being `first` or `last`."""
        return _on_each_shard(_take)(states, index)

    def mean(self, states: Float32[Array, "r l width"]) -> Float32[Array, "b width"]:
        """Return the mean of the states of each sequence, in float32."""
        same = in_span(self.start, self.stop).astype(jnp.float32)
        sums = jnp.einsum("rij,rjw->riw", same, states, precision=jax.lax.Precision.HIGHEST)
        count = (1 + self.last - self.first).astype(jnp.float32)
        return self.take(sums.reshape(-1, sums.shape[-1]), self.first) / count[:, None]


def rows_of(sequences: int, rows: int, shard: int) -> int:
    """Return the rows of a shard, in proportion to a full one's."""
    return -(-rows * sequences // shard)


def in_span(start: Int32[Array, "r l"], stop: Int32[Array, "r l"]) -> Bool[Array, "r l l"]:
    """Tell at [row, i, j] whether tokens i and j are of one sequence."""
    j = jnp.arange(start.shape[1])[None, None]
    return (j >= start[:, :, None]) & (j < stop[:, :, None])


def _lay_out(
    tokens: jax.Array,
    sequence: jax.Array,
    row: jax.Array,
    offset: jax.Array,
    length: jax.Array,
    *,
    shape: tuple[int, int],
) -> tuple[jax.Array, ...]:
    """Lay out the rows of one shard, see `PackedRows`."""
    row_length, padded_length = shape[1], tokens.shape[1]
    first = row * row_length + offset
    step = jnp.arange(padded_length, dtype=jnp.int32)[None]
    index = jnp.where(step < length[:, None], first[:, None] + step, math.prod(shape))  # padding is dropped

    def place(values: jax.Array, others: jax.Array) -> jax.Array:
        others = jnp.broadcast_to(others, shape).reshape(-1)
        values = jnp.broadcast_to(values, index.shape).astype(others.dtype)
        return others.at[index].set(values, mode="drop").reshape(shape)

    positions = jnp.arange(row_length, dtype=jnp.int32)
    start, stop = place(offset[:, None], positions), place((offset + length)[:, None], positions + 1)
    own = sequence[:, None] * padded_length + step
    padded_index = place(own, jnp.int32(0))
    # In a plan for other shards, sequences are outside of the rows or share a place.
    placed = (padded_index.reshape(-1).at[index].get(mode="fill", fill_value=-1) == own) | (step >= length[:, None])
    first = jnp.where(placed.all(1), first, math.prod(shape))
    return place(tokens, jnp.zeros((), tokens.dtype)), padded_index, start, stop, first, first + length - 1


def _on_each_shard(function: Callable) -> Callable:
    spec = PartitionSpec(automatic_axes())
    return on_each_device(function, spec, spec)


@jax.custom_vjp
def _take(states: jax.Array, index: jax.Array) -> jax.Array:
    """Gather rows of distinct indices; the gradient adds nothing.

    Beyond the last row, `get` gives NaN, or the smallest integer.
    """
    return states.at[index].get(mode="fill")


def _take_backward(saved: tuple[jax.Array, jax.Array], cotangent: jax.Array) -> tuple[jax.Array, None]:
    states, index = saved
    return jnp.zeros_like(states).at[index].set(cotangent, unique_indices=True), None


_take.defvjp(lambda states, index: (_take(states, index), (states, index)), _take_backward)
