"""Gradient caching driven from the host, for batches larger than device memory.

The batch is in host memory, or `Replay` reads its chunks once per pass. The host calls compiled functions of one chunk.
The transfer of the next chunk overlaps the computation of the current one.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from infcl_jax.grad_cache.chunks import (
    Array,
    CachedEncoder,
    Devices,
    LossFn,
    join_parameters,
    leading_rows,
    make_layout,
    widen,
)


@dataclasses.dataclass(frozen=True)
class Replay:
    """Batch entry that is read chunk by chunk, once in each pass.

    Examples:
      >>> rows = Replay(8, lambda number: np.asarray(image)[chunk_rows(number, rows=8, chunk_size=2)])
      >>> rows.load(3).shape
      (2, 4)

    Attributes:
      rows: rows of the entry in this process.
      load: `load(number) -> chunk`, a deterministic function of the chunk number. It returns a pytree of host arrays
        with this process's rows among `chunk_rows(number, ...)`, in that order. Do not modify the arrays before the
        gradients are computed: the transfer is asynchronous, and a device may use them without a copy.
    """

    rows: int
    load: Callable[[int], Any]


class HostDriver:
    """Host-driven gradient caching for one set of encoders.

    Encoders are compiled for the shape of a chunk, independent of the batch size.
    """

    def __init__(self, encoders: Sequence[CachedEncoder], loss: LossFn, devices: Devices) -> None:
        self._devices = devices
        self._copies = jax.jit(devices.copies)
        self._zeros = jax.jit(
            lambda copies: jax.tree.map(jnp.zeros_like, widen(copies)), out_shardings=devices.sharding
        )
        self._compiled = {encoder.name: _CompiledEncoder(encoder, devices) for encoder in encoders}
        # The cotangents take the memory of the trained features, which positives by id sort into copies.
        self._loss = jax.jit(functools.partial(_loss_and_cotangents, loss), donate_argnums=2)
        self._finish = jax.jit(lambda direct, sums: jax.tree.map(jnp.add, widen(direct), devices.sum(sums)))

    def __call__(
        self, params: Any, batch: Mapping[str, Any], rng: Array | None, frozen_params: Any
    ) -> tuple[tuple[Array, Any], Any]:
        """Compute `((loss, aux), gradients)` with gradients of at least fp32.

        Returns before the computation is done. The host blocks only to bound the number of chunks in device memory.

        Raises:
          ValueError: the call is traced.
        """
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(params)):
            raise ValueError('expected offload "host" to be called outside jit; it compiles its own functions')
        copies = self._copies(params)
        inputs = {name: self._put_whole(entry) for name, entry in batch.items() if name not in self._compiled}
        passes = {
            name: _Passes(compiled, self._devices, copies, batch[name], rng, frozen_params)
            for name, compiled in self._compiled.items()
        }
        features = {name: encoder_passes.encode() for name, encoder_passes in passes.items()}
        trained = {name: features.pop(name) for name, compiled in self._compiled.items() if not compiled.encoder.frozen}
        result, direct, cotangents = self._loss(params, frozen_params, trained, inputs | features)
        del features, trained  # the second pass needs their cotangents only
        sums = self._zeros(copies)
        for name, cotangent in cotangents.items():
            sums = passes[name].accumulate_gradients(sums, cotangent)
        return result, self._finish(direct, sums)

    def _put_whole(self, entry: Any) -> Any:
        """Transfer an entry without an encoder to the devices as a whole."""
        on_device = all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(entry))
        return entry if on_device else self._devices.put(entry)


def _loss_and_cotangents(
    loss: LossFn, params: Any, frozen_params: Any, trained: Any, inputs: Any
) -> tuple[tuple[Array, Any], Any, Any]:
    """Compute `(loss, aux)`, gradients of the loss's own use of `params`, and cotangents of trained features."""

    def loss_of_trained(params: Any, trained: Any) -> tuple[Array, Any]:
        return loss(join_parameters(params, frozen_params), inputs | trained)

    result, (direct, cotangents) = jax.value_and_grad(loss_of_trained, argnums=(0, 1), has_aux=True)(params, trained)
    return result, direct, cotangents


