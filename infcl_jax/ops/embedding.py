"""The embedding of tokens, with a gradient that is the same bit for bit every time."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from infcl_jax.ops.common.sharding import automatic_axes, on_each_device

# Rows that one matrix product adds up.
_BLOCK = 128


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def embed_tokens(table: jax.Array, positions: jax.Array, tokens: jax.Array, dtype: Any) -> jax.Array:
    """Rows of a table plus positions, added in float32.

    The gradient is summed in float32, in which a frequent token (the start token occurs in every caption) does not stop
    counting, and without atomic additions, whose order changes from run to run on a GPU. It needs all of a device's
    tokens at a time: over several devices, call it inside `shard_map`, or under the mesh
    (`jax.sharding.use_abstract_mesh`), else the devices exchange all cotangents instead of sums.

    Args:
      table: [v, width], floating.
      positions: [t, width], floating.
      tokens: integer [b, t]. An id of v or more gives NaN.
      dtype: of the result.

    Returns:
      [b, t, width] in `dtype`.
    """
    rows = jnp.take(table, tokens, axis=0, mode="fill", fill_value=jnp.nan).astype(jnp.float32)
    return (rows + positions[None].astype(jnp.float32)).astype(dtype)


def _embed_forward(table: jax.Array, positions: jax.Array, tokens: jax.Array, dtype: Any) -> tuple[jax.Array, tuple]:
    return embed_tokens(table, positions, tokens, dtype), (table, positions, tokens)


def _embed_backward(dtype: Any, saved: tuple[jax.Array, ...], cotangent: jax.Array) -> tuple:
    table, positions, tokens = saved
    of_table = _sum_on_all_devices(tokens, cotangent, len(table)).astype(table.dtype)
    of_positions = jnp.sum(cotangent, axis=0, dtype=jnp.float32).astype(positions.dtype)
    return of_table, of_positions, None


embed_tokens.defvjp(_embed_forward, _embed_backward)


def _sum_on_all_devices(tokens: jax.Array, rows: jax.Array, count: int) -> jax.Array:
    """`sum_by_id` of [b, t] tokens and [b, t, width] rows, with the batch sharded over the axes of the mesh in use."""
    axes = automatic_axes()

    def local(tokens: jax.Array, rows: jax.Array) -> jax.Array:
        sums = sum_by_id(tokens.reshape(-1), rows.reshape(-1, rows.shape[-1]), count)
        return lax.psum(sums, axes) if axes else sums

    return on_each_device(local, PartitionSpec(axes), PartitionSpec())(tokens, rows)


def sum_by_id(ids: jax.Array, rows: jax.Array, count: int) -> jax.Array:
    """Sums the rows of each id, always in the same order.

    The rows are sorted by id. Within a block of them, a product with a matrix of zeros and ones gives every row the sum
    of its id's rows; a scan over blocks carries on what an id has in the blocks before; the last row of each id then
    has its whole sum, and is the only one that is written.

    Args:
      ids: integer [n], from 0.
      rows: floating [n, width].
      count: of ids; larger ones are left out.

    Returns:
      float32 [count, width].
    """
    fill = -len(ids) % _BLOCK
    ids, rows = jnp.pad(ids, (0, fill), constant_values=count), jnp.pad(rows, ((0, fill), (0, 0)))
    places = jnp.arange(len(ids), dtype=jnp.int32)
    ids, order = lax.sort((ids, places), num_keys=1, is_stable=True)
    blocks, rows = ids.reshape(-1, _BLOCK), rows[order].reshape(-1, _BLOCK, rows.shape[1])
    same = (blocks[:, :, None] == blocks[:, None, :]).astype(rows.dtype)
    sums = jnp.einsum("kij,kjw->kiw", same, rows, preferred_element_type=jnp.float32, precision=lax.Precision.HIGHEST)

    first, last = blocks[:, 0], blocks[:, -1]
    follows = jnp.pad(last[:-1] == first[1:], (1, 0))[:, None]
    starts = ~follows | (first != last)[:, None]  # the last id of the block has no rows in the blocks before
    _, running = lax.associative_scan(_add_unless_started, (starts, sums[:, -1]))
    before = jnp.where(follows, jnp.pad(running[:-1], ((1, 0), (0, 0))), 0.0)
    sums += jnp.where((blocks == first[:, None])[:, :, None], before[:, None], 0.0)

    ends = ids != jnp.pad(ids[1:], (0, 1), constant_values=-1)
    target = jnp.where(ends, ids, count + places)  # outside, and nowhere twice
    zeros = jnp.zeros((count, rows.shape[-1]), jnp.float32)
    return zeros.at[target].set(sums.reshape(len(ids), -1), mode="drop", unique_indices=True)


def _add_unless_started(before: tuple, after: tuple) -> tuple:
    (started_before, sum_before), (started, total) = before, after
    return started_before | started, total + jnp.where(started, 0.0, sum_before)
