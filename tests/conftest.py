"""Configure every test: eight CPU devices, strict dtype and rank promotion.

`-m gpu` runs on the GPU.
"""

import collections
import gc
import os
import pathlib
import signal
import tempfile

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jaxtyping import install_import_hook
from signatures import BACKENDS

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_traceback_in_locations_limit", 0)  # smaller programs compile faster

# Typical seconds of tests with a mark.
SECONDS = {"slow": 20, "runs": 1}

# Each compiled program maps memory about ten times. Linux ends a process with more than 65,530 (`vm.max_map_count`).
MEMORY_MAPS = 16_000

# Packages whose tests train whole runs, call commands or start processes.
RUNS = {"experiments", "faults", "grad_cache", "inference", "planner", "run", "runtime", "training", "verification"}

# Checks the shapes in the signatures of ops and models while the tests call them. Public functions raise ValueError for
# bad input, which this must not hide; repository/test_signatures.py checks their signatures against calls.
install_import_hook(BACKENDS, "signatures.checked_backend")


def pytest_configure(config):
    """Choose the platform of this process and its children, unless it is set."""
    # Background jobs of a shell and nohup ignore them, and so would the commands that tests start.
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    chosen = config.option.markexpr
    if chosen == "gpu" or os.environ.get("JAX_PLATFORMS", "cpu") != "cpu":
        # No cache: the commands would write to the user's.
        os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "0"
        jax.config.update("jax_enable_compilation_cache", False)
        return
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it at import, whichever test imports it first
    jax.config.update("jax_platforms", "cpu")
    from infcl_jax.runtime import compilation_cache as cache_settings
    from infcl_jax.runtime import distributed  # after the import hook

    scheduler = "xla_cpu_enable_concurrency_optimized_scheduler"  # as in training
    os.environ["XLA_FLAGS"] += f" --{scheduler}={distributed.XLA_FLAGS[scheduler]}"
    if chosen != "full":  # small programs: compiling them takes longer than running them
        os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0"
    # A cache until the end, for all workers and the processes that they start.
    cache_settings.file_cache()
    if hasattr(config, "workerinput"):  # JAX has read the variables below
        return
    folder = tempfile.TemporaryDirectory(prefix="compiled-")
    config.add_cleanup(folder.cleanup)
    cache = {
        "jax_compilation_cache_dir": folder.name,
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    for name, value in cache.items():
        os.environ[name.upper()] = str(value)
        jax.config.update(name, value)


def pytest_itemcollected(item):
    """Mark the tests of `RUNS`, which `make test` leaves to `make test-runs`."""
    if RUNS.intersection(item.path.relative_to(item.config.rootpath / "tests").parts[:1]):
        item.add_marker(pytest.mark.runs)


@pytest.hookimpl(trylast=True)  # after the choice of marks
def pytest_collection_modifyitems(items):
    """Start the longest files first, so that two workers end together."""
    seconds = collections.Counter()
    for item in items:
        seconds[item.path] += next((s for mark, s in SECONDS.items() if item.get_closest_marker(mark)), 0.2)
    items.sort(key=lambda item: (-seconds[item.path], item.path))


def pytest_collection_finish():
    """Collect garbage less often and skip imported objects: JAX makes many objects, few cycles."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


@pytest.fixture
def compiled_afresh():
    """Disable the compilation cache, so that programs are compiled again."""
    enabled = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", enabled)
    compilation_cache.reset_cache()


@pytest.fixture(autouse=True, scope="module")
def few_memory_maps():
    """Drop the compiled programs after a file that leaves too many; the cache on disk keeps them."""
    yield
    maps = pathlib.Path("/proc/self/maps")  # on Linux
    if maps.exists() and len(maps.read_text().splitlines()) > MEMORY_MAPS:
        jax.clear_caches()
        gc.collect()
