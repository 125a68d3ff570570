"""Settings of gradient caching in a training step."""

import dataclasses
from typing import Any

from infcl_jax.grad_cache import RESIDENCIES
from infcl_jax.models import RESIDUAL
from infcl_jax.ops.common.checks import check_choice

BATCH_RESIDENCIES = (*RESIDENCIES, "replay")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GradCacheConfig:
    """Settings of gradient caching (`infcl_jax.cached_value_and_grad`).

    Examples:
      >>> cache = GradCacheConfig(chunk_size=1024, keep=2, residency="host")

    Attributes:
      chunk_size: pairs whose activations are in memory at a time, over all devices; None: no gradient caching.
      passage_chunk_size: passages of a text retrieval model in memory at a time; None: `chunk_size`, which then counts
        queries and passages alike.
      keep: number of chunks whose activations are stored in the first pass instead of recomputed in the second.
        `infcl_jax.cached_value_and_grad` describes the memory cost.
      keep_residual: whether the other chunks store their transformers' residual streams, from which the second pass
        recomputes the remaining activations.
      residency: where the batch is stored. "device": device memory. "host": host memory, copied to the devices chunk by
        chunk. "replay": not stored; chunks are read again in the second pass (see `replayed`).

    Raises:
      ValueError: a value is out of range, or has no effect without caching.
    """

    chunk_size: int | None = None
    passage_chunk_size: int | None = None
    keep: int = 0
    keep_residual: bool = False
    residency: str = "device"

    def __post_init__(self) -> None:
        check_choice("grad_cache.residency", self.residency, BATCH_RESIDENCIES)
        if self.keep < 0:
            raise ValueError(f"expected grad_cache.keep >= 0, got {self.keep}")
        if self.chunk_size is not None and self.chunk_size < 1:
            raise ValueError(f"expected grad_cache.chunk_size >= 1 or None, got {self.chunk_size}")
        if self.passage_chunk_size is not None and self.passage_chunk_size < 1:
            raise ValueError(f"expected grad_cache.passage_chunk_size >= 1 or None, got {self.passage_chunk_size}")
        if self.chunk_size is None and (changes := self.changes()):
            settings = " and ".join(f"{name}={value!r}" for name, value in changes.items())
            raise ValueError(
                f"expected grad_cache.chunk_size with {settings}, got None, which is training without gradient caching"
            )

    def __str__(self) -> str:
        """Format the settings that differ from their defaults, such as "chunk_size 256, keep 2"."""
        return ", ".join(f"{name} {value}" for name, value in self.changes().items()) or "no gradient caching"

    def changes(self, base: "GradCacheConfig | None" = None) -> dict[str, Any]:
        """Return the settings that differ from `base`; None: from the defaults."""
        # `GradCacheConfig()` as the default would recurse through `__post_init__`.
        old = dataclasses.asdict(base) if base else {f.name: f.default for f in dataclasses.fields(self)}
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
        """Keyword arguments of `infcl_jax.cached_value_and_grad`."""
        return {
            "chunk_size": self.chunk_size,
            "keep": self.keep,
            "keep_names": (RESIDUAL,) if self.keep_residual else (),
            "residency": "device" if self.residency == "device" else "host",
        }


NO_CACHE = GradCacheConfig()
