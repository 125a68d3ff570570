"""Worker processes that read data: their start, their function, their shared memory and their loss."""

import atexit
import contextlib
import errno
import functools
import gc
import logging
import multiprocessing
import os
import re
import resource
import signal
import sys
import tempfile
import threading
import uuid
import weakref
from collections.abc import Callable
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import cloudpickle
import grain
from absl import flags

from infcl_jax.data.parallelism import free_host_memory, host_memory, shared_memory_left
from infcl_jax.runtime.exit_codes import ignore_stop

_NAME = "grain-process-prefetch"  # start of the names of grain's worker processes
_UNGUARDED = 97  # exit status of a worker that runs the main script again; no other program uses it
_NO_GUARD = (
    'expected a script with `if __name__ == "__main__":` around its calls, got one that each data worker would run '
    "again; add the guard, or set num_workers=0"
)
_ENDED = re.compile(r"Worker process was terminated unexpectedly with exit code (-?\d+)")  # of grain
_READ_AHEAD = 4  # chunks that a worker reads while others wait: 1 at the queue, 2 in its buffer, 1 that is being read
_GIB = 2**30


class WorkersCannotStart(ValueError):
    """Main script that worker processes cannot import."""


class WorkerLost(ChildProcessError):
    """Unexpected end of a data worker; if it was killed, another start may succeed.

    `chunks_ahead` is the largest number of chunks that the workers read ahead of the missing one.
    """

    def __init__(self, message: str, *, killed: bool, chunks_ahead: int = 0) -> None:
        """Set the message and the attributes."""
        super().__init__(message)
        self.killed, self.chunks_ahead = killed, chunks_ahead


def check_guard() -> None:
    """Check that no process of `multiprocessing` runs the main script again.

    A data worker ends at once. The process that started it raises `WorkersCannotStart`.

    Raises:
      WorkersCannotStart: another process, which the script starts, runs the script again.
    """
    process = multiprocessing.current_process()
    if getattr(process, "_inheriting", False):  # the test of multiprocessing itself, which imports the main script
        if process.name.startswith(_NAME):
            os._exit(_UNGUARDED)
        raise WorkersCannotStart(_NO_GUARD)


def worker_dataset(chunks: grain.IterDataset, num_workers: int) -> grain.IterDataset:
    """Read a dataset in worker processes, which start together at its first element.

    Raises:
      WorkersCannotStart: the main script has no file, such as one from standard input.
    """
    check_guard()
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)  # multiprocessing imports it by its path, unless `__spec__` has its name
    folder = multiprocessing.process.ORIGINAL_DIR or ""  # type: ignore[attr-defined]
    if file is not None and main.__spec__ is None and not Path(folder, file).is_file():
        raise WorkersCannotStart(
            f"expected a script file that data workers can import, got {file}; save it to a file, or set num_workers=0"
        )
    # grain reads its flags to start workers. Notebooks and tests do not parse them.
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
    atexit.unregister(_free_shared_memory)
    atexit.register(_free_shared_memory)
    options = grain.MultiprocessingOptions(num_workers=num_workers, per_worker_buffer_size=2)
    prefix = f"i{uuid.uuid4().hex[:8]}"  # Python's names of shared memory have 14 characters, 4 of them random
    dataset = chunks.mp_prefetch(options, functools.partial(_start_worker, prefix))
    return _Workers(dataset, prefix, num_workers)


class _Workers(grain.IterDataset):
    """Dataset whose worker processes start together at the first element.

    Grain creates the workers when `ThreadPrefetchIterDataset` asks for the state of its parent. It starts each one when
    it needs an element of that worker, after it has waited for the worker before.
    """

    def __init__(self, parent: grain.IterDataset, prefix: str, count: int) -> None:
        super().__init__(parent)
        self._prefix, self._count = prefix, count

    def __iter__(self) -> grain.DatasetIterator:
        return _WorkersIterator(iter(self.parents[0]), self._prefix, self._count)


class _WorkersIterator(grain.DatasetIterator):
    def __init__(self, parent: grain.DatasetIterator, prefix: str, count: int) -> None:
        super().__init__(parent)
        self._workers, self._prefix, self._count = parent, prefix, count

    def __next__(self) -> Any:
        self._workers.start_prefetch()
        try:
            return next(self._workers)
        except (RuntimeError, OSError, MemoryError) as error:
            if (lost := _lost(error, self._count, self._prefix)) is None:
                raise
        if isinstance(lost, WorkerLost):
            lost.chunks_ahead = _READ_AHEAD * self._count
        self._workers.close()  # ends the other workers
        _unlink(self._prefix)
        raise lost

    def get_state(self) -> Any:
        return self._workers.get_state()

    def set_state(self, state: Any) -> None:
        self._workers.set_state(state)


