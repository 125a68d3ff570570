"""Parallel reading: number of threads and workers, rows of each process, and the time of each stage."""

import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import grain

from infcl_jax.data.sources.base import Source, shard_name, source_name

READ, DECODE, TOKENIZE = "read", "decode", "tokenize"  # stages of the reading threads or workers
CONCATENATE, GPU_DECODE = "concatenate", "gpu_decode"  # stages of the thread that completes a batch
STAGES = (READ, DECODE, TOKENIZE, CONCATENATE, GPU_DECODE)
_CGROUP = Path("/sys/fs/cgroup")  # limits of a container, cgroup version 2
_MEMINFO = Path("/proc/meminfo")
_SHARED_MEMORY = "/dev/shm"
# Chunks of a worker that wait there: 2 in its queue, 2 in a thread of the training process, and 1 at each end. A batch
# of one chunk is not copied: the prefetched batches, the returned one and the next one are there too.
_WORKER_CHUNKS = 6
_PREFETCH_BATCHES = 2  # hides the variation between batches; more would only delay the first lack of data
# A batch is in host memory this many times besides the prefetched ones: returned, concatenated, and as chunks.
_OTHER_BATCHES = 3
_MEMORY_SHARE = 0.25  # fraction of host memory for all batches; checkpoints, caches and other programs need the rest
# Cores from which on worker processes read instead of threads. A worker takes seconds and 0.3 GB to start. Threads
# contend for Python's global lock: they decode at most 5 times as fast as one, see docs/archive/measurements.md.
_WORKER_CORES = 8
_NAMES = 3  # shards named in a line; a chunk of shuffled records can have as many as it has rows


def seconds_name(stage: str) -> str:
    """Name the seconds of a stage in `TrainIterator.stats`."""
    return f"seconds/{stage}"


class _Seconds(threading.local):
    """Seconds of the stages in one thread."""

    def __init__(self) -> None:
        self.by_stage: dict[str, float] = {}


_seconds = _Seconds()


@contextlib.contextmanager
def timed(stage: str) -> Iterator[None]:
    """Add the time of a block to a stage of this thread."""
    start = time.perf_counter()
    try:
        yield
    finally:
        _seconds.by_stage[stage] = _seconds.by_stage.get(stage, 0.0) + time.perf_counter() - start


def take_seconds() -> dict[str, float]:
    """Return this thread's seconds since the last call, by the names of `seconds_name`."""
    by_stage, _seconds.by_stage = _seconds.by_stage, {}
    return {seconds_name(stage): seconds for stage, seconds in by_stage.items()}


def limiting_stage(stats: Mapping[str, float], readers: int) -> str:
    """Find the stage that limits the rate of the pipeline, given the seconds of `TrainIterator.stats`.

    All readers run the first three stages. One thread completes the batches with the others.
    """
    seconds = {stage: stats.get(seconds_name(stage), 0.0) for stage in STAGES}
    completing = {stage: seconds.pop(stage) for stage in (CONCATENATE, GPU_DECODE)}
    limiting = completing if sum(completing.values()) > sum(seconds.values()) / readers else seconds
    return max(limiting, key=limiting.__getitem__)


def process_rows(batch_size: int, process_index: int, process_count: int) -> int:
    """Return the rows of each of `process_count` processes, which share global batches of `batch_size` rows."""
    check_at_least(1, batch_size=batch_size, process_count=process_count)
    if batch_size % process_count:
        raise ValueError(f"batch_size must be a multiple of the {process_count} processes, got {batch_size}")
    if not 0 <= process_index < process_count:
        raise ValueError(f"process_index must be in [0, {process_count}), got {process_index}")
    return batch_size // process_count


def check_at_least(low: int, **values: float | None) -> None:
    """Check that values are at least `low` or None; messages have their names."""
    for name, value in values.items():
        if value is not None and value < low:
            raise ValueError(f"{name} must be at least {low}, got {value}")


@dataclasses.dataclass(frozen=True)
class Parallelism:
    """Parallel reading of one training process."""

    num_workers: int  # processes that read; 0: threads
    num_threads: int  # reading threads, if there are no workers
    prefetch_batches: int
    cores: int  # that this process may use

    def __str__(self) -> str:
        """Format as "12 reading threads, 2 batches ahead"."""
        counts = [(self.num_workers, "worker process", "es")] if self.num_workers else []
        counts += [] if self.num_workers else [(self.num_threads, "reading thread", "s")]
        counts += [(self.prefetch_batches, "batch", "es")]
        return ", ".join(f"{count} {noun}{'' if count == 1 else end}" for count, noun, end in counts) + " ahead"

    @property
    def readers(self) -> int:
        """Number of threads or processes that read."""
        return self.num_workers or self.num_threads

    def advice(self, stage: str) -> str:
        """Suggest a change that speeds up one of `infcl_jax.data.parallelism.STAGES`."""
        if stage == CONCATENATE:
            return "try more training processes, each of which concatenates its own rows"
        if stage == GPU_DECODE:
            return "the GPU decodes as fast as it can; try smaller image files, or decode=pillow"
        setting = "num_workers" if self.num_workers else "num_threads"
        if stage == READ:  # waits for the disk or network, not for a core
            return f"try {setting}={2 * self.readers}, or files on a faster disk"
        share_lock = self.cores > 1 if stage == TOKENIZE else self.cores >= _WORKER_CORES
        if not self.num_workers and share_lock:
            return f"try num_workers={self.cores}"  # threads contend for Python's global lock
        if self.readers < self.cores:
            return f"try {setting}={self.cores}"
        return f"all {self.cores} cores are in use; try smaller image files or more cores"


