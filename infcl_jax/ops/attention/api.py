"""Scaled dot-product attention: kernels for Hopper GPUs, cuDNN's, or plain XLA."""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from infcl_jax.ops.common import gpu
from infcl_jax.ops.common.sharding import automatic_axes, on_each_device, rows_for_kernels
from infcl_jax.ops.linear import contract

AttentionImplementation = Literal["xla", "cudnn", "mosaic_gpu"]


def cudnn_accepts(dtype: Any, head_channels: int) -> bool:
    """Whether cuDNN's kernel takes heads of that many channels in `dtype`."""
    return jnp.dtype(dtype).itemsize == 2 and head_channels % 8 == 0 and head_channels <= 128


def kernel_accepts(positions: int, head_channels: int, dtype: Any) -> bool:
    """Whether the kernels of Hopper GPUs take sequences of that length and heads of that many channels in `dtype`."""
    from infcl_jax.ops.attention import pallas_mosaic_gpu  # few need it

    return pallas_mosaic_gpu.accepts(positions, head_channels, dtype)


def best_attention(shape: tuple[int, ...], dtype: Any) -> AttentionImplementation:
    """The fastest attention on the device that is traced for.

    Args:
      shape: [b, t, heads, d] of queries, keys and values.
      dtype: of them.

    Returns:
      "mosaic_gpu" on a Hopper GPU with short sequences of heads that its kernels accept, of which each device has whole
      ones, see `rows_for_kernels`. Else "cudnn" on an NVIDIA GPU of compute capability 8.0 or more with inputs that it
      accepts, at any sequence length: for short ones it is far from its peak, but scores that are written to memory
      cost more. Otherwise "xla".
    """
    _, positions, _, channels = shape
    if rows_for_kernels(shape) is not None and kernel_accepts(positions, channels, dtype):
        return "mosaic_gpu"
    if jax.default_backend() != "gpu" or not cudnn_accepts(dtype, channels):
        return "xla"
    capability = getattr(jax.devices()[0], "compute_capability", "")  # "9.0"; AMD's are names
    return "cudnn" if capability[:1].isdigit() and float(capability) >= 8.0 else "xla"


def takes_packed(shape: tuple[int, ...], dtype: Any, implementation: AttentionImplementation | None) -> bool:
    """Whether `attend` is better with queries, keys and values [b, t, heads, d] in one array, as one product gives."""
    return (implementation or best_attention(shape, dtype)) == "mosaic_gpu"


def padding_for(shape: tuple[int, ...], dtype: Any, implementation: AttentionImplementation | None) -> int:
    """Positions to add to sequences for `attend`: cuDNN's backward pass is offered for even lengths alone."""
    return shape[1] % 2 if (implementation or best_attention(shape, dtype)) == "cudnn" else 0


