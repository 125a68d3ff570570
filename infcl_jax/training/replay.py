"""Batches read chunk by chunk in each gradient-cache pass instead of stored."""

from collections.abc import Collection
from typing import Any, Protocol

import numpy as np
from jax.sharding import Mesh

from infcl_jax.grad_cache import Replay
from infcl_jax.ops.color import with_colors
from infcl_jax.training.frozen import PrecomputedFeatures


class Reader(Protocol):
    """Reader of one process-local batch, such as `infcl_jax.data.BatchReader`."""

    @property
    def rows(self) -> int:
        """Number of rows of the process-local batch."""

    def read(self, spans: list[slice]) -> dict[str, np.ndarray]:
        """Read the concatenated rows of slices; repeated reads return the same rows."""


def replayed(reader: Reader, chunk_size: int, mesh: Mesh, precomputed: Collection[str] = ()) -> dict[str, Replay]:
    """Make a batch for `cached_value_and_grad` that reads chunks on demand.

    Images are read again in each pass. Texts are small and stay in host memory after the first read.

    Examples:
      >>> source, tokenizer = load_source("photos", "train"), load_tokenizer("bytes", 36)
      >>> data = train_iterator(source, tokenizer=tokenizer, image_size=16, batch_size=8, seed=0, num_workers=0)
      >>> batch = replayed(data.next_reader(), 8, mesh)
      >>> batch["image"].load(0).shape
      (8, 16, 16, 3)
      >>> data.close()

    Args:
      reader: reader of this process's rows. Each local device gets one contiguous block of them.
      chunk_size: rows encoded at once, over all devices; a multiple of the device count.
      mesh: mesh of all devices.
      precomputed: towers, "image" or "text", whose rows are features.

    Returns:
      `{"image": Replay, "text": Replay}`.
    """
    devices, shard_rows = mesh.local_mesh.size, chunk_size // mesh.size  # rows of a chunk on one device
    block_rows = reader.rows // devices
    texts: dict[int, np.ndarray] = {}  # by chunk number

    def read(number: int) -> dict[str, np.ndarray]:
        """Read a chunk: the same rows of every device's block."""
        start, stop = number * shard_rows, min((number + 1) * shard_rows, block_rows)
        chunk = reader.read([slice(d * block_rows + start, d * block_rows + stop) for d in range(devices)])
        texts[number] = chunk["text"]
        return chunk

    def load_text(number: int) -> Any:
        text = texts[number] if number in texts else read(number)["text"]
        return PrecomputedFeatures(text) if "text" in precomputed else text

    def load_image(number: int) -> Any:
        chunk = read(number)
        return PrecomputedFeatures(chunk["image"]) if "image" in precomputed else with_colors(chunk)

    return {"image": Replay(reader.rows, load_image), "text": Replay(reader.rows, load_text)}
