"""Persistent compilation cache of the commands, with atomic writes."""

import functools
import hashlib
import platform
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jaxlib
from jax.experimental.compilation_cache import compilation_cache as jax_cache

from infcl_jax.runtime.file_io import make_writable, user_cache

_CPU_INFO = Path("/proc/cpuinfo")
# Fields that decide which instructions LLVM generates for the host: x86's names, then ARM's.
_CPU_FIELDS = frozenset(
    ("model name", "cpu family", "model", "flags", "CPU implementer", "CPU architecture", "CPU part", "Features")
)


def enable(setting: str | None, say: Callable[[str], None]) -> None:
    """Enable JAX's persistent compilation cache, with atomic writes.

    Runs of several processes have no cache by default. On GPUs, XLA shares autotuning results among the processes that
    compile a program, so a cache hit on one process leaves the others waiting. Hosts with separate home directories
    would differ at every start, because only process 0 writes.

    Args:
      setting: parent folder. None: JAX's own setting (`JAX_COMPILATION_CACHE_DIR`), or else the user's cache folder.
        "off" or "": no cache.
      say: function that prints a warning line if the cache stays off.

    Raises:
      ValueError: the given folder is not writable.
    """
    if setting in ("off", ""):
        _set_jax_folder(None)
        return
    try:
        file_cache()
    except (ImportError, AttributeError) as error:  # names that a JAX version lacks
        reason = f"its writes would not be atomic with JAX {jax.__version__} ({error}); set JAX_COMPILATION_CACHE_DIR"
        say(f"compilation_cache is ignored: {reason}")
        return
    if setting is not None:
        _use_host_folder(Path(setting))
    elif (
        jax.config.jax_enable_compilation_cache
        and not jax.config.jax_compilation_cache_dir
        and jax.process_count() == 1
    ):
        try:
            _use_host_folder(user_cache() / "compiled")
        except ValueError as error:  # the default folder is optional, so its errors do not stop the run
            say(f"no compilation cache: {error}")


@functools.cache
def file_cache() -> Any:
    """Return the class of JAX's file cache, and make its writes atomic.

    JAX 0.11.2 writes an entry in place (`LRUCache.put`: open, truncate, write). It locks only with
    `jax_compilation_cache_max_size`, for which it needs the package filelock. Three things go wrong without the lock:
      - Readers see torn entries. With two writers of a 4 MB entry, 91 % of reads were torn (2 cores, 2026-11-23).
      - Two writers interleave in one file.
      - A killed writer leaves its torn entry forever, because `put` skips an existing file.
    Up to Python 3.13, zlib's checksum turns a torn entry into a warning and a compilation. From 3.14 on JAX compresses
    with zstd, without a checksum. Here JAX writes to a temporary folder and a rename makes the entry visible, so that
    each write is atomic, and the last writer replaces a torn entry. XLA's autotuning cache in the same folder renames
    as well.

    JAX has no public way to replace the writes of its cache. The private name is checked with JAX 0.11.2 and 0.12.0.1.
    """
    from jax._src.compilation_cache import LRUCache

    put = LRUCache.put

    def put_atomically(cache: Any, key: str, value: bytes) -> None:
        if cache.eviction_enabled or "://" in str(cache.path):  # JAX's lock, or an object store with atomic writes
            put(cache, key, value)
            return
        temporary = cache.path / f".{uuid.uuid4().hex}"
        try:
            put(LRUCache(str(temporary), max_size=-1), key, value)
            for entry in temporary.iterdir():
                entry.replace(cache.path / entry.name)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    LRUCache.put = put_atomically  # type: ignore[assignment]
    return LRUCache


def host_key() -> str:
    """Return the cache subfolder of this platform, jaxlib, process count and CPU.

    XLA:CPU programs are machine code for one CPU model. Another model that shares the home directory may raise SIGILL.
    """
    cpu = hashlib.sha256(_cpu().encode()).hexdigest()[:12]
    return f"{jax.default_backend()}-jaxlib{jaxlib.__version__}-{jax.process_count()}p-{cpu}"


def _cpu() -> str:
    """Return architecture, model and instruction sets of the host's CPU."""
    try:
        first, _, _ = _CPU_INFO.read_text().partition("\n\n")
    except OSError:  # not Linux
        return f"{platform.machine()} {platform.processor()} {platform.platform()}"
    fields = (line.partition(":") for line in first.splitlines())
    return "\n".join([platform.machine(), *(f"{n.strip()}:{v}" for n, _, v in fields if n.strip() in _CPU_FIELDS)])


def _use_host_folder(parent: Path) -> None:
    """Set JAX's cache folder to this host's subfolder of `parent`, which must be writable."""
    try:
        _set_jax_folder(make_writable(parent.expanduser() / host_key()))
        # JAX leaves out programs that compile in less than a second. A run starts with more than a hundred of these.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    except (OSError, RuntimeError) as error:  # RuntimeError: no home directory
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise ValueError(
            f"expected compilation_cache to be a folder that can be written to, got {parent} ({reason}); "
            "choose another folder, or 'off'"
        ) from error


def _set_jax_folder(folder: Path | None) -> None:
    jax.config.update("jax_compilation_cache_dir", None if folder is None else str(folder))
    jax_cache.reset_cache()  # JAX reads its cache folder only once
