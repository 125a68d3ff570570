"""Features of a frozen teacher for the batches of a training step."""

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from infcl_jax.grad_cache.chunks import CachedEncoder, Devices, leading_rows, make_layout
from infcl_jax.grad_cache.device import encode_batch
from infcl_jax.models import CLIP, TextPair
from infcl_jax.models.clip import normalize_image, row_shapes
from infcl_jax.ops.color import adjusted
from infcl_jax.ops.packing import PackedTokens
from infcl_jax.runtime.mesh import replicate
from infcl_jax.training.frozen import frozen_encoder, tower_variables
from infcl_jax.training.grad_cache import GradCacheConfig
from infcl_jax.training.state import TrainState
from infcl_jax.training.step import Metrics, TrainStep

# inputs of the encoders -> their features
Encode = Callable[[Mapping[str, Any]], dict[str, Any]]


def with_teacher(
    step: TrainStep,
    model: CLIP | TextPair,
    variables: Any,
    mesh: Mesh,
    cache: GradCacheConfig,
    padded: Collection[str] = (),
) -> TrainStep:
    """Return a step that adds the features of a teacher to its batch.

    The teacher sees the pixels of the student, after augmentation, in the chunks of gradient caching. Images of another
    size than its own are resized on the device (bicubic, antialiased). It reads its own token ids, such as
    "teacher_text", or else the student's. Features have no gradient, so their activations are freed layer by
    layer.

    Args:
      step: training step with a loss that reads features of a teacher.
      model: teacher.
      variables: its variables on the host.
      mesh: devices over which the batch is sharded.
      cache: gradient caching of the step.
      padded: text encoders of the teacher that cannot encode texts packed for the student.
    """

    @functools.cache
    def encoder() -> Encode:  # at the first step: a finished run needs no variables on the devices
        create = _device_encoder if cache.offload == "none" else _host_encoder
        return create(model, variables, mesh, cache)

    def with_features(state: TrainState, batch: Mapping[str, Any]) -> tuple[TrainState, Metrics]:
        rows = {name: batch.get(f"teacher_{name}", batch[name]) for name in row_shapes(model, 1)}
        rows |= {name: rows[name].tokens for name in padded if isinstance(rows[name], PackedTokens)}
        features = encoder()(rows)
        return step(state, {**batch, **{f"teacher_{name}": rows for name, rows in features.items()}})

    return with_features


def _device_encoder(model: CLIP | TextPair, variables: Any, mesh: Mesh, cache: GradCacheConfig) -> Encode:
    """Make one compiled function of a batch on the devices."""
    sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    devices = Devices(None if mesh.size == 1 else sharding)

    def tower(name: str, variables: Any, entry: Any) -> jax.Array:
        def encode(params: Any, chunk: Any, key: jax.Array | None) -> jax.Array:
            return encode_tower(model, params[1], name, chunk)

        rows = leading_rows(name, entry)
        chunk_size = min(rows, cache.chunk_of(name) or rows)
        encoder = CachedEncoder(name, 0, encode, chunk_size, keep=0, keep_names=(), frozen=True)
        return encode_batch(encoder, devices, (), entry, None, variables)

    @functools.partial(jax.jit, out_shardings=sharding)
    def encode(variables: Any, batch: Mapping[str, Any]) -> dict[str, jax.Array]:
        return {name: tower(name, variables, entry) for name, entry in batch.items()}

    return functools.partial(encode, replicate(mesh, variables))


def _host_encoder(model: CLIP | TextPair, variables: Any, mesh: Mesh, cache: GradCacheConfig) -> Encode:
    """Make a function that passes this process's rows to the devices chunk by chunk."""
    devices = mesh.local_devices

    def apply(variables: Any, rows: Any, method: str) -> jax.Array:
        return encode_tower(model, variables, method.removeprefix("encode_"), rows)

    names = row_shapes(model, 1)
    encoders = {name: frozen_encoder(apply, tower_variables(variables, name), name, devices) for name in names}

    def tower(name: str, entry: Any) -> np.ndarray:
        count, size = leading_rows(name, entry), cache.chunk_of(name)
        layout = make_layout(name, count, count if size is None else size // mesh.size * len(devices), len(devices))
        features = [encoders[name](_chunk(entry, layout.chunk_slice(n), len(devices))) for n in range(layout.count)]
        return np.concatenate([a.reshape(len(devices), -1, a.shape[1]) for a in features], 1).reshape(count, -1)

    return lambda batch: {name: tower(name, entry) for name, entry in batch.items()}


def _chunk(entry: Any, rows: slice, devices: int) -> Any:
    """Slice the rows of each device's block."""
    return jax.tree.map(lambda a: a.reshape(devices, -1, *a.shape[1:])[:, rows].reshape(-1, *a.shape[1:]), entry)


def encode_tower(model: CLIP | TextPair, variables: Any, name: str, rows: Any) -> jax.Array:
    """Encode images of any side, `ColorBatch` or token ids of another model's batch as `[b, Dt]`."""
    if not isinstance(model, CLIP) or name == "text":
        return cast(jax.Array, model.apply(variables, rows, method=f"encode_{name}"))
    pixels, side = adjusted(rows), model.visual.image_size  # type: ignore[attr-defined]
    if pixels.shape[1:3] != (side, side):
        resized = jax.image.resize(pixels.astype(jnp.float32), (len(pixels), side, side, 3), "bicubic", antialias=True)
        pixels = normalize_image(jnp.clip(resized, 0.0, 255.0), model.image_mean, model.image_std)
    return cast(jax.Array, model.apply(variables, pixels, method="encode_image"))
