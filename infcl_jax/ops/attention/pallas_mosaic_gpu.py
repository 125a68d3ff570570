"""Attention over short sequences on Hopper GPUs, in Pallas Mosaic GPU.

SMEM holds all positions of a head. Scores are therefore never stored, and the backward pass computes them twice, once
for dQ and once for dK and dV, so that no gradient is accumulated in global memory. Every array is read or written once.

Each warpgroup of a team processes tiles i, i + team, i + 2 team, ... of a head, see `HeadSchedule`. Its first tile
therefore has i < team, its last i + team >= tiles. It waits for operands when its first tile needs them. Operands with
a single buffer are released and refilled as soon as the team has read them, so that the next head's loads overlap with
this head's compute.

No kernel spills registers, see `tests/ops/attention/test_registers.py`.
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
from jaxtyping import Float, Float32, Int32

from infcl_jax.ops.attention.pallas_mosaic_gpu_pipeline import COLUMN, ROW, SPANS, WGMMA_LAYOUT, Head, run
from infcl_jax.ops.attention.pallas_mosaic_gpu_schedule import CHANNELS, TILE, Array, HeadSchedule, HeadSlice

LONGEST = 5 * TILE  # positions; SMEM holds the five operands of the backward pass up to this length
UNROLLED = 2  # largest number of query tiles for which the dK, dV loop is unrolled
LOWEST = -1e30  # a maximum below all scores
DTYPES = tuple(jnp.dtype(name) for name in ("bfloat16", "float16"))
SUPPORTED = f"bf16 or fp16, at most {LONGEST} positions and heads of {CHANNELS} channels"


def accepts(positions: int, channels: int, dtype: Any) -> bool:
    """Return whether the kernels support a sequence length, head size and dtype."""
    return 0 < positions <= LONGEST and channels == CHANNELS and jnp.dtype(dtype) in DTYPES


def padded_spans(
    start: Int32[Array, "b t"], stop: Int32[Array, "b t"]
) -> tuple[Int32[Array, "b padded_t"], Int32[Array, "b padded_t"]]:
    """Pad the spans of `attend` to whole tiles; a padded query attends to itself."""
    b, t = start.shape
    rest = jnp.broadcast_to(jnp.arange(t, t + -t % TILE, dtype=jnp.int32), (b, -t % TILE))
    return jnp.concatenate([start, rest], 1), jnp.concatenate([stop, rest + 1], 1)


@functools.partial(jax.jit, static_argnames=("causal", "sm_count"))
def forward(
    packed: Float[Array, "b t qkv_heads d"], *spans: Int32[Array, "b padded_t"], causal: bool, sm_count: int
) -> tuple[Float[Array, "b t heads d"], Float32[Array, "b*heads padded_t"]]:
    """Scaled dot-product attention with an online float32 softmax.

    Args:
      packed: [b, t, 3 heads, 64], bf16 or fp16, the heads of queries, keys and values in that order, see `accepts`.
      *spans: none, or the two arrays of `padded_spans`. Tiles outside the spans are skipped.
      causal: whether a position attends only to positions up to its own.
      sm_count: number of SMs of the GPU.

    Returns:
      The result [b, t, heads, 64] in the dtype of `packed`, and the base-2 log-sum-exp of the scores for `backward`,
      float32 [b * heads, t padded to tiles].

    Source: Milakov and Gimelshein 2018, section 3 (online softmax).
    """
    schedule = HeadSchedule.of(packed, sm_count, vectors=0, warpgroups=3, rotates=True)
    if schedule.tiles == 2:  # two teams of two warpgroups leave no warpgroup idle
        schedule = dataclasses.replace(schedule, warpgroups=4)
    streamed = {name: schedule.packed[name] for name in ("key", "query", "value")}
    released_early = tuple(name for name in schedule.slots(tuple(streamed)).single if name == "value")
    log2_scale = CHANNELS**-0.5 * math.log2(math.e)
    # A narrower last tile has its own code. Otherwise, the loop includes the last tile, because the registers would not
    # suffice for the accumulators of two unrolled tiles.
    narrow = not spans and schedule.last_width < TILE
    masked = causal or spans or (not narrow and schedule.positions < schedule.rows)

    def query_tile(head: Head, i: Array) -> None:
        rows = head.tile(i)

        def accumulate(acc: Any) -> tuple[Array, Array, Array]:
            def key_tile(j: Any, carry: tuple[Array, Array], width: int = TILE) -> tuple[Array, Array]:
                m_i, l_i = carry

                # QK
                def scores(s: Any) -> Array:
                    plgpu.wgmma(s, head["query"].at[rows], head["key"].at[head.tile(j, width)].T)
                    return s[...]

                s = pl.run_scoped(scores, plgpu.ACC((TILE, width), jnp.float32))
                if masked or width < TILE:
                    s = head.mask(s, limits, j * TILE, -math.inf)
                # Softmax
                m_next = jnp.maximum(m_i, s.max(1) * log2_scale)
                alpha = jnp.exp2(m_i - m_next)
                p = jnp.exp2(s * log2_scale - _broadcast(m_next, 0, s))
                l_next = l_i * alpha + p.sum(1)

                # PV
                pl.when((i < schedule.team) & (j == first))(functools.partial(head.wait, "value"))
                acc[...] = acc[...] * _broadcast(alpha, 0, acc)
                plgpu.wgmma(acc, _left_operand(p, packed.dtype), head["value"].at[head.tile(j)])
                return m_next, l_next

            limits = head.limits(i, causal)
            # With spans, a query may see no key in the first tiles; its maximum stays finite there.
            l_0, m_0 = (plgpu.layout_cast(jnp.full((TILE,), v, jnp.float32), ROW) for v in (0.0, LOWEST))
            first, last = head.key_tiles(i, causal) if spans else (0, schedule.tiles - 1)
            if narrow:
                m_i, l_i = key_tile(last, lax.fori_loop(first, last, key_tile, (m_0, l_0)), schedule.last_width)
            else:
                m_i, l_i = lax.fori_loop(first, last + 1, key_tile, (m_0, l_0))
            return m_i, l_i, acc[...]

        m_i, l_i, acc = pl.run_scoped(accumulate, plgpu.ACC((TILE, CHANNELS), jnp.float32))

        @pl.when(i + schedule.team >= schedule.tiles)
        def _() -> None:
            head.release(*released_early)
            head.refill(*released_early)

        head.write({"query": (acc / _broadcast(l_i, 0, acc)).astype(packed.dtype)}, rows)
        head.store("query", HeadSlice("out"), rows)
        head.arrays["lse"][head.batch_index, rows] = m_i + jnp.log2(l_i)

    def body(head: Head) -> None:
        head.wait("key", "query")
        head.each_tile(query_tile, first=head.first_tile)

    b, t, heads, d = packed.shape
    results = {
        "out": jax.ShapeDtypeStruct((b, t, heads // 3, d), packed.dtype),
        "lse": jax.ShapeDtypeStruct((schedule.batch_heads, schedule.rows), jnp.float32),
    }
    operands = {"packed": packed} | dict(zip(SPANS, spans, strict=False))
    outputs = run(schedule, body, streamed, operands, results, released_early=released_early)
    return outputs["out"], outputs["lse"]


@functools.partial(jax.jit, static_argnames=("causal", "sm_count"))
def backward(
    packed: Float[Array, "b t qkv_heads d"],
    out: Float[Array, "b t heads d"],
    lse: Float32[Array, "b*heads padded_t"],
    d_out: Float[Array, "b t heads d"],
    *spans: Int32[Array, "b padded_t"],
    causal: bool,
    sm_count: int,
) -> tuple[Float[Array, "b t qkv_heads d"]]:
    """Gradients of attention (Dao et al. 2022, appendix B.2).

    Returns:
      The cotangent of `packed`, deterministic, since sums have a fixed order.
    """
    operands = {"packed": packed, "out": out, "d_out": d_out, "lse": lse} | dict(zip(SPANS, spans, strict=False))
    schedule = HeadSchedule.of(packed, sm_count, vectors=2, warpgroups=2, rotates=False)
    # "out" is released first, so it is the first to have a single buffer.
    streamed = {"d_out": HeadSlice("d_out")} | schedule.packed | {"out": HeadSlice("out")}
    d_packed = {name: dataclasses.replace(source, array="d_packed") for name, source in schedule.packed.items()}
    single = schedule.slots(tuple(streamed)).single
    released_after_queries, released_after_keys = (
        tuple(name for name in names if name in single) for names in (("out",), ("d_out", "query"))
    )
    scale, dtype = CHANNELS**-0.5, packed.dtype
    log2_scale = scale * math.log2(math.e)

    def stage_statistics(head: Head, i: Array) -> None:
        """Stage lse and delta = rowsum(dO * O) of a query tile in SMEM."""
        rows = head.tile(i)
        lse = plgpu.load(head.arrays["lse"].at[head.batch_index, rows], layout=ROW, optimized=False)
        pl.when(i < schedule.team)(functools.partial(head.wait, "out", "d_out"))
        d_out, out = (plgpu.load(head[n].at[rows], layout=WGMMA_LAYOUT).astype(jnp.float32) for n in ("d_out", "out"))
        head.vectors[0, rows], head.vectors[1, rows] = lse, (d_out * out).sum(1)

    def query_tile(head: Head, i: Array) -> None:
        """Compute dQ of a query tile over all keys."""
        rows = head.tile(i)
        pl.when(i < schedule.team)(functools.partial(head.wait, "query", "key", "value"))
        lse, delta = (plgpu.load(head.vectors.at[n, rows], layout=ROW, optimized=False) for n in (0, 1))
        limits = head.limits(i, causal)

        def accumulate(dq: Any) -> Array:
            def key_tile(j: Any, width: int, last: bool) -> None:
                keys = head.tile(j, width)

                def accumulate_tile(s: Any, dp: Any) -> None:
                    plgpu.wgmma(s, head["query"].at[rows], head["key"].at[keys].T)
                    plgpu.wgmma(dp, head["d_out"].at[rows], head["value"].at[keys].T)
                    p = jnp.exp2(_load_first(s) * log2_scale - _broadcast(lse, 0, s))
                    if causal or last or spans:
                        p = head.mask(p, limits, j * TILE, 0.0)
                    ds = p * (dp[...] - _broadcast(delta, 0, s))
                    plgpu.wgmma(dq, _left_operand(ds, dtype), head["key"].at[head.tile(j)])

                pl.run_scoped(accumulate_tile, *2 * (plgpu.ACC((TILE, width), jnp.float32),))

            if spans:
                first, last = head.key_tiles(i, causal)
                pl.loop(first, last + 1)(functools.partial(key_tile, width=TILE, last=False))
            else:
                pl.loop(0, schedule.tiles - 1)(functools.partial(key_tile, width=TILE, last=False))
                key_tile(schedule.tiles - 1, schedule.last_width, last=True)
            return dq[...]

        dq = pl.run_scoped(accumulate, plgpu.ACC((TILE, CHANNELS), jnp.float32))
        head.write({"out": (dq * scale).astype(dtype)}, rows)
        head.store("out", d_packed["query"], rows)

    def key_tile(head: Head, i: Array) -> None:
        """Compute dK and dV of a key tile over all queries.

        Padded queries and their cotangents are zeros, so they add nothing.
        """
        rows = head.tile(i)
        limits = head.limits(i, causal, transposed=True)

        def accumulate(dk: Any, dv: Any) -> tuple[Array, Array]:
            def query_tile(j: Any, width: int) -> None:
                queries = head.tile(j, width)

                def load(vector: int) -> Array:
                    return plgpu.load(head.vectors.at[vector, queries], layout=COLUMN, optimized=False)

                def accumulate_tile(s: Any, dp: Any) -> None:
                    plgpu.wgmma(s, head["key"].at[rows], head["query"].at[queries].T)
                    plgpu.wgmma(dp, head["value"].at[rows], head["d_out"].at[queries].T)
                    lse = load(0)  # delta is loaded once lse is no longer in registers
                    p = jnp.exp2(_load_first(s) * log2_scale - _broadcast(lse, 1, s))
                    if causal or spans:
                        p = head.mask(p, limits, j * TILE, 0.0)
                    delta = load(1)
                    plgpu.wgmma(dv, _left_operand(p, dtype), head["d_out"].at[head.tile(j)])
                    ds = p * (_load_first(dp) - _broadcast(delta, 1, s))
                    plgpu.wgmma(dk, _left_operand(ds, dtype), head["query"].at[head.tile(j)])

                pl.run_scoped(accumulate_tile, *2 * (plgpu.ACC((TILE, width), jnp.float32),))

            if spans:
                first, last = head.query_tiles(i, causal)
                pl.loop(first, last + 1)(functools.partial(query_tile, width=TILE))
            elif schedule.tiles <= UNROLLED:
                for j in range(schedule.tiles - 1):
                    query_tile(j, TILE)
                query_tile(schedule.tiles - 1, schedule.last_width)
            else:  # a narrower last tile after the loop would exceed the register budget
                pl.loop(0, schedule.tiles)(functools.partial(query_tile, width=TILE))
            return dk[...], dv[...]

        dk, dv = pl.run_scoped(accumulate, *2 * (plgpu.ACC((TILE, CHANNELS), jnp.float32),))

        # dK and dV overwrite keys and values, which the team reads until all dQ are computed.
        @pl.when(i < schedule.team)
        def _() -> None:
            head.wait_for_team("queries")
            head.refill(*released_after_queries)

        @pl.when(i + schedule.team >= schedule.tiles)
        def _() -> None:
            head.release(*released_after_keys)
            head.refill(*released_after_keys)

        head.write({"key": (dk * scale).astype(dtype), "value": dv.astype(dtype)}, rows)
        head.store("key", d_packed["key"], rows)
        head.store("value", d_packed["value"], rows)

    def body(head: Head) -> None:
        head.each_tile(stage_statistics, first=head.member)
        plgpu.commit_smem()
        head.arrive("statistics")
        head.each_tile(query_tile, first=head.member)
        if released_after_queries:  # dQ is stored from the buffer of "out", which must be read before it is released
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            head.release(*released_after_queries)
        head.arrive("queries")
        head.wait_for_team("statistics")
        # Reverse order balances the load: the warpgroup with an extra query tile has no extra key tile.
        head.each_tile(key_tile, first=head.first_tile)

    results = {"d_packed": jax.ShapeDtypeStruct(packed.shape, dtype)}
    released_early = released_after_queries + released_after_keys
    outputs = run(schedule, body, streamed, operands, results, released_early=released_early)
    return (outputs["d_packed"],)


def _broadcast(vector: Array, axis: int, tile: Any) -> Array:
    """Broadcast a vector of rows (axis 0) or columns (axis 1) over a tile."""
    return lax.broadcast_in_dim(vector, tile.shape, [axis])


def _left_operand(tile: Array, dtype: Any) -> Array:
    """Cast a GEMM's left operand, padded with zero columns to `TILE`."""
    padding = TILE - tile.shape[1]
    if not padding:
        return tile.astype(dtype)
    zeros = plgpu.layout_cast(jnp.zeros((TILE, padding), dtype), WGMMA_LAYOUT)
    return lax.concatenate([tile.astype(dtype), zeros], 1)


def _load_first(acc: Any) -> Array:
    """Load an accumulator while the next wgmma is still in flight."""
    return plgpu.wgmma_accumulator_load(acc, wait_n=1)
