"""Settings of gradient caching, and batches that each of its passes reads."""

import dataclasses
from collections.abc import Callable, Collection
from typing import Any, Protocol

import numpy as np
from jax.sharding import Mesh

from infcl_jax.grad_cache import OFFLOADS, Replay
from infcl_jax.models import RESIDUAL
from infcl_jax.ops.color import with_colors
from infcl_jax.schema import Range, Section, setting
from infcl_jax.training.frozen import PrecomputedFeatures

BATCH_OFFLOADS = (*OFFLOADS, "replay")
KEEP_MOST = -1  # value of `keep`: the planner stores as many chunks as fit


@dataclasses.dataclass(frozen=True, kw_only=True)
class GradCacheConfig(Section, prefix="grad_cache."):
    """Settings of gradient caching (`infcl_jax.cached_value_and_grad`).

    `infcl_jax.cached_value_and_grad` describes the memory that `keep` costs. With `keep_residual` the other chunks
    store the residual streams of their transformers, from which the second pass recomputes the remaining activations.
    The batch is stored in device memory ("none"), in host memory and copied chunk by chunk ("host"), or not at all
    ("replay", see `replayed`).

    Examples:
      >>> cache = GradCacheConfig(chunk_size=1024, keep=2, offload="host")

    Raises:
      ValueError: a value is out of range, or has no effect without caching.
    """

    chunk_size: int | None = setting(
        None, "pairs encoded at a time, over all devices; None: no gradient caching", Range(1)
    )
    passage_chunk_size: int | None = setting(
        None,
        "passages of text retrieval encoded at a time, over all devices; None: as many as queries, "
        "grad_cache.chunk_size",
        Range(1),
    )
    keep: int = setting(
        0, "number of chunks whose activations are stored instead of recomputed; -1: as many as fit", Range(KEEP_MOST)
    )
    keep_residual: bool = setting(
        False, "store the residual streams of the other chunks; keep = -1 turns this on unless all chunks fit"
    )
    offload: str = setting(
        "none",
        'where the batch is stored; "none": on the devices; "host": in host memory; "replay": nowhere, images are read '
        "again in the second pass",
        BATCH_OFFLOADS,
    )

    def check(self) -> None:
        """Check that a change has an effect."""
        changes = {name: value for name, value in self.changes().items() if (name, value) != ("keep", KEEP_MOST)}
        if self.chunk_size is None and changes:
            settings = " and ".join(f"{name}={value!r}" for name, value in changes.items())
            raise ValueError(
                f"expected grad_cache.chunk_size with {settings}, got None, which is training without gradient caching"
            )

    def __str__(self) -> str:
        """Format the settings that differ from their defaults, such as "chunk_size 256, keep 2"."""
        return ", ".join(f"{name} {value}" for name, value in self.changes().items()) or "no gradient caching"

    def changes(self, base: "GradCacheConfig | None" = None) -> dict[str, Any]:
        """Return the settings that differ from `base`; None: from the defaults."""
        old = dataclasses.asdict(base) if base else {field.name: field.default for field in dataclasses.fields(self)}
        return {name: value for name, value in dataclasses.asdict(self).items() if value != old[name]}

    def check_batch(self, batch_size: int, devices: int) -> None:
        """Check that chunks fit the batch and divide among the devices.

        Args:
          batch_size: global batch size.
          devices: number of devices over which the batch is sharded.

        Raises:
          ValueError: a chunk is larger than the batch, or not a multiple of the device count.
        """
        if self.chunk_size is None:
            return
        if self.chunk_size > batch_size:
            raise ValueError(
                f"expected grad_cache.chunk_size <= batch_size={batch_size}, got {self.chunk_size}; choose a smaller "
                "chunk, or None for no gradient caching"
            )
        for name in ("chunk_size", "passage_chunk_size"):
            if (size := getattr(self, name)) is not None and size % devices:
                raise ValueError(f"expected grad_cache.{name} to be a multiple of the {devices} devices, got {size}")

    def chunk_of(self, name: str) -> int | None:
        """Return the rows of a chunk of an encoder such as "image" or "passage", over all devices."""
        return (self.passage_chunk_size if name == "passage" else None) or self.chunk_size

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of `infcl_jax.cached_value_and_grad`.

        Raises:
          ValueError: `keep` is -1, which only the planner resolves.
        """
        if self.keep < 0:
            raise ValueError(f"expected grad_cache.keep >= 0, got {self.keep}")
        return {
            "chunk_size": self.chunk_size,
            "keep": self.keep,
            "keep_names": (RESIDUAL,) if self.keep_residual else (),
            "offload": "none" if self.offload == "none" else "host",
        }


NO_CACHE = GradCacheConfig()


class Reader(Protocol):
    """Reader of one process-local batch, such as `infcl_jax.data.BatchReader`."""

    @property
    def rows(self) -> int:
        """Number of rows of the process-local batch."""

    def read(self, spans: list[slice]) -> dict[str, np.ndarray]:
        """Read the concatenated rows of slices; repeated reads return the same rows."""


def replayed(
    reader: Reader,
    chunk_size: int,
    mesh: Mesh,
    precomputed: Collection[str] = (),
    pack: Callable[[dict[str, Any]], dict[str, Any]] = dict,
) -> dict[str, Replay]:
    """Make a batch for `cached_value_and_grad` that reads chunks on demand.

    Images are read again in each pass. Texts are small and stay in host memory after the first read. A chunk whose
    texts do not fit in their rows is padded.

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
      pack: function that packs the texts of a chunk, such as an `infcl_jax.data.packing.TextPacker`.

    Returns:
      `{"image": Replay, "text": Replay}`.
    """
    devices, shard_rows = mesh.local_mesh.size, chunk_size // mesh.size  # rows of a chunk on one device
    block_rows = reader.rows // devices
    tokens: dict[int, np.ndarray] = {}  # by chunk number
    texts: dict[int, Any] = {}

    def read(number: int) -> dict[str, np.ndarray]:
        """Read a chunk: the same rows of every device's block."""
        start, stop = number * shard_rows, min((number + 1) * shard_rows, block_rows)
        chunk = reader.read([slice(d * block_rows + start, d * block_rows + stop) for d in range(devices)])
        tokens[number] = chunk["text"]
        return chunk

    def load_text(number: int) -> Any:
        if number not in texts:
            text = tokens.pop(number) if number in tokens else read(number)["text"]
            text = pack({"text": text})["text"]
            texts[number] = PrecomputedFeatures(text) if "text" in precomputed else text
        return texts[number]

    def load_image(number: int) -> Any:
        chunk = read(number)
        return PrecomputedFeatures(chunk["image"]) if "image" in precomputed else with_colors(chunk)

    return {"image": Replay(reader.rows, load_image), "text": Replay(reader.rows, load_text)}
