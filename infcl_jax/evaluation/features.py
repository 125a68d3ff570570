"""Image and text features of a whole split, encoded on a mesh."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from infcl_jax.distributed import shard_batch, to_host

Encode = Callable[[Any, jax.Array], jax.Array]
Batch = Mapping[str, np.ndarray]

_BATCH_KEYS = ("image", "text", "label", "index", "mask")


@dataclasses.dataclass(frozen=True, eq=False)
class Features:
    """Features of the N samples of a split, in host memory.

    Row i of every field belongs to the same sample.

    Attributes:
        image: float32 [N, D], image features.
        text: float32 [N, D], text features.
        label: int32 [N], class of the sample, -1 without class.
        index: int64 [N], index of the sample in its source, ascending.
    """

    image: np.ndarray
    text: np.ndarray
    label: np.ndarray
    index: np.ndarray

    def __len__(self) -> int:
        """Number of samples N."""
        return len(self.index)


def encode_split(
    encode_image: Encode, encode_text: Encode, params: Any, batches: Iterable[Batch], mesh: Mesh
) -> Features:
    """Encode a split on all devices of a mesh.

    Encoders are compiled once per function object and batch shape, so pass the same two functions at every evaluation
    of a run. Every process must call this function with the same number of batches of the same local size. A batch that
    does not fill the devices, or is shorter than an earlier batch, is padded. The result contains no padding.

    Args:
        encode_image: `encode_image(params, image [b, H, W, 3]) -> [b, D]`, any float dtype.
        encode_text: `encode_text(params, text [b, L]) -> [b, D]`, any float dtype.
        params: parameters of the encoders, on `mesh` (see `infcl_jax.distributed.replicate`).
        batches: process-local batches with `image` uint8 [b, H, W, 3], `text` int32 [b, L], `label` int32 [b],
            `index` int64 [b] and `mask` bool [b], False for padding.
        mesh: mesh with an axis "data", over which the batch is sharded.

    Returns:
        Features of the rows with a true mask, on every process. They are sorted by `index`, so the order does not
        depend on the number of processes.

    Raises:
        ValueError: there is no batch, no row with a true mask, a missing field, fields of different lengths, or an
            encoder with an output that is not [b, D].
    """
    batches_on_host: list[dict[str, np.ndarray]] = []
    pending: dict[str, jax.Array] | None = None
    rows = 0
    for batch in batches:
        rows = max(rows, _padded_rows(batch, mesh))
        device = shard_batch(mesh, _device_fields(batch, rows))
        image = encode_sharded(encode_image, mesh, params, device.pop("image"))
        text = encode_sharded(encode_text, mesh, params, device.pop("text"))
        # Collecting the previous batch overlaps host copies and the input pipeline with device computation.
        if pending is not None:
            batches_on_host.append(_collect(pending))
        pending = {"image": image, "text": text, **device}
    if pending is None:
        raise ValueError("expected at least one evaluation batch, got none; check the split and the batch size")
    batches_on_host.append(_collect(pending))
    return _join(batches_on_host)


@functools.partial(jax.jit, static_argnums=(0, 1))
def encode_sharded(encode: Encode, mesh: Mesh, params: Any, inputs: jax.Array) -> jax.Array:
    """Encode a batch sharded over the axis "data" of `mesh`.

    Args:
        encode: encoder `encode(params, inputs) -> [b, D]`.
        mesh: mesh with an axis "data".
        params: parameters of the encoder; replicated inside.
        inputs: [b, ...], sharded over "data".

    Returns:
        float32 [b, D] with the sharding of `inputs`.

    Raises:
        ValueError: the output of the encoder is not [b, D].
    """
    features = encode(jax.lax.with_sharding_constraint(params, NamedSharding(mesh, P())), inputs)
    if features.ndim != 2 or features.shape[0] != inputs.shape[0]:
        raise ValueError(
            f"expected an encoder that maps {inputs.shape} to [{inputs.shape[0]}, D], got an output of shape "
            f"{features.shape}; pool and project the features inside the encoder"
        )
    return jax.lax.with_sharding_constraint(features.astype(jnp.float32), NamedSharding(mesh, P("data")))


def shard_rows(mesh: Mesh, array: np.ndarray, *, fill: float = 0, multiple: int = 1) -> jax.Array:
    """Pad and shard the rows of a host array.

    Args:
        mesh: mesh with an axis "data".
        array: [n, ...], the same on every process.
        fill: value of the padding rows.
        multiple: the rows on each device become a multiple of this number.

    Returns:
        Global array [m, ...] sharded over "data"; m is n rounded up to a multiple of `mesh.size * multiple`.
    """
    padded = pad_rows(array, -(-len(array) // (mesh.size * multiple)) * mesh.size * multiple, fill=fill)
    return jax.make_array_from_callback(padded.shape, NamedSharding(mesh, P("data")), lambda block: padded[block])


def pad_rows(array: np.ndarray, rows: int, *, fill: float = 0) -> np.ndarray:
    """Pad an array along its first axis.

    Args:
        array: [n, ...].
        rows: number of rows of the result, >= n.
        fill: value of the padding rows.

    Returns:
        [rows, ...] with the dtype of `array`; `array` itself if it has `rows` rows.
    """
    if len(array) == rows:
        return array
    tail = np.full((rows - len(array), *array.shape[1:]), fill, array.dtype)
    return np.concatenate([array, tail])


def l2_normalize(features: np.ndarray) -> np.ndarray:
    """Normalize vectors along the last axis to unit length, as float32.

    Zero vectors stay zero. Infinite entries become NaN.
    """
    wide = np.asarray(features, np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        norm = np.linalg.norm(wide, axis=-1, keepdims=True)
        return (wide / np.where(norm == 0, 1.0, norm)).astype(np.float32)


def _padded_rows(batch: Batch, mesh: Mesh) -> int:
    """Validate a batch and return its padded length.

    The padded length is a multiple of the number of local devices.
    """
    missing = [key for key in _BATCH_KEYS if key not in batch]
    if missing:
        raise ValueError(f"expected evaluation batches with {_BATCH_KEYS}, got one without {missing}; use eval_batches")
    lengths = {key: len(batch[key]) for key in _BATCH_KEYS}
    if len(set(lengths.values())) != 1:
        raise ValueError(f"expected one length for all fields of an evaluation batch, got {lengths}")
    devices = len(mesh.local_devices)
    return -(-lengths["mask"] // devices) * devices


def _device_fields(batch: Batch, rows: int) -> dict[str, np.ndarray]:
    """Pad the fields to `rows` rows; the index becomes int32 words."""
    # JAX without x64 truncates int64 to int32. Two 32-bit words per row represent any index exactly.
    words = np.ascontiguousarray(batch["index"], np.int64).view(np.int32).reshape(-1, 2)
    fields = {
        "image": np.asarray(batch["image"]),
        "text": np.asarray(batch["text"]),
        "label": np.asarray(batch["label"], np.int32),
        "index": words,
        "mask": np.asarray(batch["mask"], np.bool_),
    }
    return {key: pad_rows(value, rows) for key, value in fields.items()}


def _collect(device: dict[str, jax.Array]) -> dict[str, np.ndarray]:
    """Gather a batch on every host and drop its padding."""
    host = to_host(device)
    keep = np.asarray(host.pop("mask"))
    host["index"] = np.ascontiguousarray(host["index"]).view(np.int64).reshape(-1)
    return {key: value[keep] for key, value in host.items()}


def _join(batches: list[dict[str, np.ndarray]]) -> Features:
    """Concatenate batches and sort the rows by sample index."""
    fields = {key: np.concatenate([batch[key] for batch in batches]) for key in batches[0]}
    if len(fields["index"]) == 0:
        raise ValueError("expected at least one sample in the split, got only padding (every mask is False)")
    order = np.argsort(fields["index"], kind="stable")
    return Features(**{key: value[order] for key, value in fields.items()})
