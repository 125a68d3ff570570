"""Gradient caching in one compiled program, for a batch in device memory."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from infcl_jax.grad_cache.chunks import (
    Array,
    CachedEncoder,
    Devices,
    EncodeFn,
    Layout,
    LossFn,
    join_parameters,
    leading_rows,
    make_layout,
    widen,
)
from infcl_jax.ops.linear import DERIVED


def value_and_grad(
    encoders: Sequence[CachedEncoder],
    loss: LossFn,
    devices: Devices,
    params: Any,
    batch: Mapping[str, Any],
    rng: Array | None,
    frozen_params: Any,
) -> tuple[tuple[Array, Any], Any]:
    """Compute `((loss, aux), gradients)` with gradients of at least fp32.

    The second pass is the transpose of a loop over chunks with a rematerialized encoder. It accumulates gradients in
    the dtype of the parameters passed to the loop. The parameters are therefore widened to at least fp32 outside the
    loop and cast back inside.
    """
    given = join_parameters(params, frozen_params)

    def narrow(wide: Any) -> Any:
        return jax.tree.map(lambda a, p: a.astype(p.dtype), wide, given)

    def loss_of_batch(wide: Any) -> tuple[Array, Any]:
        copies, features = devices.copies(wide), dict(batch)
        for encoder in encoders:
            encode = functools.partial(_encode_narrow, encoder.encode, narrow)
            features[encoder.name] = encode_batch(
                dataclasses.replace(encoder, encode=encode), devices, copies, batch[encoder.name], rng, frozen_params
            )
        return loss(narrow(join_parameters(wide, frozen_params)), features)

    return jax.value_and_grad(loss_of_batch, has_aux=True)(widen(params))


def _encode_narrow(encode: EncodeFn, narrow: Callable[[Any], Any], wide: Any, chunk: Any, key: Array | None) -> Any:
    """Encode a chunk with wide parameters, cast to their own dtypes."""
    return encode(narrow(wide), chunk, key)


def encode_batch(
    encoder: CachedEncoder, devices: Devices, copies: Any, entry: Any, rng: Array | None, frozen_params: Any
) -> Any:
    """Encode a whole batch entry chunk by chunk; the result is differentiable in the per-device `copies`."""
    layout = make_layout(encoder.name, leading_rows(encoder.name, entry), encoder.chunk_size, devices.count)
    copies = lax.stop_gradient(copies) if encoder.frozen else copies
    return devices.run(functools.partial(_encode_block, encoder, layout), copies, entry, (rng, frozen_params))


def _encode_block(
    encoder: CachedEncoder, layout: Layout, device: Array | int, params: Any, block: Any, shared: tuple
) -> Any:
    """Encode one device's block chunk by chunk, with the key of the step and the frozen parameters in `shared`.

    Each chunk is sliced from the block where it is used, so the batch is never copied. In differentiation, memory has
    the activations of stored chunks, checkpointed values of the others, and the activations of one recomputed chunk.
    """
    rng, frozen_params = shared
    params = join_parameters(params, frozen_params)

    def encode(number: Array, size: int) -> Any:
        chunk = jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, number * layout.size, size), block)
        return encoder.features(params, chunk, rng, device * layout.count + number)

    features: list[Any] = []
    for numbers, size, stored in layout.runs(encoder.keep):
        if not numbers:
            continue
        encode_one: Callable[[Array], Any] = functools.partial(encode, size=size)
        if not stored:
            # DERIVED values (such as casts) do not depend on the chunk, so storing them hoists them out of the loop.
            # CSE would merge both passes of a chunk outside of a loop, so a single chunk needs `prevent_cse`.
            encode_one = encoder.checkpoint(encode_one, DERIVED, prevent_cse=len(numbers) == 1)
        if len(numbers) == 1 or stored:  # a loop would copy stored activations to arrays stacked over chunks
            features.extend(encode_one(jnp.int32(number)) for number in numbers)
        else:
            stacked = lax.map(encode_one, jnp.arange(numbers.start, numbers.stop, dtype=jnp.int32))
            features.append(jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), stacked))
    return jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *features)
