"""Resumable iterator of training batches, read in chunks by threads or worker processes."""

import concurrent.futures
import dataclasses
import functools
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import grain
import numpy as np

from infcl_jax.data.packing import PADDED, TextPacker
from infcl_jax.data.parallelism import (
    CONCATENATE,
    GPU_DECODE,
    Parallelism,
    ProcessRows,
    check_at_least,
    check_shared_memory,
    choose_parallelism,
    describe_records,
    process_rows,
    take_seconds,
    timed,
)
from infcl_jax.data.reader import BadRecords
from infcl_jax.data.sources.base import OrderedSource, Source
from infcl_jax.data.workers import WorkerFunction, WorkerLost, worker_dataset

if TYPE_CHECKING:
    from infcl_jax.data.decode.device import DeviceStage

Batch = dict[str, np.ndarray]

_CHUNK = 64  # maximum rows per chunk; a thread or worker prepares one chunk at a time, with full images in memory
# Key of a chunk for a `Stats`, which is not part of the batch.
STATS = "stats"
# Key of a chunk for encoded images, uint8. A batch has the list of its chunks' arrays, which saves a copy.
ENCODED = "encoded"
# Numbers by name that a reading thread or worker sends along with a chunk, such as counts and seconds.
Stats = dict[str, float]


@dataclasses.dataclass(frozen=True)
class BatchReader:
    """Process-local batch that is read in chunks instead of stored.

    Chunks can be read repeatedly.

    Examples:
      >>> source, tokenizer = load_source("photos", "train"), load_tokenizer("bytes", 36)
      >>> data = train_iterator(source, tokenizer=tokenizer, image_size=16, batch_size=8, seed=0, num_workers=0)
      >>> reader = data.next_reader()
      >>> reader.rows, sorted(reader.read_chunk(0))
      (8, ['image', 'index', 'text'])
      >>> data.close()

    Attributes:
      rows: rows of this process in the batch.
      chunk_rows: rows per chunk.
      read_chunk: deterministic function from a chunk's number in the batch to its `chunk_rows` rows.
      threads: executor that reads the chunks.
    """

    rows: int
    chunk_rows: int
    read_chunk: Callable[[int], Batch]
    threads: concurrent.futures.Executor

    def read(self, spans: Sequence[slice]) -> Batch:
        """Read and concatenate the rows of slices `[start, stop)`."""
        sections = [section for span in spans for section in self._sections(span)]
        chunks = self.threads.map(self.read_chunk, [number for number, _ in sections])
        sliced = [{key: array[rows] for key, array in c.items()} for c, (_, rows) in zip(chunks, sections, strict=True)]
        return {key: np.concatenate([chunk[key] for chunk in sliced]) for key in sliced[0]}

    def _sections(self, span: slice) -> list[tuple[int, slice]]:
        """Split a slice into (chunk number, rows within the chunk) pairs."""
        size = self.chunk_rows
        return [
            (n, slice(max(span.start - n * size, 0), min(span.stop - n * size, size)))
            for n in range(span.start // size, -(-span.stop // size))
        ]


class TrainIterator(grain.DatasetIterator):
    """Endless resumable iterator of process-local batches.

    Its state is the number of batches it has returned and the bad records in them. The state does not depend on the
    number of processes or workers, so a run can resume on another machine. It is JSON-serializable, as grain's
    checkpoint handler for orbax expects.

    Examples:
      >>> source, tokenizer = load_source("photos", "train"), load_tokenizer("bytes", 36)
      >>> batches = train_iterator(source, tokenizer=tokenizer, image_size=16, batch_size=4, seed=0, num_workers=0)
      >>> first, state = next(batches), batches.get_state()  # `set_state(state)` continues there
      >>> batches.close()

    For arguments that are not listed see `train_iterator`.

    Args:
      source: source of the samples.
      make_chunk: function that makes one chunk of a batch, a `Batch`, from (global row, sample index) pairs. A chunk
        may have the key `STATS`.
      row_bytes: bytes of a row in host memory.
      shared_row_bytes: bytes of a row in the shared memory of workers that must be free; 0: unknown.
      packer: packing of the texts of each batch; `next_reader` leaves it out.
      finish: last stage of each batch; `next_reader` leaves it out.
      **reading: numbers of `infcl_jax.data.parallelism.choose_parallelism`.

    Attributes:
      bad_records: bad records in the returned batches of this process, and those that `BadRecords.add` adds.
      dataset: values to save with the state, such as `infcl_jax.data.dataset_identity`'s.
    """

    def __init__(
        self,
        source: Source,
        make_chunk: Callable[[Sequence[tuple[int, int]]], dict[str, Any]],
        *,
        batch_size: int,
        seed: int,
        process_index: int = 0,
        process_count: int = 1,
        row_bytes: int,
        shared_row_bytes: int = 0,
        max_bad_records: float | None = None,
        packer: TextPacker = PADDED,
        finish: "DeviceStage | None" = None,
        processes_per_host: int = 1,
        **reading: int | None,
    ):
        super().__init__()
        local_size = process_rows(batch_size, process_index, process_count)
        check_at_least(0, max_bad_records=max_bad_records)
        order = sample_order(source, batch_size, seed)
        self._identity = {"num_examples": len(source), "batch_size": batch_size, "seed": seed}
        if isinstance(source, OrderedSource):
            self._identity["order"] = source.fingerprint()
        self._rows = ProcessRows(order, batch_size, process_index, process_count)
        self._chunk_rows = chunk_size(local_size)
        self._chunks_per_batch = local_size // self._chunk_rows
        make_chunk = WorkerFunction(make_chunk)
        self._chunks = self._rows.batch(self._chunk_rows, drop_remainder=True, batch_fn=make_chunk).repeat()
        self.parallelism = choose_parallelism(local_size * row_bytes, processes_per_host=processes_per_host, **reading)
        chunk_bytes = self._chunk_rows * shared_row_bytes
        check_shared_memory(self.parallelism, chunk_bytes, self._chunks_per_batch, processes_per_host)
        self.bad_records = BadRecords(source, max_bad_records)
        self.dataset: Mapping[str, Any] = {}
        self.packer = packer
        self._finish = finish
        self._next_batch = 0
        self._stale = False
        self._stats: Stats = {}
        self._stats_lock = threading.Lock()
        self._threads: concurrent.futures.ThreadPoolExecutor | None = None
        self._open()

    def _open(self) -> None:
        """Open the pipeline at batch `_next_batch`; threads and workers start lazily."""
        self._stale = False
        chunks = self._chunks.slice(slice(self._next_batch * self._chunks_per_batch, None))
        self._opened_batch, self._arrived = self._next_batch, _ArrivedChunks()
        stages = self.packer, self._finish, self._arrived
        dataset = prefetched_batches(chunks, self._chunks_per_batch, self.parallelism, *stages)
        # Threads and workers must stop before the interpreter tears down modules; `finalize` runs before that. It holds
        # this list instead of `self`, which would never be collected.
        self._batches = [iter(dataset)]
        self._finalizer = weakref.finalize(self, _close_all, self._batches)

    def __next__(self) -> Batch:
        self._assert_not_closed()
        if self._stale:
            self._finalizer()
            self._open()
        batch = self.packer.agree(self.bad_records.take(next(self._batches[0])))
        self._next_batch += 1
        return self._without_stats(batch if self._finish is None else self._finish.complete(batch))

    def next_reader(self) -> BatchReader:
        """Return a reader of the next batch, in place of `next`.

        `parallelism.num_threads` threads of this process read its chunks.
        """
        self._assert_not_closed()
        if self._threads is None:
            self._threads = concurrent.futures.ThreadPoolExecutor(self.parallelism.num_threads, "replay")
        first = self._next_batch * self._chunks_per_batch
        self._next_batch += 1
        self._stale = True  # the open pipeline is behind `_next_batch`
        rows = self._chunk_rows
        returned: set[int] = set()

        def read(number: int) -> Batch:
            batch = self.bad_records.take(self._chunks[first + number])
            batch = self._without_stats(batch, count=number not in returned)
            returned.add(number)
            return batch

        return BatchReader(self._chunks_per_batch * rows, rows, read, self._threads)

    @property
    def decodes_on_gpus(self) -> bool:
        """True if the last stage of a batch decodes its images on the GPUs."""
        return self._finish is not None

    def stats(self) -> Stats:
        """Return the sums over all chunks of the batches so far, by name.

        A chunk that `next_reader` reads again counts once.
        """
        with self._stats_lock:
            return dict(self._stats)

    def _without_stats(self, batch: dict[str, Any], count: bool = True) -> Batch:
        """Remove the statistics from a chunk or batch and add them to the sums."""
        stats = batch.get(STATS, {})
        if count:
            with self._stats_lock:
                self._stats = _sums([self._stats, stats])
        return {key: value for key, value in batch.items() if key != STATS}

    def batch_indices(self, number: int) -> list[int]:
        """Return the sample indices of a global batch, over all processes.

        Args:
          number: number of the batch, from 0.
        """
        return self._rows.global_batch(number)

    def awaited(self) -> str:
        """Describe the chunk for which the next batch waits: its sources, files and reader.

        Other threads may call it. It reads no files.
        """
        count = self._arrived.count
        chunk = self._opened_batch * self._chunks_per_batch + count
        batch = f"batch {self._next_batch + 1}"
        if self._stale:
            return batch
        if chunk >= (self._next_batch + 1) * self._chunks_per_batch:
            return f"{batch}, whose records are read; {'the GPUs decode' if self._finish else 'a thread joins'} them"
        rows = range(chunk * self._chunk_rows, (chunk + 1) * self._chunk_rows)
        records = describe_records(self.bad_records.source, [int(self._rows[row][1]) for row in rows])
        workers = self.parallelism.num_workers
        reader = f"worker process {count % workers + 1} of {workers}" if workers else "a reading thread"
        return f"{batch}, {records}, {reader}"

    def get_state(self) -> dict[str, Any]:
        """Return the state after the last returned batch."""
        bad_records = self.bad_records.indices()
        state = {"next_batch": self._next_batch, **self.dataset, **self._identity, "bad_records": bad_records}
        return state | ({"padded_batches": self.packer.padded} if self.packer.entries else {})

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state of an iterator over the same data.

        Args:
          state: state that `get_state` returned.

        Raises:
          ValueError: the state has another dataset size, batch size or seed, or the iterator is closed.
        """
        for key, value in self._identity.items():
            if state.get(key) != value:
                raise ValueError(
                    f"the data state was saved with {key}={state.get(key)}, this run has {value}; resume with the same"
                    " data settings, or start a new run from the weights"
                )
        self._assert_not_closed()
        self._finalizer()
        self._next_batch = int(state["next_batch"])
        self.bad_records.restore(state.get("bad_records", ()))  # absent in older checkpoints
        self.packer.padded = state.get("padded_batches", 0)
        self._open()

    def batches_ahead(self, error: WorkerLost) -> int:
        """Return how many batches after the awaited one a lost worker may have read."""
        return -(-error.chunks_ahead // self._chunks_per_batch)

    def start_prefetch(self) -> None:
        """Start to prepare batches before the first `next`."""
        self._assert_not_closed()
        self._batches[0].start_prefetch()

    def close(self) -> None:
        """Stop threads and workers and close the iterator."""
        if not self._closed:
            self._closed: bool = True
            if hasattr(self, "_finalizer"):  # absent if the constructor failed
                self._finalizer()
                if self._threads is not None:
                    self._threads.shutdown(cancel_futures=True)


def sample_order(source: Source, batch_size: int, seed: int) -> grain.MapDataset:
    """Return the sample index of each row of an epoch; further epochs reshuffle.

    Raises:
      ValueError: the batch is larger than the source, or the seed is out of range.
    """
    if batch_size > len(source):
        raise ValueError(
            f"batch_size must be at most the {len(source)} examples of {source.name}, split {source.split}, got"
            f" {batch_size}; every sample appears at most once an epoch"
        )
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed must be in [0, 2**32), got {seed}")
    if isinstance(source, OrderedSource):
        return source.order(seed)
    return grain.MapDataset.range(len(source)).seed(seed).shuffle()[: len(source) // batch_size * batch_size]


class _ArrivedChunks:
    """Counter of the chunks that leave the reading threads or workers, in order."""

    count = 0

    def __call__(self, chunk: Any) -> Any:
        self.count += 1
        return chunk


def prefetched_batches(
    chunks: grain.MapDataset,
    chunks_per_batch: int,
    parallelism: Parallelism,
    packer: TextPacker = PADDED,
    finish: "DeviceStage | None" = None,
    arrived: _ArrivedChunks | None = None,
) -> grain.IterDataset:
    """Read chunks in threads or worker processes; one thread makes batches of them."""
    threads = 1 if parallelism.num_workers else parallelism.num_threads
    dataset = chunks.to_iter_dataset(grain.ReadOptions(num_threads=threads, prefetch_buffer_size=2 * threads))
    if parallelism.num_workers:
        dataset = worker_dataset(dataset, parallelism.num_workers)
    if arrived is not None:
        dataset = dataset.map(arrived)
    dataset = dataset.batch(chunks_per_batch, drop_remainder=True, batch_fn=concatenate)
    if finish is not None:
        # The chunks of the next batch are collected meanwhile.
        dataset = grain.experimental.ThreadPrefetchIterDataset(dataset, prefetch_buffer_size=1)
        dataset = dataset.map(functools.partial(_finished, finish))
    dataset = dataset.map(packer.plan)
    return grain.experimental.ThreadPrefetchIterDataset(dataset, prefetch_buffer_size=parallelism.prefetch_batches)


def chunk_size(local_size: int) -> int:
    """Return the largest divisor of `local_size` that is at most `_CHUNK`."""
    return max(size for size in range(1, min(_CHUNK, local_size) + 1) if local_size % size == 0)


def concatenate(chunks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Concatenate the arrays and add the statistics of chunks; collect `ENCODED` in a list."""
    encoded = {ENCODED: [chunk[ENCODED] for chunk in chunks]} if ENCODED in chunks[0] else {}
    if len(chunks) == 1:
        return chunks[0] | encoded
    with timed(CONCATENATE):
        keys = [key for key in chunks[0] if key not in (STATS, ENCODED)]
        batch: dict[str, Any] = {key: np.concatenate([c[key] for c in chunks]) for key in keys} | encoded
    return batch | {STATS: _sums([*(chunk.get(STATS, {}) for chunk in chunks), take_seconds()])}


def _finished(finish: "DeviceStage", batch: dict[str, Any]) -> dict[str, Any]:
    """Run the last stage of a batch and add its time to the statistics."""
    with timed(GPU_DECODE):
        batch = finish(batch)
    return batch | {STATS: _sums([batch.get(STATS, {}), take_seconds()])}


def _sums(stats: Sequence[Stats]) -> Stats:
    """Add numbers of the same name."""
    names = dict.fromkeys(name for numbers in stats for name in numbers)
    return {name: sum(numbers.get(name, 0) for numbers in stats) for name in names}


def _close_all(iterators: list[grain.DatasetIterator]) -> None:
    while iterators:
        iterators.pop().close()