def choose_parallelism(
    batch_bytes: int,
    *,
    num_workers: int | None = None,
    num_threads: int | None = None,
    prefetch_batches: int | None = None,
    cores: int | None = None,
    processes_per_host: int = 1,
    memory: int | None = None,
) -> Parallelism:
    """Choose the values that are None by the machine, for batches of a size in each process.

    Each core that this process may use gets a reading thread, or a worker process from 8 cores on unless `num_threads`
    is given. Two batches are prefetched, or one if all batches in host memory would exceed a quarter of it.

    Raises:
      ValueError: a number is out of range.
    """
    check_at_least(0, num_workers=num_workers)
    check_at_least(1, num_threads=num_threads, prefetch_batches=prefetch_batches)
    check_at_least(1, cores=cores, processes_per_host=processes_per_host)
    cores = usable_cores() if cores is None else cores
    memory = host_memory() if memory is None else memory
    if num_workers is None:
        num_workers = 0 if cores < _WORKER_CORES or num_threads is not None else cores
    if prefetch_batches is None:
        fitting = int(_MEMORY_SHARE * memory / processes_per_host) // batch_bytes - _OTHER_BATCHES
        prefetch_batches = min(max(1, fitting), _PREFETCH_BATCHES)
    return Parallelism(num_workers, num_threads or cores, prefetch_batches, cores)


def check_shared_memory(parallelism: Parallelism, chunk_bytes: int, chunks: int, processes: int = 1) -> None:
    """Check that the chunks of workers fit into /dev/shm; a batch of each process has a number of `chunks`.

    Raises:
      ValueError: they do not fit.
    """
    if not parallelism.num_workers:
        return
    waiting = _WORKER_CHUNKS * parallelism.num_workers + (parallelism.prefetch_batches + 2 if chunks == 1 else 0)
    needed, (free, _) = waiting * chunk_bytes * processes, shared_memory_left()
    if needed > free:
        raise ValueError(
            f"expected {-(-needed // 2**20)} MiB free in {_SHARED_MEMORY} for {parallelism.num_workers} data workers, "
            f"got {free // 2**20}; set num_workers=0, or fewer, or give the container more (docker run --shm-size=8g)"
        )


def usable_cores() -> int:
    """Count the CPU cores in this process's affinity mask and container quota."""
    cores = len(os.sched_getaffinity(0))
    quota, period = (_read_cgroup("cpu.max") or "max 0").split()
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def host_memory() -> int:
    """Return the memory of the machine or of its container, in bytes."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _read_cgroup("memory.max") or "max"
    return memory if limit == "max" else min(memory, int(limit))


def free_host_memory() -> int:
    """Return the free memory of the machine or of its container, in bytes."""
    lines = _MEMINFO.read_text().splitlines()
    available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    used, limit = _read_cgroup("memory.current"), _read_cgroup("memory.max") or "max"
    return available if used is None or limit == "max" else min(available, max(0, int(limit) - int(used)))


def shared_memory_left() -> tuple[int, int]:
    """Return the free and all bytes of /dev/shm, through which workers send their chunks."""
    try:
        system = os.statvfs(_SHARED_MEMORY)
    except FileNotFoundError:
        return 0, 0
    return system.f_bavail * system.f_frsize, system.f_blocks * system.f_frsize


def _read_cgroup(name: str) -> str | None:
    """Read a limit of the container; None without one."""
    try:
        return (_CGROUP / name).read_text().strip()
    except OSError:
        return None


class ProcessRows(grain.MapDataset):
    """Rows of one process as (global row, sample index) pairs.

    A process has one contiguous block of each global batch. Indices beyond the length address further epochs, in the
    parent, which has the sample index of every global row of an epoch, and in this dataset.
    """

    def __init__(self, parent: grain.MapDataset, batch_size: int, process_index: int, process_count: int):
        super().__init__(parent)
        self._batch_size = batch_size
        self._local_size = batch_size // process_count
        self._offset = process_index * self._local_size

    def __len__(self) -> int:
        return len(self.parents[0]) // self._batch_size * self._local_size

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.slice(index)
        step, local_row = divmod(index, self._local_size)
        row = step * self._batch_size + self._offset + local_row
        return row, self.parents[0][row]

    def global_batch(self, number: int) -> list[int]:
        """Return the sample indices of a global batch, over all processes; the first batch has the number 0."""
        rows = range(number * self._batch_size, (number + 1) * self._batch_size)
        return [int(self.parents[0][row]) for row in rows]


def describe_records(source: Source, indices: Sequence[int]) -> str:
    """Name the datasets and shards of records without reading them."""
    sources = ", ".join(dict.fromkeys(source_name(source, index) for index in indices))
    shards = list(dict.fromkeys(filter(None, (shard_name(source, index) for index in indices))))
    text = f"{len(indices)} records of {sources}"
    if shards:
        more = f" and {len(shards) - _NAMES} more" if len(shards) > _NAMES else ""
        text += f" in {', '.join(shards[:_NAMES])}{more}"
    return text
