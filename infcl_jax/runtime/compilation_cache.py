"""Persistent compilation cache of the commands, with atomic writes."""

import hashlib
import platform
import tempfile
from collections.abc import Callable
from pathlib import Path

import jax
import jaxlib
from jax.experimental.compilation_cache import compilation_cache as jax_cache

from infcl_jax.runtime.user_cache import user_cache

_OFF = ("off", "")
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
    if setting in _OFF:
        _set_jax_folder(None)
    elif (reason := _install_atomic_writes()) is not None:
        say(f"compilation_cache is ignored: {reason}")
    elif setting is not None:
        _use_host_folder(Path(setting))
    elif _folder_unset() and jax.process_count() == 1:
        try:
            _use_host_folder(user_cache() / "compiled")
        except ValueError as error:  # the default folder is optional, so its errors do not stop the run
            say(f"no compilation cache: {error}")


def _install_atomic_writes() -> str | None:
    """Make JAX's cache write atomically; return the reason if it cannot."""
    try:
        from infcl_jax.runtime.atomic_cache import install
    except (ImportError, AttributeError) as error:  # names that a JAX version lacks
        return f"its writes would not be atomic with JAX {jax.__version__} ({error}); set JAX_COMPILATION_CACHE_DIR"
    install()
    return None


def _folder_unset() -> bool:
    """Return whether JAX's cache is enabled but has no folder."""
    return jax.config.jax_enable_compilation_cache and not jax.config.jax_compilation_cache_dir


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
    """Set JAX's cache folder to this host's subfolder of `parent`.

    Raises:
      ValueError: the subfolder is not writable.
    """
    try:
        folder = parent.expanduser() / host_key()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            _set_jax_folder(folder)
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
