"""Scaled dot-product attention: cuDNN's fused kernel, or plain XLA."""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp

AttentionImplementation = Literal["xla", "cudnn"]


def cudnn_accepts(dtype: Any, head_channels: int) -> bool:
    """Whether the fused kernel takes heads of that many channels in `dtype`."""
    return jnp.dtype(dtype).itemsize == 2 and head_channels % 8 == 0 and head_channels <= 128


def best_attention(dtype: Any, head_channels: int) -> AttentionImplementation:
    """The fastest attention on the default device.

    Args:
      dtype: of queries, keys and values.
      head_channels: of each head.

    Returns:
      "cudnn" on an NVIDIA GPU of compute capability 8.0 or more with inputs that it accepts, otherwise "xla". cuDNN is
      chosen at any sequence length: for short ones its kernel is far from its peak, but scores that are written to
      memory cost more.
    """
    if jax.default_backend() != "gpu" or not cudnn_accepts(dtype, head_channels):
        return "xla"
    capability = getattr(jax.devices()[0], "compute_capability", "")  # "9.0"; AMD's are names
    return "cudnn" if capability[:1].isdigit() and float(capability) >= 8.0 else "xla"


def padding_for(positions: int, dtype: Any, head_channels: int, implementation: AttentionImplementation | None) -> int:
    """Positions to add to sequences for `attend`: cuDNN's backward pass is offered for even lengths alone."""
    return positions % 2 if (implementation or best_attention(dtype, head_channels)) == "cudnn" else 0


def _cudnn_attention(query: jax.Array, key: jax.Array, value: jax.Array, causal: bool, padding: int) -> jax.Array:
    b, t = query.shape[:2]
    # In a causal sequence the others do not see the last positions anyway.
    lengths = jnp.full(b, t - padding, jnp.int32) if padding and not causal else None
    return jax.nn.dot_product_attention(
        query, key, value, is_causal=causal, key_value_seq_lengths=lengths, implementation="cudnn"
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _xla_attention(query: jax.Array, key: jax.Array, value: jax.Array, causal: bool) -> jax.Array:
    """Attention in plain XLA; its gradient keeps the weights in the inputs' dtype and nothing else of their size.

    The automatic gradient would keep the softmax in float32 too, and multiply float32 cotangents with 16-bit inputs,
    which widens the inputs. Here every product has factors of the inputs' dtype and sums in float32, as in fused
    kernels; the softmax is float32 between two products.
    """
    return _attention_forward(query, key, value, causal)[0]


def _attention_forward(query: jax.Array, key: jax.Array, value: jax.Array, causal: bool) -> tuple[jax.Array, tuple]:
    scores = jnp.einsum("btnd,bsnd->bnts", query, key, preferred_element_type=jnp.float32) * query.shape[-1] ** -0.5
    if causal:
        scores = jnp.where(jnp.tri(query.shape[1], dtype=bool)[None, None], scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    return jnp.einsum("bnts,bsnd->btnd", weights, value), (query, key, value, weights)


def _attention_backward(causal: bool, saved: tuple[jax.Array, ...], cotangent: jax.Array) -> tuple[jax.Array, ...]:
    query, key, value, weights = saved  # the weights of masked positions are 0, and so are their gradients
    slopes = jnp.einsum("btnd,bsnd->bnts", cotangent, value, preferred_element_type=jnp.float32)
    wide = weights.astype(jnp.float32)
    slopes = wide * (slopes - jnp.sum(wide * slopes, axis=-1, keepdims=True)) * query.shape[-1] ** -0.5
    slopes = slopes.astype(query.dtype)
    d_query, d_key = jnp.einsum("bnts,bsnd->btnd", slopes, key), jnp.einsum("bnts,btnd->bsnd", slopes, query)
    return d_query, d_key, jnp.einsum("bnts,btnd->bsnd", weights, cotangent)


_xla_attention.defvjp(_attention_forward, _attention_backward)


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    causal: bool,
    padding: int = 0,
    implementation: AttentionImplementation | None = None,
) -> jax.Array:
    """Scaled dot-product attention (Vaswani et al. 2017, section 3.2.1) with a float32 softmax.

    Args:
      query: [b, t, heads, d], floating.
      key: [b, t, heads, d], of the same dtype.
      value: [b, t, heads, d], of the same dtype.
      causal: whether position i sees only positions up to i.
      padding: positions at the end that the others do not see, see `padding_for`; their own results are arbitrary.
      implementation: "xla", or "cudnn" for the fused kernel through `jax.nn.dot_product_attention`; None for
        `best_attention`.

    Returns:
      [b, t, heads, d] in the dtype of the inputs.

    Raises:
      ValueError: padding for plain XLA, which needs none.
    """
    if (implementation or best_attention(query.dtype, query.shape[-1])) == "cudnn":
        return _cudnn_attention(query, key, value, causal, padding)
    if padding:
        raise ValueError(f"expected no padding for attention in plain XLA, got {padding}")
    return _xla_attention(query, key, value, causal)
