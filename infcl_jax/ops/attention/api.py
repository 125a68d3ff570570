"""Scaled dot-product attention on Hopper kernels, cuDNN or plain XLA."""

import functools
import operator
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int32, Integer

from infcl_jax.ops.common import gpu
from infcl_jax.ops.common.sharding import automatic_axes, on_each_device, rows_for_kernels
from infcl_jax.ops.linear import contract
from infcl_jax.ops.packing import in_span

AttentionImplementation = Literal["xla", "cudnn", "mosaic_gpu"]
Heads = Float[Array, "b t heads d"]  # queries, keys and values of all positions
Queries = Float[Array, "b n heads d"]  # of some positions


def cudnn_accepts(dtype: Any, head_channels: int) -> bool:
    """Return whether cuDNN attention supports a dtype and head size."""
    return jnp.dtype(dtype).itemsize == 2 and head_channels % 8 == 0 and head_channels <= 128


def mosaic_gpu_accepts(positions: int, head_channels: int, dtype: Any) -> bool:
    """Return whether the Hopper kernels support a sequence length, head size and dtype."""
    from infcl_jax.ops.attention import pallas_mosaic_gpu  # needed on GPUs only

    return pallas_mosaic_gpu.accepts(positions, head_channels, dtype)


def best_attention(shape: tuple[int, ...], dtype: Any) -> AttentionImplementation:
    """Select the fastest attention for the target device.

    Args:
      shape: shape [b, t, heads, d] of queries, keys and values.
      dtype: dtype of queries, keys and values.

    Returns:
      "mosaic_gpu" on a Hopper GPU if the kernels support the shape and dtype and each device holds whole sequences, see
      `rows_for_kernels`. Else "cudnn" on an NVIDIA GPU of compute capability 8.0 or more if it supports the head size
      and dtype. Else "xla". On short sequences cuDNN is far from its peak, but XLA is slower, since it writes the
      scores to HBM. A shape or dtype without Hopper kernels is logged once.
    """
    _, positions, _, channels = shape
    if rows_for_kernels(shape) is not None:
        from infcl_jax.ops.attention import pallas_mosaic_gpu  # needed on GPUs only

        if pallas_mosaic_gpu.accepts(positions, channels, dtype):
            return "mosaic_gpu"
        array = f"{positions} positions and heads of {channels} channels in {jnp.dtype(dtype)}"
        gpu.log_fallback("attention", array, pallas_mosaic_gpu.SUPPORTED)
    if jax.default_backend() != "gpu" or not cudnn_accepts(dtype, channels):
        return "xla"
    capability = getattr(jax.devices()[0], "compute_capability", "")  # "9.0"; AMD GPUs report an architecture name
    return "cudnn" if capability[:1].isdigit() and float(capability) >= 8.0 else "xla"


def prefers_packed(shape: tuple[int, ...], dtype: Any, implementation: AttentionImplementation | None) -> bool:
    """Return whether `attend` is faster with packed queries, keys and values.

    Args:
      shape: shape [b, t, heads, d] of queries, keys and values.
      dtype: dtype of queries, keys and values.
      implementation: implementation of `attend`; None for `best_attention`.

    Returns:
      True if one array [b, t, 3 heads, d] from a single GEMM is faster than three arrays [b, t, heads, d].
    """
    return (implementation or best_attention(shape, dtype)) == "mosaic_gpu"


def padding_for(shape: tuple[int, ...], dtype: Any, implementation: AttentionImplementation | None) -> int:
    """Return the number of positions by which to pad sequences for `attend`.

    cuDNN supports the backward pass for even sequence lengths only.

    Args:
      shape: shape [b, t, heads, d] of queries, keys and values.
      dtype: dtype of queries, keys and values.
      implementation: implementation of `attend`; None for `best_attention`.
    """
    return shape[1] % 2 if (implementation or best_attention(shape, dtype)) == "cudnn" else 0


