"""Batches read chunk by chunk in each gradient-cache pass instead of stored."""

from typing import Protocol

import numpy as np
from jax.sharding import Mesh

from infcl_jax.grad_cache import Replay


class Reader(Protocol):
    """Reader of one process-local batch, such as `infcl_jax.data.BatchReader`."""

    @property
    def rows(self) -> int:
        """Number of rows of the process-local batch."""

    def read(self, spans: list[slice]) -> dict[str, np.ndarray]:
        """Read the concatenated rows of slices; repeated reads return the same rows."""


def replayed(reader: Reader, chunk_size: int, mesh: Mesh) -> dict[str, Replay]:
    """Make replayed images and texts for `infcl_jax.cached_value_and_grad`.

    Images are read again in each pass. Texts are small and stay in host memory after the first pass.

    Args:
      reader: reader of this process's rows. Each local device gets one contiguous block of them.
      chunk_size: rows encoded at once, over all devices.
      mesh: mesh of all devices.

    Returns:
      `{"image": Replay, "text": Replay}`.
    """
    blocks, size = mesh.local_mesh.size, chunk_size // mesh.size
    block = reader.rows // blocks
    texts: dict[int, np.ndarray] = {}

    def read(number: int) -> dict[str, np.ndarray]:
        first, last = number * size, min((number + 1) * size, block)
        batch = reader.read([slice(b * block + first, b * block + last) for b in range(blocks)])
        texts[number] = batch["text"]
        return batch

    def load_text(number: int) -> np.ndarray:
        return texts[number] if number in texts else read(number)["text"]

    return {"image": Replay(reader.rows, lambda number: read(number)["image"]), "text": Replay(reader.rows, load_text)}
