"""Features of a frozen teacher for the batches of a training step."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from infcl_jax.models import CLIP, TOWERS
from infcl_jax.models.clip import normalize_image
from infcl_jax.ops.color import adjusted
from infcl_jax.runtime.mesh import replicate
from infcl_jax.training.frozen import frozen_encoder, tower_variables
from infcl_jax.training.state import TrainState
from infcl_jax.training.step import Metrics, TrainStep


@dataclasses.dataclass(frozen=True, eq=False)
class TeacherTowers:
    """Towers of a teacher on the devices of a run.

    The teacher sees the pixels of the student, after augmentation. Images of another size than its own are resized on
    the device (bicubic, antialiased). Features have no gradient, so their activations are freed layer by layer.

    Attributes:
      model: teacher.
      variables: its variables on the host.
      mesh: devices over which the batch is sharded.
      chunk_size: pairs encoded at once, over all devices; None: the whole batch.
      on_device: whether batches are on the devices; otherwise they are this process's NumPy arrays.
    """

    model: CLIP
    variables: Any
    mesh: Mesh
    chunk_size: int | None = None
    on_device: bool = True

    def with_features(self, step: TrainStep) -> TrainStep:
        """Return a step that adds the teacher's features to its batch.

        A batch may have "teacher_text", the teacher's token ids; otherwise the teacher reads "text".
        """

        @functools.cache
        def encoder() -> Callable:  # at the first step: a finished run needs no variables on the devices
            return self._encode_on_devices() if self.on_device else self._encode_from_host()

        def distilled(state: TrainState, batch: Mapping[str, Any]) -> tuple[TrainState, Metrics]:
            image, text = encoder()(batch["image"], batch.get("teacher_text", batch["text"]))
            return step(state, {**batch, "teacher_image": image, "teacher_text": text})

        return distilled

    def _encode_on_devices(self) -> Callable[[Any, jax.Array], tuple[jax.Array, jax.Array]]:
        """Make one compiled function of a batch."""
        variables = replicate(self.mesh, self.variables)
        rows = NamedSharding(self.mesh, PartitionSpec(self.mesh.axis_names))

        @functools.partial(jax.jit, out_shardings=rows)
        def encode(variables: Any, image: Any, text: jax.Array) -> tuple[jax.Array, jax.Array]:
            with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
                images = self._in_chunks(functools.partial(encode_tower, self.model, variables, "image"), image)
                texts = self._in_chunks(functools.partial(encode_tower, self.model, variables, "text"), text)
            return images, texts

        return functools.partial(encode, variables)

    def _in_chunks(self, encode: Callable[[Any], jax.Array], rows: Any) -> jax.Array:
        """Encode a sharded batch chunk by chunk.

        A chunk has the same rows of every device's block.
        """
        devices, axes = self.mesh.size, self.mesh.axis_names
        block = len(jax.tree.leaves(rows)[0]) // devices
        shard = block if self.chunk_size is None else min(block, self.chunk_size // devices)
        if shard == block:
            return encode(rows)
        chunks, rest = divmod(block, shard)

        def split(array: jax.Array) -> jax.Array:
            """Reshape to [chunks, devices * shard, ...] without communication."""
            array = array.reshape(devices, block, *array.shape[1:])[:, : chunks * shard]
            array = jnp.moveaxis(array.reshape(devices, chunks, shard, *array.shape[2:]), 1, 0)
            array = array.reshape(chunks, devices * shard, *array.shape[3:])
            return lax.with_sharding_constraint(array, NamedSharding(self.mesh, PartitionSpec(None, axes)))

        def last(array: jax.Array) -> jax.Array:
            array = array.reshape(devices, block, *array.shape[1:])[:, chunks * shard :]
            array = array.reshape(devices * rest, *array.shape[2:])
            return lax.with_sharding_constraint(array, NamedSharding(self.mesh, PartitionSpec(axes)))

        features = lax.map(encode, jax.tree.map(split, rows))
        blocks = jnp.moveaxis(features.reshape(chunks, devices, shard, -1), 1, 0).reshape(devices, chunks * shard, -1)
        if rest:
            tail = encode(jax.tree.map(last, rows)).reshape(devices, rest, -1)
            blocks = jnp.concatenate([blocks, tail], axis=1)
        return blocks.reshape(devices * block, -1)

    def _encode_from_host(self) -> Callable[[Any, np.ndarray], tuple[np.ndarray, np.ndarray]]:
        """Make a function that passes this process's rows to the devices chunk by chunk."""
        devices, scope = self.mesh.local_devices, self.mesh.size

        def apply(variables: Any, rows: Any, method: str) -> jax.Array:
            return encode_tower(self.model, variables, method.removeprefix("encode_"), rows)

        encoders = {
            name: frozen_encoder(apply, tower_variables(self.variables, name), name, devices) for name in TOWERS
        }

        def encode(image: Any, text: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            rows = len(text) if self.chunk_size is None else self.chunk_size // scope * len(devices)

            def tower(name: str, entry: Any) -> np.ndarray:
                chunks = [jax.tree.map(lambda a, i=i: a[i : i + rows], entry) for i in range(0, len(text), rows)]
                return np.concatenate([encoders[name](chunk) for chunk in chunks])

            return tower("image", image), tower("text", text)

        return encode


def encode_tower(model: CLIP, variables: Any, name: str, rows: Any) -> jax.Array:
    """Encode images or texts of another model's batch.

    Args:
      model: teacher.
      variables: its variables.
      name: tower, "image" or "text".
      rows: uint8 images `[b, S, S, 3]` of any side, `ColorBatch`, or token ids `[b, L]`.

    Returns:
      `[b, Dt]`, L2-normalized, in the model's feature dtype.
    """
    if name == "text":
        return cast(jax.Array, model.apply(variables, rows, method="encode_text"))
    pixels, side = adjusted(rows), model.visual.image_size  # type: ignore[attr-defined]
    if pixels.shape[1:3] != (side, side):
        resized = jax.image.resize(pixels.astype(jnp.float32), (len(pixels), side, side, 3), "bicubic", antialias=True)
        pixels = normalize_image(jnp.clip(resized, 0.0, 255.0), model.image_mean, model.image_std)
    return cast(jax.Array, model.apply(variables, pixels, method="encode_image"))
