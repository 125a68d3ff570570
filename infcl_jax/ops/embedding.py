"""Token embedding with a deterministic float32 gradient."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Float32, Integer

from infcl_jax.ops.common.sharding import automatic_axes, on_each_device

_TILE = 128  # rows of a GEMM that sums by id


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def embed_tokens(
    table: Float[Array, "v width"],
    positions: Float[Array, "n width"],
    tokens: Integer[Array, "b t"],
    dtype: Any,
    position_ids: Integer[Array, "b t"] | None = None,
) -> Float[Array, "b t width"]:
    """Look up token embeddings and add positional embeddings in float32.

    The gradient is accumulated in float32: a 16-bit sum over a frequent token, such as the start token of every
    caption, would stop growing. It is deterministic, since it uses no atomic additions, whose order changes between
    runs on a GPU.

    The gradient sorts the tokens of each device. On several devices, call this function inside `shard_map` or under the
    mesh (`jax.sharding.use_abstract_mesh`). Otherwise the devices exchange all cotangents.

    Args:
      table: [v, width], token embeddings, floating.
      positions: [n, width], positional embeddings, floating; n = t without `position_ids`.
      tokens: integer [b, t], token ids. An id of v or more gives NaN embeddings.
      dtype: dtype of the result.
      position_ids: integer [b, t], below n; None: token i is at position i.

    Returns:
      [b, t, width] in `dtype`.
    """
    rows = jnp.take(table, tokens, axis=0, mode="fill", fill_value=jnp.nan).astype(jnp.float32)
    shifts = positions[None] if position_ids is None else positions[position_ids]
    return (rows + shifts.astype(jnp.float32)).astype(dtype)


def _embed_forward(
    table: jax.Array, positions: jax.Array, tokens: jax.Array, dtype: Any, position_ids: jax.Array | None
) -> tuple[jax.Array, tuple]:
    return embed_tokens(table, positions, tokens, dtype, position_ids), (table, positions, tokens, position_ids)


def _embed_backward(
    dtype: Any, saved: tuple[Any, ...], cotangent: Float[Array, "b t width"]
) -> tuple[Float[Array, "v width"], Float[Array, "n width"], None, None]:
    table, positions, tokens, position_ids = saved
    d_table = _sum_over_devices(tokens, cotangent, len(table)).astype(table.dtype)
    if position_ids is None:
        d_positions = jnp.sum(cotangent, axis=0, dtype=jnp.float32)
    else:
        d_positions = _sum_over_devices(position_ids, cotangent, len(positions))
    return d_table, d_positions.astype(positions.dtype), None, None


embed_tokens.defvjp(_embed_forward, _embed_backward)


def _sum_over_devices(
    tokens: Integer[Array, "b t"], rows: Float[Array, "b t width"], count: int
) -> Float32[Array, "{count} width"]:
    """Sum the rows of each token id over all devices, replicated; both are sharded by batch."""
    axes = automatic_axes()

    def local(tokens: jax.Array, rows: jax.Array) -> jax.Array:
        sums = sum_by_id(tokens.reshape(-1), rows.reshape(-1, rows.shape[-1]), count)
        return lax.psum(sums, axes) if axes else sums

    return on_each_device(local, PartitionSpec(axes), PartitionSpec())(tokens, rows)


def sum_by_id(ids: Integer[Array, "n"], rows: Float[Array, "n width"], count: int) -> Float32[Array, "{count} width"]:
    """Sum the rows of each id in a fixed order.

    The rows are sorted by id. The last row of each id then gets the sum of its rows, and only that row is written.

    Args:
      ids: integer [n], at least 0.
      rows: floating [n, width].
      count: number of ids; rows of ids from `count` on are ignored.
    """
    indices = jnp.arange(len(ids), dtype=jnp.int32)
    ids, order = lax.sort((ids, indices), num_keys=1, is_stable=True)
    sums = _running_sums(ids, rows[order])
    ends = ids != jnp.pad(ids[1:], (0, 1), constant_values=-1)
    target = jnp.where(ends, ids, count + indices)  # the other rows get unique out-of-bounds indices and are dropped
    zeros = jnp.zeros((count, rows.shape[-1]), jnp.float32)
    return zeros.at[target].set(sums, mode="drop", unique_indices=True)


def _running_sums(ids: Integer[Array, "n"], rows: Float[Array, "n width"]) -> Float32[Array, "n width"]:
    """Return the sum of each row and the preceding rows of its id, for sorted ids.

    A GEMM with a 0/1 matrix sums within a tile. The running sums of the tiles' last rows, by recursion, are what the
    preceding tiles add to the rows of a tile's first id.
    """
    n, padding = len(ids), (0, -len(ids) % _TILE)
    tiles = jnp.pad(ids, padding, mode="edge").reshape(-1, _TILE)
    tiled = jnp.pad(rows, (padding, (0, 0))).reshape(*tiles.shape, -1)
    same = jnp.tril(tiles[:, :, None] == tiles[:, None, :]).astype(rows.dtype)
    sums = jnp.einsum("kij,kjw->kiw", same, tiled, preferred_element_type=jnp.float32, precision=lax.Precision.HIGHEST)
    if len(tiles) > 1:
        first, last = tiles[:, 0], tiles[:, -1]
        preceding = jnp.pad(_running_sums(last[:-1], sums[:-1, -1]), ((1, 0), (0, 0)))
        continues = jnp.pad(last[:-1] == first[1:], (1, 0))[:, None] & (tiles == first[:, None])
        sums += jnp.where(continues[:, :, None], preceding[:, None], 0.0)
    return sums.reshape(-1, rows.shape[1])[:n]
