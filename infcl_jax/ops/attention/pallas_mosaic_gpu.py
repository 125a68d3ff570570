"""Attention over short sequences for Hopper GPUs, in Pallas Mosaic GPU: every array is read or written once.

All positions of a head are in shared memory at the same time, so that scores are never stored, sums are complete when
they are needed, and no result is added to in memory.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from infcl_jax.ops.attention.pallas_mosaic_gpu_pipeline import CHANNELS, PIECE, TILE, Array, Head, Heads, Place

LONGEST = 5 * TILE  # all five operands of the backward pass are in shared memory
UNROLLED = 2  # tiles that are gone through without a loop
DTYPES = tuple(jnp.dtype(name) for name in ("bfloat16", "float16"))
ROW, COLUMN = PIECE.reduce(1), PIECE.reduce(0)


def accepts(positions: int, channels: int, dtype: Any) -> bool:
    """Whether the kernels take sequences of that length with heads of that many channels in `dtype`."""
    return 0 < positions <= LONGEST and channels == CHANNELS and jnp.dtype(dtype) in DTYPES


@functools.partial(jax.jit, static_argnames=("causal", "cores"))
def forward(packed: Array, *, causal: bool, cores: int) -> tuple[Array, Array]:
    """Scaled dot-product attention with a float32 softmax over running maxima (Milakov and Gimelshein 2018, section 3).

    Args:
      packed: [b, t, 3 heads, 64], see `accepts`: first the heads of the queries, then of the keys, then of the values.
      causal: whether a position sees only positions up to its own.
      cores: multiprocessors of the device.

    Returns:
      The result [b, t, heads, 64], and what `backward` needs: float32 [b * heads, t rounded up to tiles] logarithms to
      base 2 of the sums of the exponentials of the scores.
    """
    loop = Heads.of(packed, cores, vectors=0, warpgroups=3)
    if loop.tiles == 2:  # two heads at a time
        loop = dataclasses.replace(loop, warpgroups=4)
    # In the order in which buffers are needed; the first is given back first.
    streamed = {name: loop.packed[name] for name in ("key", "query", "value")}
    slope = CHANNELS**-0.5 * math.log2(math.e)

    def tile(at: Head, i: Array) -> None:
        own = at.tile(i)

        def sums(result: Any) -> tuple[Array, Array, Array]:
            def block(j: Any, carry: tuple[Array, Array], width: int = TILE, last: bool = False) -> tuple[Array, Array]:
                reference, total = carry

                def products(s: Any) -> Array:
                    plgpu.wgmma(s, at["query"].at[own], at["key"].at[at.tile(j, width)].T)
                    return s[...]

                s = pl.run_scoped(products, plgpu.ACC((TILE, width), jnp.float32))
                if last:
                    pl.when(i + loop.team >= loop.tiles)(functools.partial(at.release, "key"))
                if causal or last:
                    s = at.where_seen(s, i * TILE, j * TILE, causal, -math.inf)
                larger = jnp.maximum(reference, s.max(1) * slope)
                change = jnp.exp2(reference - larger)
                weight = jnp.exp2(s * slope - _spread(larger, 0, s))
                result[...] = result[...] * _spread(change, 0, result)
                plgpu.wgmma(result, _factor(weight, packed.dtype), at["value"].at[at.tile(j)])
                return larger, total * change + weight.sum(1)

            none, least = (plgpu.layout_cast(jnp.full((TILE,), v, jnp.float32), ROW) for v in (0.0, -math.inf))
            pl.when(i < loop.team)(functools.partial(at.wait, "value"))
            carry = lax.fori_loop(0, loop.tiles - 1, block, (least, none))
            return *block(loop.tiles - 1, carry, loop.rest, last=True), result[...]

        reference, total, result = pl.run_scoped(sums, plgpu.ACC((TILE, CHANNELS), jnp.float32))
        at.put({"query": (result / _spread(total, 0, result)).astype(packed.dtype)}, own)
        at.store("query", Place("result"), own)
        at.arrays["total"][at.number, own] = reference + jnp.log2(total)

    def head(at: Head) -> None:
        at.wait("key", "query")
        at.each_tile(tile, first=lax.rem(at.member + at.turn, loop.team))

    b, t, heads, d = packed.shape
    result = jax.ShapeDtypeStruct((b, t, heads // 3, d), packed.dtype)
    total = jax.ShapeDtypeStruct((loop.heads, loop.rows), jnp.float32)
    results = {"result": result, "total": total}
    found = loop.run(head, streamed, {"packed": packed}, results, last=("query", "value"))
    return found["result"], found["total"]


@functools.partial(jax.jit, static_argnames=("causal", "cores"))
def backward(packed: Array, result: Array, total: Array, cotangent: Array, *, causal: bool, cores: int) -> tuple[Array]:
    """Gradients of attention (Dao et al. 2022, appendix B.2).

    Args:
      packed: as for `forward`.
      result: of `forward`.
      total: of `forward`.
      cotangent: of the result.
      causal: as for `forward`.
      cores: likewise.

    Returns:
      The cotangent of `packed`. The same inputs give the same bits.
    """
    operands = {"packed": packed, "result": result, "cotangent": cotangent, "total": total}
    loop = Heads.of(packed, cores, vectors=2, warpgroups=2)
    streamed = {name: Place(name) for name in ("result", "cotangent")} | loop.packed
    of_packed = {name: dataclasses.replace(place, array="of_packed") for name, place in loop.packed.items()}
    # What is of the next head and has no buffers of its own gets those of this one, in the order of `streamed`.
    early = ("result", "cotangent", "query") if loop.buffers < 2 * len(streamed) else ()
    scale, dtype = CHANNELS**-0.5, packed.dtype
    slope = scale * math.log2(math.e)

    def of_row(at: Head, i: Array) -> None:
        """Leaves what belongs to a tile of queries where all warpgroups find it."""
        own = at.tile(i)
        total = plgpu.load(at.arrays["total"].at[at.number, own], layout=ROW, optimized=False)
        pl.when(i < loop.team)(functools.partial(at.wait, "result", "cotangent"))
        cotangent, result = (
            plgpu.load(at[n].at[own], layout=PIECE).astype(jnp.float32) for n in ("cotangent", "result")
        )
        at.vectors[0, own], at.vectors[1, own] = total, (cotangent * result).sum(1)

    def of_query(at: Head, i: Array) -> None:
        """A tile of queries against all keys."""
        own = at.tile(i)
        pl.when(i < loop.team)(functools.partial(at.wait, "query", "key", "value"))
        total, level = (plgpu.load(at.vectors.at[n, own], layout=ROW, optimized=False) for n in (0, 1))

        def sums(found: Any) -> Array:
            def block(j: Any, width: int, last: bool) -> None:
                others = at.tile(j, width)

                def products(s: Any, d_p: Any) -> None:
                    plgpu.wgmma(s, at["query"].at[own], at["key"].at[others].T)
                    plgpu.wgmma(d_p, at["cotangent"].at[own], at["value"].at[others].T)
                    weight = jnp.exp2(_loaded(s) * slope - _spread(total, 0, s))
                    if causal or last:
                        weight = at.where_seen(weight, i * TILE, j * TILE, causal, 0.0)
                    d_s = weight * (d_p[...] - _spread(level, 0, s))
                    plgpu.wgmma(found, _factor(d_s, dtype), at["key"].at[at.tile(j)])

                pl.run_scoped(products, *2 * (plgpu.ACC((TILE, width), jnp.float32),))

            pl.loop(0, loop.tiles - 1)(functools.partial(block, width=TILE, last=False))
            block(loop.tiles - 1, loop.rest, last=True)
            return found[...]

        found = pl.run_scoped(sums, plgpu.ACC((TILE, CHANNELS), jnp.float32))
        at.put({"result": (found * scale).astype(dtype)}, own)
        at.store("result", of_packed["query"], own)

    def of_key(at: Head, i: Array) -> None:
        """A tile of keys, and their values, against all queries. Those beyond the end count nothing: they are zeros."""
        own = at.tile(i)

        def sums(of_k: Any, of_v: Any) -> tuple[Array, Array]:
            def block(j: Any, width: int) -> None:
                others = at.tile(j, width)

                def products(s: Any, d_p: Any) -> None:
                    plgpu.wgmma(s, at["key"].at[own], at["query"].at[others].T)
                    plgpu.wgmma(d_p, at["value"].at[own], at["cotangent"].at[others].T)
                    total, level = (
                        plgpu.load(at.vectors.at[n, others], layout=COLUMN, optimized=False) for n in (0, 1)
                    )
                    weight = jnp.exp2(_loaded(s) * slope - _spread(total, 1, s))
                    if causal:
                        weight = at.where_seen(weight, i * TILE, j * TILE, causal, 0.0, transposed=True)
                    plgpu.wgmma(of_v, _factor(weight, dtype), at["cotangent"].at[at.tile(j)])
                    d_s = weight * (_loaded(d_p) - _spread(level, 1, s))
                    plgpu.wgmma(of_k, _factor(d_s, dtype), at["query"].at[at.tile(j)])

                pl.run_scoped(products, *2 * (plgpu.ACC((TILE, width), jnp.float32),))

            if loop.tiles <= UNROLLED:
                for j in range(loop.tiles - 1):
                    block(j, TILE)
                block(loop.tiles - 1, loop.rest)
            else:  # after a loop, a last block of its own width costs registers that there are not
                pl.loop(0, loop.tiles)(functools.partial(block, width=TILE))
            return of_k[...], of_v[...]

        of_k, of_v = pl.run_scoped(sums, *2 * (plgpu.ACC((TILE, CHANNELS), jnp.float32),))
        if early:
            pl.when(i + loop.team >= loop.tiles)(functools.partial(at.release, *early[1:]))
        # These rows of the keys have been read for all queries then, and may be written over.
        pl.when(i < loop.team)(functools.partial(at.wait_for_team, "queries"))
        at.put({"key": (of_k * scale).astype(dtype), "value": of_v.astype(dtype)}, own)
        at.store("key", of_packed["key"], own)
        at.store("value", of_packed["value"], own)

    def head(at: Head) -> None:
        at.each_tile(of_row, first=at.member)
        plgpu.commit_smem()
        at.arrive("rows")
        at.each_tile(of_query, first=at.member)
        if early:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            at.release(early[0])
        at.arrive("queries")
        at.wait_for_team("rows")
        # The warpgroup that had one tile more has one less now.
        at.each_tile(of_key, first=loop.team - 1 - at.member)

    results = {"of_packed": jax.ShapeDtypeStruct(packed.shape, dtype)}
    found = loop.run(head, streamed, operands, results, last=tuple(name for name in streamed if name not in early))
    return (found["of_packed"],)


def _spread(vector: Array, axis: int, piece: Any) -> Array:
    """A vector of the rows (axis 0) or the columns (axis 1) over a piece."""
    return lax.broadcast_in_dim(vector, piece.shape, [axis])


def _factor(piece: Array, dtype: Any) -> Array:
    """A left factor over the positions of a whole tile, of which the last ones count nothing."""
    missing = TILE - piece.shape[1]
    if not missing:
        return piece.astype(dtype)
    zeros = plgpu.layout_cast(jnp.zeros((TILE, missing), dtype), PIECE)
    return lax.concatenate([piece.astype(dtype), zeros], 1)


def _loaded(accumulator: Any) -> Array:
    """What was accumulated, while the product after it may be under way."""
    return plgpu.wgmma_accumulator_load(accumulator, wait_n=1)