def _cudnn_attention(query: jax.Array, key: jax.Array, value: jax.Array, causal: bool, padding: int) -> jax.Array:
    b, t = query.shape[:2]
    # In a causal sequence the others do not see the last positions anyway.
    lengths = jnp.full(b, t - padding, jnp.int32) if padding and not causal else None
    return jax.nn.dot_product_attention(
        query, key, value, is_causal=causal, key_value_seq_lengths=lengths, implementation="cudnn"
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _kernel_attention(packed: jax.Array, causal: bool) -> jax.Array:
    return _kernel_forward(packed, causal)[0]


def _kernel_forward(packed: jax.Array, causal: bool) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    from infcl_jax.ops.attention import pallas_mosaic_gpu

    result, total = _call_kernel(pallas_mosaic_gpu.forward, causal, packed)
    return result, (packed, result, total)


def _kernel_backward(causal: bool, saved: tuple[jax.Array, ...], cotangent: jax.Array) -> tuple[jax.Array, ...]:
    from infcl_jax.ops.attention import pallas_mosaic_gpu

    return _call_kernel(pallas_mosaic_gpu.backward, causal, *saved, cotangent)


_kernel_attention.defvjp(_kernel_forward, _kernel_backward)


def _call_kernel(kernel: Any, causal: bool, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The kernel's results for the sequences that each device has."""
    local = functools.partial(kernel, causal=causal, cores=gpu.multiprocessors())
    own = P(automatic_axes())
    return on_each_device(local, own, own)(*arrays)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _xla_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, seen: jax.Array | None, scale: float
) -> jax.Array:
    """Attention in plain XLA; its gradient keeps the weights in the inputs' dtype and nothing else of their size.

    The automatic gradient would keep the softmax in float32 too, and multiply float32 cotangents with 16-bit inputs,
    which widens the inputs. Here every product has factors of the inputs' dtype and sums in float32, as in fused
    kernels; the softmax is float32 between two products.

    Args:
      query: [b, n, heads, d].
      key: [b, t, heads, d].
      value: likewise.
      seen: bool, a shape that can be broadcast to [b, heads, n, t]: which keys a query sees; None for all.
      scale: of the scores.

    Returns:
      [b, n, heads, d].
    """
    return _attention_forward(query, key, value, seen, scale)[0]


def _attention_forward(
    query: jax.Array, key: jax.Array, value: jax.Array, seen: jax.Array | None, scale: float
) -> tuple[jax.Array, tuple]:
    scores = jnp.einsum("bnhd,bthd->bhnt", query, key, preferred_element_type=jnp.float32) * scale
    if seen is not None:
        scores = jnp.where(seen, scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    return jnp.einsum("bhnt,bthd->bnhd", weights, value), (query, key, value, weights)


def _attention_backward(
    scale: float, saved: tuple[jax.Array, ...], cotangent: jax.Array
) -> tuple[jax.Array | None, ...]:
    query, key, value, weights = saved  # the weights of masked positions are 0, and so are their gradients
    slopes = jnp.einsum("bnhd,bthd->bhnt", cotangent, value, preferred_element_type=jnp.float32)
    wide = weights.astype(jnp.float32)
    slopes = wide * (slopes - jnp.sum(wide * slopes, axis=-1, keepdims=True)) * scale
    slopes = slopes.astype(query.dtype)
    d_query, d_key = jnp.einsum("bhnt,bthd->bnhd", slopes, key), jnp.einsum("bhnt,bnhd->bthd", slopes, query)
    return d_query, d_key, jnp.einsum("bhnt,bnhd->bthd", weights, cotangent), None


_xla_attention.defvjp(_attention_forward, _attention_backward)


def attend(
    *parts: jax.Array,
    causal: bool,
    padding: int = 0,
    implementation: AttentionImplementation | None = None,
) -> jax.Array:
    """Scaled dot-product attention (Vaswani et al. 2017, section 3.2.1) with a float32 softmax.

    Args:
      *parts: query, key and value, each [b, t, heads, d], floating, of one dtype; or one array [b, t, 3 heads, d] with
        the heads of all three in that order, which is better where `takes_packed` says so and worse elsewhere.
      causal: whether position i sees only positions up to i.
      padding: positions at the end that the others do not see, see `padding_for`; their own results are arbitrary.
      implementation: "xla", "cudnn" for the kernel behind `jax.nn.dot_product_attention`, or "mosaic_gpu" for
        `mosaic_attention`; None for `best_attention`.

    Returns:
      [b, t, heads, d] in the dtype of the inputs.

    Raises:
      ValueError: padding that is not needed; or "mosaic_gpu" for another device, or for inputs that it does not accept.
    """
    b, t, heads, channels = parts[0].shape
    shape = (b, t, heads // 3 if len(parts) == 1 else heads, channels)
    implementation = implementation or best_attention(shape, parts[0].dtype)
    if padding and implementation != "cudnn":
        raise ValueError(f"expected no padding for attention {implementation!r}, got {padding}")
    if implementation == "mosaic_gpu":
        _check_kernel(shape, parts[0].dtype)
        return _kernel_attention(jnp.concatenate(parts, axis=2), causal)
    query, key, value = jnp.split(parts[0], 3, axis=2) if len(parts) == 1 else parts
    if implementation == "cudnn":
        return _cudnn_attention(query, key, value, causal, padding)
    seen = jnp.tri(t, dtype=bool)[None, None] if causal else None
    return _xla_attention(query, key, value, seen, channels**-0.5)


def attend_from(
    query: jax.Array,
    x: jax.Array,
    of_key: jax.Array,
    of_value: jax.Array,
    position: jax.Array,
    *,
    causal: bool,
    padding: int = 0,
) -> jax.Array:
    """`attend` for one position of each sequence, without keys and values of all others.

    The score of a query and a token is bilinear in both, so the key's matrix can be applied to the query; weighted
    values are linear in the tokens, so the value's matrix can be applied to weighted tokens.

    Args:
      query: [b, heads, d] at those positions, floating.
      x: [b, t, width], of the same dtype: what keys and values are products of.
      of_key: [width, heads d], floating, the matrix of the keys.
      of_value: likewise, of the values.
      position: integer [b].
      causal: as for `attend`.
      padding: likewise.

    Returns:
      [b, heads, d] in the dtype of `query`.
    """
    (_, t, width), (_, heads, d) = x.shape, query.shape
    of_key, of_value = (kernel.reshape(width, heads, d) for kernel in (of_key, of_value))
    last = position if causal else jnp.full_like(position, t - padding - 1)
    seen = (jnp.arange(t)[None] <= last[:, None])[:, None, None] if causal or padding else None
    tokens = x[:, :, None]  # one head, which all queries look at
    rows = contract("bhd,whd->bhw", query, of_key)
    return contract("bhw,whd->bhd", _xla_attention(rows[:, :, None], tokens, tokens, seen, d**-0.5)[:, :, 0], of_value)


def _check_kernel(shape: tuple[int, ...], dtype: Any) -> None:
    from infcl_jax.ops.attention import pallas_mosaic_gpu

    _, positions, _, channels = shape
    if gpu.compute_capability() != gpu.HOPPER:
        raise ValueError(f"attention 'mosaic_gpu' expects a Hopper GPU, got {jax.devices()[0].device_kind}")
    if not pallas_mosaic_gpu.accepts(positions, channels, dtype):
        raise ValueError(
            f"attention 'mosaic_gpu' expects bf16 or fp16, at most {pallas_mosaic_gpu.LONGEST} positions and heads of "
            f"{pallas_mosaic_gpu.CHANNELS} channels, got {dtype}, {positions} and {channels}"
        )
