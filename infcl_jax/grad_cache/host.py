"""Gradient caching driven from the host, for a batch that lives in host memory or is read twice.

Small compiled functions per chunk; the next chunk is on its way to the device while one is computed.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from infcl_jax.grad_cache.chunks import Array, Devices, LossFn, Tower, leading_rows, make_layout, widen


@dataclasses.dataclass(frozen=True)
class Replay:
    """A batch entry that is read chunk by chunk, once in each pass, and never held as a whole.

    Attributes:
      rows: of the entry; with several processes, those of this process.
      load: `load(number) -> chunk`, a pytree of host arrays with the rows `chunk_rows(number, ...)`; the same for the
        same number. With several processes, this process's share of them. Its arrays must not be changed before the
        gradients have been computed, since they may be sent later or used where they are.
    """

    rows: int
    load: Callable[[int], Any]


class HostDriver:
    """The host-driven form for one set of encoders, which are compiled for the shape of a chunk, not of a batch.

    Args:
      towers: the encoders.
      loss: of the features of the whole batch.
      devices: on which everything is computed.
    """

    def __init__(self, towers: Sequence[Tower], loss: LossFn, devices: Devices) -> None:
        self._towers, self._devices = towers, devices
        self._copies = jax.jit(devices.copies)
        self._zeros = jax.jit(
            lambda copies: jax.tree.map(jnp.zeros_like, widen(copies)), out_shardings=devices.sharding
        )
        self._stages = {tower.name: _Stages(tower, devices) for tower in towers}
        self._loss = jax.jit(functools.partial(_loss_and_cotangents, loss))
        self._finish = jax.jit(lambda direct, sums: jax.tree.map(jnp.add, widen(direct), devices.sum(sums)))

    def __call__(self, params: Any, batch: Mapping[str, Any], rng: Array | None) -> tuple[tuple[Array, Any], Any]:
        """`((loss, aux), gradients)` as in the device form; nothing is waited for but room on the device.

        Raises:
          ValueError: it is called while being traced.
        """
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(params)):
            raise ValueError('expected residency "host" to be called outside jit; it compiles its own parts')
        copies = self._copies(params)
        known = {name: self._whole(entry) for name, entry in batch.items() if name not in self._stages}
        passes = {
            t.name: _Passes(self._stages[t.name], self._devices, copies, batch[t.name], rng) for t in self._towers
        }
        features = {name: one.encode() for name, one in passes.items()}
        trained = {t.name: features.pop(t.name) for t in self._towers if not t.frozen}
        result, direct, cotangents = self._loss(params, trained, known | features)
        del features, trained  # only their gradients stay beside the activations
        sums = self._zeros(copies)
        for name, cotangent in cotangents.items():
            sums = passes[name].pull_back(sums, cotangent)
        return result, self._finish(direct, sums)

    def _whole(self, entry: Any) -> Any:
        """An entry without an encoder, on the devices as a whole."""
        on_device = all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(entry))
        return entry if on_device else self._devices.put(entry)


def _loss_and_cotangents(loss: LossFn, params: Any, trained: Any, known: Any) -> tuple[tuple[Array, Any], Any, Any]:
    def total(params: Any, trained: Any) -> tuple[Array, Any]:
        return loss(params, known | trained)

    result, (direct, cotangents) = jax.value_and_grad(total, argnums=(0, 1), has_aux=True)(params, trained)
    return result, direct, cotangents


class _Stages:
    """The compiled functions of one tower. `place` is `(rng, number of the chunk, number of chunks)`."""

    def __init__(self, tower: Tower, devices: Devices) -> None:
        self.tower = tower

        def share(device: Array | int, params: Any, chunk: Any, place: Any) -> Any:
            rng, number, count = place
            return tower.features(params, chunk, rng, device * count + number)

        def encode(copies: Any, chunk: Any, place: Any) -> Any:
            return devices.run(share, copies, chunk, place)

        def encode_keeping(copies: Any, chunk: Any, place: Any) -> tuple[Any, Any]:
            features, pull = jax.vjp(lambda copies: encode(copies, chunk, place), copies)
            return features, _without(pull, copies)

        def encode_keeping_names(copies: Any, chunk: Any, place: Any) -> tuple[Any, Any]:
            policy = jax.checkpoint_policies.save_only_these_names(*tower.keep_names)
            features, pull = jax.vjp(lambda copies: jax.checkpoint(encode, policy=policy)(copies, chunk, place), copies)
            return features, _without(pull, (copies, chunk))

        def add(sums: Any, pull: Any, cotangents: Any) -> Any:
            return jax.tree.map(lambda s, g: s + g.astype(s.dtype), sums, pull(cotangents)[0])

        def pull_kept(sums: Any, pull: Any, copies: Any, cotangents: Any) -> Any:
            return add(sums, _with(pull, copies), cotangents)

        def pull_back(sums: Any, pull: Any, copies: Any, chunk: Any, place: Any, cotangents: Any) -> tuple[Any, Array]:
            if pull is None:
                _, pull = jax.vjp(lambda copies: encode(copies, chunk, place), copies)
            # The second result is there to be waited for; the sums are given away to the next chunk. A result that
            # is an argument would be ready at once.
            return add(sums, _with(pull, (copies, chunk)), cotangents), place[1] + 1

        def join(chunks: list[Any]) -> Any:
            return devices.run(lambda device, none, chunks, shared: _concatenate(chunks), None, chunks, None)

        def cut(cotangents: Any, start: Array, size: int) -> Any:
            def own(device: Array | int, none: None, rows: Any, start: Array) -> Any:
                return jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, start, size), rows)

            return devices.run(own, None, cotangents, start)

        self.encode = jax.jit(encode)
        self.encode_keeping = jax.jit(encode_keeping)
        self.encode_keeping_names = jax.jit(encode_keeping_names)
        self.pull_kept = jax.jit(pull_kept, donate_argnums=0)
        self.pull_back = jax.jit(pull_back, donate_argnums=0)
        self.join = jax.jit(join)
        self.cut = jax.jit(cut, static_argnums=2)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Given:
    """Stands for one of the arrays that will be there anyway; results of a compiled function would be copies."""

    number: int


def _without(pull: Any, arrays: Any) -> Any:
    """A function with arrays in it, but for these."""
    numbers = {id(array): number for number, array in enumerate(jax.tree.leaves(arrays))}
    return jax.tree.map(lambda a: _Given(numbers[id(a)]) if id(a) in numbers else a, pull)


def _with(pull: Any, arrays: Any) -> Any:
    """The function again."""
    given = jax.tree.leaves(arrays)
    return jax.tree.map(
        lambda a: given[a.number] if isinstance(a, _Given) else a, pull, is_leaf=lambda a: isinstance(a, _Given)
    )


def _concatenate(chunks: list[Any]) -> Any:
    return jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *chunks)


class _Passes:
    """Both passes of one tower over one batch."""

    def __init__(self, stages: _Stages, devices: Devices, copies: Any, entry: Any, rng: Array | None) -> None:
        tower = stages.tower
        self._stages, self._devices, self._copies, self._rng, self._entry = stages, devices, copies, rng, entry
        rows = entry.rows if isinstance(entry, Replay) else leading_rows(tower.name, entry)
        whole = rows * devices.count // devices.local_count
        self._layout = make_layout(tower.name, whole, tower.chunk_size, devices.count)
        self._keep = min(tower.keep, self._layout.count)
        self._pulls: list[Any] = []

    def encode(self) -> Any:
        """The features of the whole entry."""
        chunks: list[Any] = []

        def one(number: int, chunk: Any) -> Any:
            features, pull = self._encode(number, chunk)
            chunks.append(features)
            self._pulls.append(pull)
            return features

        self._stream(range(self._layout.count), one)
        return self._stages.join(chunks)

    def pull_back(self, sums: Any, cotangents: Any) -> Any:
        """Adds this tower's gradients to `sums`, which are given away."""
        for number in range(self._keep):
            sums = self._stages.pull_kept(sums, self._pulls.pop(0), self._copies, self._cut(cotangents, number))

        def one(number: int, chunk: Any) -> Any:
            nonlocal sums
            arguments = self._copies, chunk, self._place(number), self._cut(cotangents, number)
            sums, done = self._stages.pull_back(sums, self._pulls.pop(0), *arguments)
            return done

        self._stream(range(self._keep, self._layout.count), one)
        return sums

    def _encode(self, number: int, chunk: Any) -> tuple[Any, Any]:
        """The features of a chunk, and the pull back to the parameters from what is kept of it, None for nothing."""
        arguments = self._copies, chunk, self._place(number)
        if number < self._keep:
            return self._stages.encode_keeping(*arguments)
        if self._stages.tower.keep_names:
            return self._stages.encode_keeping_names(*arguments)
        return self._stages.encode(*arguments), None

    def _stream(self, numbers: range, compute: Callable[[int, Any], Any]) -> None:
        """`compute(number, chunk)` for every chunk, with the next one on its way to the device.

        Work is enqueued faster than it is done, so without the wait all chunks would be put at once. Waiting for the
        chunk before leaves one computation running, and at most three chunks on the device.
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
        span = self._layout.span(number)
        if not isinstance(self._entry, Replay):
            return self._devices.put(self._entry, span)
        rows = self._devices.local_count * (span.stop - span.start)
        name, chunk = self._stages.tower.name, self._entry.load(number)
        if (got := leading_rows(name, chunk)) != rows:
            raise ValueError(f"expected {rows} rows from load({number}) of batch entry {name!r}, got {got}")
        return self._devices.put(chunk)

    def _place(self, number: int) -> tuple[Array | None, np.int32, np.int32]:
        return self._rng, np.int32(number), np.int32(self._layout.count)

    def _cut(self, cotangents: Any, number: int) -> Any:
        span = self._layout.span(number)
        return self._stages.cut(cotangents, np.int32(span.start), span.stop - span.start)
