"""Batches that are read twice, chunk by chunk, so that no memory holds them."""

from typing import Protocol

import numpy as np
from jax.sharding import Mesh

from infcl_jax.grad_cache import Replay


class Reader(Protocol):
    """One process-local batch, such as `infcl_jax.data.BatchReader`."""

    @property
    def rows(self) -> int:
        """How many there are."""

    def read(self, spans: list[slice]) -> dict[str, np.ndarray]:
        """The rows of some spans, one after the other; the same whenever asked."""


def replayed(reader: Reader, chunk_size: int, mesh: Mesh) -> dict[str, Replay]:
    """Images and texts of a batch as entries for `infcl_jax.cached_value_and_grad`.

    Images are read in each pass. Their texts, which are small, stay in memory from the first one.

    Args:
      reader: of this process's rows, of which each of its devices has a block.
      chunk_size: rows encoded at once, over all devices.
      mesh: all devices.
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