class _CompiledEncoder:
    """Compiled functions of one encoder.

    Their argument `shared` is `(rng, chunk number, number of chunks, frozen parameters)`. The encoder's key is derived
    from the first three.
    """

    def __init__(self, encoder: CachedEncoder, devices: Devices) -> None:
        self.encoder = encoder

        def encode_shard(device: Array | int, params: Any, chunk: Any, shared: Any) -> Any:
            rng, number, count, frozen_params = shared
            return encoder.features(join_parameters(params, frozen_params), chunk, rng, device * count + number)

        def run(copies: Any, chunk: Any, shared: Any) -> Any:
            return devices.run(encode_shard, copies, chunk, shared)

        def encode(copies: Any, chunk: Any, shared: Any, stored: bool) -> tuple[Any, Any]:
            """Return features and pullback, None if no values are stored."""
            if not stored and not encoder.keep_names:
                return run(copies, chunk, shared), None
            encode_one = run if stored else encoder.checkpoint(run)
            features, pullback = jax.vjp(lambda copies: encode_one(copies, chunk, shared), copies)
            # The second pass reads the chunk again only if its activations are not stored.
            return features, _remove_arrays(pullback, (copies, None if stored else chunk, shared))

        def accumulate(
            sums: Any, pullback: Any, copies: Any, chunk: Any, shared: Any, cotangents: Any
        ) -> tuple[Any, Array]:
            if pullback is None:
                _, pullback = jax.vjp(lambda copies: run(copies, chunk, shared), copies)
            (gradient,) = _restore_arrays(pullback, (copies, chunk, shared))(cotangents)
            # The host waits for the second result, since the sums are donated to the next call. The result must be
            # computed: an argument returned unchanged would be ready at once.
            return jax.tree.map(lambda s, g: s + g.astype(s.dtype), sums, gradient), shared[1] + 1

        def join(chunks: list[Any]) -> Any:
            def join_block(device: Array | int, none: None, chunks: list[Any], shared: None) -> Any:
                return jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *chunks)

            return devices.run(join_block, None, chunks, None)

        def slice_chunk(cotangents: Any, start: Array, size: int) -> Any:
            def slice_block(device: Array | int, none: None, rows: Any, start: Array) -> Any:
                return jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, start, size), rows)

            return devices.run(slice_block, None, cotangents, start)

        self.encode = jax.jit(encode, static_argnums=3)
        self.accumulate = jax.jit(accumulate, donate_argnums=0)
        self.join = jax.jit(join)
        self.slice_chunk = jax.jit(slice_chunk, static_argnums=2)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Placeholder:
    """Static stand-in for an argument that a pullback refers to.

    A compiled function would return a copy of that argument.
    """

    index: int


def _remove_arrays(pullback: Any, arrays: Any) -> Any:
    """Replace `arrays` in the pytree of a pullback by placeholders."""
    indices = {id(array): index for index, array in enumerate(jax.tree.leaves(arrays))}
    return jax.tree.map(lambda a: _Placeholder(indices[id(a)]) if id(a) in indices else a, pullback)


def _restore_arrays(pullback: Any, arrays: Any) -> Any:
    """Replace the placeholders of `_remove_arrays` by `arrays`."""
    leaves = jax.tree.leaves(arrays)
    return jax.tree.map(
        lambda a: leaves[a.index] if isinstance(a, _Placeholder) else a,
        pullback,
        is_leaf=lambda a: isinstance(a, _Placeholder),
    )


class _Passes:
    """First and second pass of one encoder over one batch."""

    def __init__(
        self, compiled: _CompiledEncoder, devices: Devices, copies: Any, entry: Any, rng: Array | None, frozen: Any
    ) -> None:
        encoder = compiled.encoder
        self._compiled, self._devices, self._copies, self._entry = compiled, devices, copies, entry
        rows = entry.rows if isinstance(entry, Replay) else leading_rows(encoder.name, entry)
        global_rows = rows * devices.count // devices.local_count
        self._layout = make_layout(encoder.name, global_rows, encoder.chunk_size, devices.count)
        self._rng, self._frozen_params = rng, frozen
        self._pullbacks: list[Any] = []

    def encode(self) -> Any:
        """Encode the whole entry and store the pullback of each chunk."""
        chunks: list[Any] = []

        def encode_one(number: int, chunk: Any) -> Any:
            stored = number < self._compiled.encoder.keep
            features, pullback = self._compiled.encode(self._copies, chunk, self._shared(number), stored)
            chunks.append(features)
            self._pullbacks.append(pullback)
            return features

        self._stream(range(self._layout.count), encode_one)
        return self._compiled.join(chunks)

    def accumulate_gradients(self, sums: Any, cotangents: Any) -> Any:
        """Add this encoder's gradients to `sums`, which is donated."""

        def accumulate_one(number: int, chunk: Any) -> Any:
            nonlocal sums
            block = self._layout.chunk_slice(number)
            cotangent = self._compiled.slice_chunk(cotangents, np.int32(block.start), block.stop - block.start)
            arguments = self._copies, chunk, self._shared(number), cotangent
            sums, done = self._compiled.accumulate(sums, self._pullbacks.pop(0), *arguments)
            return done

        keep = min(self._compiled.encoder.keep, self._layout.count)
        for number in range(keep):
            accumulate_one(number, None)
        self._stream(range(keep, self._layout.count), accumulate_one)
        return sums

    def _stream(self, numbers: range, compute: Callable[[int, Any], Any]) -> None:
        """Call `compute(number, chunk)` for every chunk and prefetch the next one.

        Dispatch is asynchronous, so the host would transfer all chunks at once if it did not wait for the previous
        chunk's result. This leaves at most three chunks in device memory: previous, current and next.
        """
        upcoming = self._load(numbers[0]) if numbers else None
        previous = None
        for number in numbers:
            chunk, upcoming = upcoming, None
            done = compute(number, chunk)
            del chunk
            if number + 1 in numbers:
                upcoming = self._load(number + 1)
            jax.block_until_ready(previous)
            previous = done

    def _load(self, number: int) -> Any:
        block_slice = self._layout.chunk_slice(number)
        if not isinstance(self._entry, Replay):
            return self._devices.put(self._entry, block_slice)
        rows = self._devices.local_count * (block_slice.stop - block_slice.start)
        name, chunk = self._compiled.encoder.name, self._entry.load(number)
        if (got := leading_rows(name, chunk)) != rows:
            raise ValueError(f"expected {rows} rows from load({number}) of batch entry {name!r}, got {got}")
        return self._devices.put(chunk)

    def _shared(self, number: int) -> tuple[Array | None, np.int32, np.int32, Any]:
        return self._rng, np.int32(number), np.int32(self._layout.count), self._frozen_params