def _cudnn_attention(query: Heads, key: Heads, value: Heads, causal: bool, padding: int) -> Heads:
    b, t = query.shape[:2]
    # The causal mask already hides trailing padding from all valid queries.
    lengths = jnp.full(b, t - padding, jnp.int32) if padding and not causal else None
    return jax.nn.dot_product_attention(
        query, key, value, is_causal=causal, key_value_seq_lengths=lengths, implementation="cudnn"
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _mosaic_attention(packed: Float[Array, "b t qkv_heads d"], spans: tuple[jax.Array, ...], causal: bool) -> Heads:
    """Attention of packed [b, t, 3 heads, d] on the Hopper kernels.

    `spans` are two arrays, see `attend`, or none.
    """
    return _mosaic_forward(packed, spans, causal)[0]


def _mosaic_forward(
    packed: Float[Array, "b t qkv_heads d"], spans: tuple[jax.Array, ...], causal: bool
) -> tuple[Heads, tuple[Any, ...]]:
    from infcl_jax.ops.attention import pallas_mosaic_gpu

    spans = pallas_mosaic_gpu.padded_spans(*spans) if spans else ()
    out, lse = _call_mosaic(pallas_mosaic_gpu.forward, causal, packed, *spans)
    return out, (packed, out, lse, spans)


def _mosaic_backward(causal: bool, saved: tuple[Any, ...], d_out: Heads) -> tuple[Any, ...]:
    from infcl_jax.ops.attention import pallas_mosaic_gpu

    packed, out, lse, spans = saved
    return *_call_mosaic(pallas_mosaic_gpu.backward, causal, packed, out, lse, d_out, *spans), (None,) * len(spans)


_mosaic_attention.defvjp(_mosaic_forward, _mosaic_backward)


def _call_mosaic(kernel: Any, causal: bool, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Run `kernel` on each device's shard of the sequences."""
    local = functools.partial(kernel, causal=causal, sm_count=gpu.multiprocessors())
    batch_spec = P(automatic_axes())
    return on_each_device(local, batch_spec, batch_spec)(*arrays)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def xla_attention(
    query: Float[Array, "b n heads d"],
    key: Float[Array, "b t heads d"],
    value: Float[Array, "b t heads d"],
    mask: Bool[Array, "#b #heads #n #t"] | None,
    scale: float,
) -> Float[Array, "b n heads d"]:
    """Attention in plain XLA with a memory-saving gradient.

    The only array of size [b, heads, n, t] saved for the backward pass is the softmax weights, in the dtype of the
    inputs. Automatic differentiation would also save float32 weights, and would cast 16-bit inputs to float32 to
    multiply them with float32 cotangents. As in fused kernels, GEMM operands have the dtype of the inputs, and GEMMs
    accumulate in float32. The softmax is float32.

    Args:
      query: [b, n, heads, d].
      key: [b, t, heads, d].
      value: [b, t, heads, d].
      mask: bool, broadcastable to [b, heads, n, t], True where a query attends to a key; None for all keys.
      scale: factor of the scores.

    Returns:
      [b, n, heads, d].
    """
    return _xla_forward(query, key, value, mask, scale)[0]


def _xla_forward(
    query: Queries, key: Heads, value: Heads, mask: Bool[Array, "#b #heads #n #t"] | None, scale: float
) -> tuple[Queries, tuple]:
    s = jnp.einsum("bnhd,bthd->bhnt", query, key, preferred_element_type=jnp.float32) * scale
    if mask is not None:
        s = jnp.where(mask, s, -jnp.inf)
    p = jax.nn.softmax(s, axis=-1).astype(value.dtype)
    return jnp.einsum("bhnt,bthd->bnhd", p, value), (query, key, value, p)


def _xla_backward(scale: float, saved: tuple[jax.Array, ...], d_out: Queries) -> tuple[Queries, Heads, Heads, None]:
    query, key, value, p = saved  # p = 0 at masked positions, so ds = 0 there
    dp = jnp.einsum("bnhd,bthd->bhnt", d_out, value, preferred_element_type=jnp.float32)
    p32 = p.astype(jnp.float32)
    ds = p32 * (dp - jnp.sum(p32 * dp, axis=-1, keepdims=True)) * scale
    ds = ds.astype(query.dtype)
    d_query, d_key = jnp.einsum("bhnt,bthd->bnhd", ds, key), jnp.einsum("bhnt,bnhd->bthd", ds, query)
    return d_query, d_key, jnp.einsum("bhnt,bnhd->bthd", p, d_out), None


xla_attention.defvjp(_xla_forward, _xla_backward)


def attend(
    *qkv: Float[Array, "b t qkv_heads d"],
    causal: bool,
    padding: int = 0,
    key_mask: Bool[Array, "b t"] | None = None,
    spans: tuple[Int32[Array, "b t"], Int32[Array, "b t"]] | None = None,
    implementation: AttentionImplementation | None = None,
) -> Float[Array, "b t heads d"]:
    """Scaled dot-product attention (Vaswani et al. 2017, section 3.2.1) with a float32 softmax.

    Args:
      *qkv: query, key and value, each [b, t, heads, d], floating, of one dtype; or one packed array [b, t, 3 heads, d]
        with their heads in that order. `prefers_packed` says which form is faster.
      causal: whether position i attends only to positions up to i.
      padding: number of trailing positions that are masked as keys, see `padding_for`; their results are arbitrary.
      key_mask: bool [b, t], False for keys that no query attends to; None for none. Only XLA supports it, and every
        query needs a key.
      spans: first position of each position's sequence, and the one after its last, int32 [b, t], for several sequences
        side by side, each of which attends to itself; None for one sequence. cuDNN does not support them.
      implementation: "xla", "cudnn" for the kernel of `jax.nn.dot_product_attention`, or "mosaic_gpu" for the Hopper
        kernels of `pallas_mosaic_gpu`; None for `best_attention`.

    Returns:
      [b, t, heads, d] in the dtype of the inputs.

    Raises:
      ValueError: padding with an implementation other than cuDNN; a mask with one other than XLA; or "mosaic_gpu" on
        another device, or with a shape or dtype that its kernels do not support.
    """
    b, t, heads, channels = qkv[0].shape
    shape = (b, t, heads // 3 if len(qkv) == 1 else heads, channels)
    if key_mask is not None:
        _check_masked(implementation, shape, qkv[0].dtype)
        implementation = "xla"
    if spans is not None and implementation == "cudnn":
        raise ValueError("expected attention 'xla', 'mosaic_gpu' or None with spans, got 'cudnn'; choose None")
    best = implementation or best_attention(shape, qkv[0].dtype)
    implementation = "xla" if spans is not None and best == "cudnn" else best
    if padding and implementation != "cudnn":
        raise ValueError(f"expected no padding for attention {implementation!r}, got {padding}; see padding_for")
    if implementation == "mosaic_gpu":
        _check_mosaic(shape, qkv[0].dtype)
        return _mosaic_attention(jnp.concatenate(qkv, axis=2), () if spans is None else spans, causal)
    query, key, value = jnp.split(qkv[0], 3, axis=2) if len(qkv) == 1 else qkv
    if implementation == "cudnn":
        return _cudnn_attention(query, key, value, causal, padding)
    masks = [jnp.tri(t, dtype=bool)[None, None]] if causal else []
    if key_mask is not None:
        masks.append(key_mask[:, None, None])
    if spans is not None:
        masks.append(in_span(*spans)[:, None])
    mask = functools.reduce(operator.and_, masks) if masks else None
    return xla_attention(query, key, value, mask, channels**-0.5)


def attend_from(
    query: Float[Array, "b heads d"],
    x: Float[Array, "b t width"],
    key_kernel: Float[Array, "width heads*d"],
    value_kernel: Float[Array, "width heads*d"],
    position: Integer[Array, "b"],
    *,
    causal: bool,
    padding: int = 0,
) -> Float[Array, "b heads d"]:
    """Attention of one query per sequence, without projecting keys and values.

    Scores are bilinear in query and token, so the key projection is applied to the query. The output is linear in the
    tokens, so the value projection is applied to the weighted sum of tokens.

    Args:
      query: [b, heads, d], queries at `position`, floating.
      x: [b, t, width], tokens before the key and value projections, in the dtype of `query`.
      key_kernel: [width, heads d], key projection, floating.
      value_kernel: [width, heads d], value projection, floating.
      position: integer [b], position of each query.
      causal: whether a query attends only to positions up to its own.
      padding: number of trailing positions that are masked as keys.

    Returns:
      [b, heads, d] in the dtype of `query`.
    """
    (_, t, width), (_, heads, d) = x.shape, query.shape
    key_kernel, value_kernel = (kernel.reshape(width, heads, d) for kernel in (key_kernel, value_kernel))
    last_key = position if causal else jnp.full_like(position, t - padding - 1)
    mask = (jnp.arange(t)[None] <= last_key[:, None])[:, None, None] if causal or padding else None
    tokens = x[:, :, None]  # a single head, with the queries of all heads
    queries = contract("bhd,whd->bhw", query, key_kernel)[:, :, None]
    weighted_tokens = xla_attention(queries, tokens, tokens, mask, d**-0.5)[:, :, 0]
    return contract("bhw,whd->bhd", weighted_tokens, value_kernel)


def _check_masked(implementation: AttentionImplementation | None, shape: tuple[int, ...], dtype: Any) -> None:
    """Check that masked attention may run in XLA, and log a fallback from kernels."""
    if implementation not in (None, "xla"):
        raise ValueError(f"expected attention 'xla' or None with a mask of keys, got {implementation!r}; choose None")
    if implementation is None and best_attention(shape, dtype) != "xla":
        gpu.log_fallback("attention", "sequences with a mask of keys", "sequences without one")


def _check_mosaic(shape: tuple[int, ...], dtype: Any) -> None:
    from infcl_jax.ops.attention import pallas_mosaic_gpu

    _, positions, _, channels = shape
    if gpu.compute_capability() != gpu.HOPPER:
        raise ValueError(
            f"expected a Hopper GPU for attention 'mosaic_gpu', got {jax.devices()[0].device_kind}; use 'xla' or None"
        )
    if not pallas_mosaic_gpu.accepts(positions, channels, dtype):
        raise ValueError(
            f"expected {pallas_mosaic_gpu.SUPPORTED} for attention 'mosaic_gpu', got {dtype}, {positions} and "
            f"{channels}; use 'xla' or None"
        )