def _lost(error: Exception, count: int, prefix: str) -> WorkerLost | WorkersCannotStart | None:
    """Return the error of a lost worker; None for an error of the data."""
    if isinstance(error, MemoryError):
        return WorkerLost(f"a data worker had no memory; {_memory()}", killed=True)
    if isinstance(error, OSError):
        full = error.errno == errno.ENOSPC and str(error.filename).startswith(f"/{prefix}")
        return WorkerLost(f"a data worker had no shared memory; {_shared_memory()}", killed=True) if full else None
    if (match := _ENDED.match(str(error))) is None:
        return None
    code, worker = int(match[1]), _missing_worker(count)
    if code == _UNGUARDED:
        return WorkersCannotStart(_NO_GUARD)
    if code > 0:
        advice = "its own error is above; set num_workers=0 to see it in this process"
        return WorkerLost(f"{worker} ended with exit status {code}; {advice}", killed=False)
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    if -code == signal.SIGKILL:
        advice = _memory()
    elif -code == signal.SIGBUS:
        advice = _shared_memory()
    else:
        advice = "native code, such as an image decoder, crashed; set num_workers=0 to see where"
    return WorkerLost(f"{worker} was killed ({name}); {advice}", killed=True)


def _missing_worker(count: int) -> str:
    """Name the worker that has ended."""
    names = {f"data worker {number}" for number in range(1, count + 1)}
    for process in multiprocessing.active_children():
        with contextlib.suppress(OSError):
            names.discard(Path(f"/proc/{process.pid}/comm").read_text().strip())
    return f"{names.pop()} of {count}" if len(names) == 1 else f"one of {count} data workers"


def _memory() -> str:
    """Describe the host memory, and how to need less of it."""
    largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / _GIB  # Linux counts KiB
    return (
        f"the host has {free_host_memory() / _GIB:.1f} of {host_memory() / _GIB:.1f} GiB free, the largest worker held "
        f"{largest:.1f} GiB: probably out of memory; lower num_workers, prefetch_batches or batch_size"
    )


def _shared_memory() -> str:
    """Describe the shared memory, and how to get more of it."""
    free, size = shared_memory_left()
    return (
        f"/dev/shm has {free >> 20} of {size >> 20} MiB free: if it is full, give the container more (docker run "
        "--shm-size=8g), or set num_workers=0"
    )


def _start_worker(prefix: str, worker: int, workers: int) -> None:
    """Set up a worker process.

    Schedulers and terminals signal all processes, but the training process may need another batch before it saves. Only
    the first worker warns of truncated captions. The process and its shared memory get names by which
    `_missing_worker` and `_unlink` find them.
    """
    ignore_stop()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if worker:
        logging.getLogger("infcl_jax.data.tokenizers").setLevel(logging.ERROR)
    with contextlib.suppress(OSError):  # of a read-only /proc
        Path("/proc/self/comm").write_text(f"data worker {worker + 1}")  # also for `top` and the log of the kernel
    setattr(shared_memory, "_SHM_NAME_PREFIX", f"/{prefix}")  # noqa: B010  (CONTRIBUTING.md lists private names)


def _end_with_parent() -> None:
    """End this worker when the training process has ended, even by SIGKILL."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(0)


def _unlink(prefix: str) -> None:
    """Free the shared memory of lost workers, a leak to Python.

    Arrays that this process still has are freed with them.
    """
    mapped = Path("/proc/self/maps").read_text()
    for path in Path("/dev/shm").glob(f"{prefix}*"):
        if path.name in mapped:
            continue
        try:
            memory = shared_memory.SharedMemory(path.name)
        except ValueError:  # of no size: killed before it was registered
            path.unlink(missing_ok=True)
        else:
            memory.close()
            memory.unlink()


def _free_shared_memory() -> None:
    """Free the shared memory of the workers' last arrays.

    Grain's iterators are in reference cycles with these arrays, and its thread that frees them ends before the process.
    """
    with contextlib.suppress(ImportError, AttributeError):
        from grain._src.python.ipc.shared_memory_array import SharedMemoryArray

        SharedMemoryArray._disable_async_del()  # frees at once
    gc.collect()


class WorkerFunction:
    """Function whose pickle is the path of a temporary file with its state.

    `multiprocessing` sends a worker its arguments through a pipe of 64 KiB. With larger ones, such as the vocabulary of
    a tokenizer, it waits until the worker has imported its modules, so workers would start one after the other.

    The file is deleted with this object, or when the process exits.
    """

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function
        self._path: Path | None = None
        self._lock = threading.Lock()  # several threads start workers

    def __call__(self, argument: Any) -> Any:
        """Call the function."""
        return self._function(argument)

    def __reduce__(self) -> tuple[Callable[[Path], Any], tuple[Path]]:
        with self._lock:
            if self._path is None:
                descriptor, name = tempfile.mkstemp(prefix="infcl_jax_", suffix=".pickle")
                weakref.finalize(self, Path(name).unlink, missing_ok=True)
                with os.fdopen(descriptor, "wb") as file:
                    cloudpickle.dump(self._function, file)
                self._path = Path(name)
        return _load, (self._path,)


def _load(path: Path) -> Callable[[Any], Any]:
    with path.open("rb") as file:
        return cloudpickle.load(file)
