"""Gradient caching within one compiled program, for a batch that lives on the devices."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from infcl_jax.grad_cache.chunks import (
    Array,
    Devices,
    Encoder,
    Layout,
    LossFn,
    Tower,
    leading_rows,
    make_layout,
    widen,
)
from infcl_jax.ops.linear import DERIVED


def encode_batch(tower: Tower, devices: Devices, copies: Any, entry: Any, rng: Array | None) -> Any:
    """The features of a whole batch entry, differentiable in the parameters with the activations of few chunks.

    Args:
      tower: the encoder.
      devices: over which the entry is sharded.
      copies: the parameters, of `devices.copies`.
      entry: pytree of arrays `[b, ...]`.
      rng: of the step, or None.

    Returns:
      Pytree of `[b, ...]` features in the order of the entry's rows, sharded as it is.
    """
    layout = make_layout(tower.name, leading_rows(tower.name, entry), tower.chunk_size, devices.count)
    copies = lax.stop_gradient(copies) if tower.frozen else copies
    return devices.run(functools.partial(_encode_block, tower, layout), copies, entry, rng)


def _encode_block(tower: Tower, layout: Layout, device: Array | int, params: Any, block: Any, rng: Array | None) -> Any:
    """One device's rows. Its chunks are cut out of the block where they are used, so the batch is never copied."""

    def encode(number: Array, size: int) -> Any:
        chunk = jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, number * layout.size, size), block)
        return tower.features(params, chunk, rng, device * layout.count + number)

    parts: list[Any] = []
    for numbers, size, kept in layout.runs(tower.keep):
        if not numbers:
            continue
        encode_one: Callable[[Array], Any] = functools.partial(encode, size=size)
        if not kept:  # a loop keeps XLA from merging the two passes by itself
            # What no chunk changes leaves the loops.
            policy = jax.checkpoint_policies.save_only_these_names(DERIVED, *tower.keep_names)
            encode_one = jax.checkpoint(encode_one, prevent_cse=len(numbers) == 1, policy=policy)
        if len(numbers) == 1 or kept:  # a loop would copy what is kept into one array of all chunks
            parts.extend(encode_one(jnp.int32(number)) for number in numbers)
        else:
            stacked = lax.map(encode_one, jnp.arange(numbers.start, numbers.stop, dtype=jnp.int32))
            parts.append(jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), stacked))
    return jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *parts)


def value_and_grad(
    towers: Sequence[Tower], loss: LossFn, devices: Devices, params: Any, batch: Mapping[str, Any], rng: Array | None
) -> tuple[tuple[Array, Any], Any]:
    """`((loss, aux), gradients)` of `loss(params, features) -> (loss, aux)`; gradients are at least fp32.

    The second pass is the transpose of a loop over chunks whose encoder is rematerialised; that loop's carry is the sum
    of the gradients, in the dtype of the parameters it is given. Hence they are widened outside it.
    """

    def narrow(wide: Any) -> Any:
        return jax.tree.map(lambda a, p: a.astype(p.dtype), wide, params)

    def total(wide: Any) -> tuple[Array, Any]:
        copies, features = devices.copies(wide), dict(batch)
        for tower in towers:
            narrowing = dataclasses.replace(tower, encode=_compose(tower.encode, narrow))
            features[tower.name] = encode_batch(narrowing, devices, copies, batch[tower.name], rng)
        return loss(narrow(wide), features)

    return jax.value_and_grad(total, has_aux=True)(widen(params))


def _compose(encode: Encoder, narrow: Callable[[Any], Any]) -> Encoder:
    return lambda wide, chunk, key: encode(narrow(wide), chunk, key)
