"""Index of the samples of tar files, cached on disk."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import itertools
import json
import logging
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from infcl_jax.data.sources import files, tar_scan
from infcl_jax.data.sources.base import locate, starts_of
from infcl_jax.data.sources.tar_scan import ShardScan
from infcl_jax.user_cache import user_cache

ENTRY_DTYPE = np.dtype(
    [
        ("image_block", "<u4"),
        ("image_size", "<u4"),
        ("caption_block", "<u4"),
        ("caption_size", "<u4"),
        ("caption_member", "u1"),
    ]
)
assert ENTRY_DTYPE.itemsize == tar_scan.ENTRY.size

_MAGIC = b"infcltar2"
_ALIGNMENT = 64  # bytes
_REMOTE_WINDOW = 2**23  # bytes per request; hides the latency of an object store
_PROGRESS_SECONDS = 10.0
_FEW_SHARDS = 8  # scanned in this process
_MAX_PROCESSES = 32

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class TarIndex:
    """Samples of a list of tar files, 17 bytes each.

    Attributes:
      shards: paths of the tar files.
      starts: int64 [shards + 1], index of the first sample of each shard, then the number of samples.
      entries: `ENTRY_DTYPE` [samples]; memory-mapped if the index is cached on disk.
      dropped: number of members or samples that are left out, by reason.
      problems: one line for each truncated or damaged shard, with the bytes.
      path: cache file, or None.
    """

    shards: tuple[str, ...]
    starts: np.ndarray
    entries: np.ndarray
    dropped: dict[str, int]
    problems: tuple[str, ...]
    path: str | None

    def __reduce__(self) -> Any:
        if self.path is None:
            return TarIndex, tuple(getattr(self, field.name) for field in dataclasses.fields(self))
        return _reopen, (self.path, self.shards, len(self.entries))

    def locate(self, index: int) -> tuple[int, np.void]:
        """Return the shard number and the entry of a sample."""
        return locate(self.starts, index)[0], self.entries[index]


def load_index(shards: Sequence[str], captions: Sequence[str], name: str) -> TarIndex:
    """Load the cached index of tar files, or build it.

    The cache is a hidden file next to the first shard, or in `~/.cache/infcl_jax` where that folder is not writable or
    not local. Shards whose size or modification time changed are scanned again.

    Args:
      shards: paths of the tar files.
      captions: extensions of caption members, in order of preference.
      name: name of the dataset, for messages.

    Raises:
      FileNotFoundError: shards do not exist.
    """
    stamps = _stamps(shards, name)
    for cache in _cache_files(shards, captions):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            header, entries = _read(cache)
            if [tuple(shard[:2]) for shard in header["shards"]] == stamps:
                return _index(shards, header, entries, cache)
            return _build(shards, stamps, captions, name, header, entries)
    return _build(shards, stamps, captions, name, {"shards": []}, np.zeros(0, ENTRY_DTYPE))


def _stamps(shards: Sequence[str], name: str) -> list[tuple[int, str]]:
    def stamp_or_none(path: str) -> tuple[int, str] | None:
        try:
            size, modified = files.stamp(path)
            return size, modified
        except FileNotFoundError:
            return None

    with concurrent.futures.ThreadPoolExecutor(16) as threads:  # waits for network file systems
        stamps = list(threads.map(stamp_or_none, shards))
    missing = [shard for shard, stamp in zip(shards, stamps, strict=True) if stamp is None]
    if missing:
        raise FileNotFoundError(
            f"{len(missing)} of the {len(shards)} shards of {name} do not exist, the first is {missing[0]}; "
            "check the path and the pattern"
        )
    return [stamp for stamp in stamps if stamp is not None]


def _cache_files(shards: Sequence[str], captions: Sequence[str]) -> list[str]:
    """List the possible cache files, the preferred first."""
    folders: list[tuple[str, Path]] = []
    if not any(files.is_remote(shard) for shard in shards):
        own_folder = os.path.dirname(os.path.abspath(shards[0]))
        folders.append((own_folder, Path(own_folder)))
    with contextlib.suppress(RuntimeError):  # no home directory
        folders.append(("", user_cache().expanduser()))
    result = []
    for base, folder in folders:
        # Relative names keep the cache valid after the folder moves.
        names = [os.path.relpath(shard, base) if base else _absolute(shard) for shard in shards]
        digest = hashlib.sha256(json.dumps([list(captions), names]).encode()).hexdigest()[:16]
        result.append(str(folder / f".tar_index_{digest}"))
    return result


def _absolute(path: str) -> str:
    return path if files.is_remote(path) else os.path.abspath(path)


def _read(path: str) -> tuple[dict[str, Any], np.ndarray]:
    with open(path, "rb") as file:
        magic, size = file.read(len(_MAGIC)), int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size)) if magic == _MAGIC else {}
        start = -(-file.tell() // _ALIGNMENT) * _ALIGNMENT
    count = sum(shard[2] for shard in header["shards"])
    if os.path.getsize(path) != start + count * ENTRY_DTYPE.itemsize:
        raise ValueError(f"the tar index {path} is damaged; delete it")
    if count == 0:
        return header, np.zeros(0, ENTRY_DTYPE)
    return header, np.memmap(path, ENTRY_DTYPE, "r", offset=start, shape=(count,))


def _reopen(path: str, shards: tuple[str, ...], count: int) -> TarIndex:
    """Open the index of another process."""
    header, entries = _read(path)
    if len(entries) != count:
        raise ValueError(
            f"expected {count} samples in the tar index {path}, got {len(entries)}; it changed, start again"
        )
    return _index(shards, header, entries, path)


def _index(shards: Sequence[str], header: dict[str, Any], entries: np.ndarray, path: str | None) -> TarIndex:
    counts = [shard[2] for shard in header["shards"]]
    dropped: dict[str, int] = {}
    for reason, count in itertools.chain.from_iterable(shard[3].items() for shard in header["shards"]):
        dropped[reason] = dropped.get(reason, 0) + count
    problems = [f"{path}: {shard[4]}" for path, shard in zip(shards, header["shards"], strict=True) if shard[4]]
    return TarIndex(tuple(shards), starts_of(counts), entries, dropped, tuple(problems), path)


def _build(
    shards: Sequence[str],
    stamps: Sequence[tuple[int, str]],
    captions: Sequence[str],
    name: str,
    old: dict[str, Any],
    old_entries: np.ndarray,
) -> TarIndex:
    """Scan the changed shards and cache the new index."""
    old_starts = starts_of(shard[2] for shard in old["shards"])
    unchanged = {
        number: ShardScan(old_entries[old_starts[number] : old_starts[number + 1]].tobytes(), *shard[3:5])
        for number, (shard, stamp) in enumerate(zip(old["shards"], stamps, strict=False))
        if tuple(shard[:2]) == stamp
    }
    changed = [number for number in range(len(shards)) if number not in unchanged]
    scans = unchanged | dict(zip(changed, _scan_all([shards[i] for i in changed], captions, name), strict=True))
    size = ENTRY_DTYPE.itemsize
    header = {
        "shards": [
            [*stamps[i], len(scans[i].entries) // size, scans[i].dropped, scans[i].problem] for i in range(len(shards))
        ]
    }
    contents = [scans[i].entries for i in range(len(shards))]
    for cache in _cache_files(shards, captions):
        with contextlib.suppress(OSError):
            _write(cache, header, contents)
            return _index(shards, header, _read(cache)[1], cache)
    return _index(shards, header, np.frombuffer(b"".join(contents), ENTRY_DTYPE), None)


def _write(path: str, header: dict[str, Any], contents: Sequence[bytes]) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    text = json.dumps(header).encode()
    start = _MAGIC + len(text).to_bytes(8, "little") + text
    # Processes that build the same index at the same time each rename a complete file.
    descriptor, temporary = tempfile.mkstemp(dir=os.path.dirname(path), prefix=".tar_index_tmp_")
    try:
        with open(descriptor, "wb") as file:
            file.write(start + bytes(-len(start) % _ALIGNMENT))
            file.writelines(contents)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _scan_all(shards: Sequence[str], captions: Sequence[str], name: str) -> list[ShardScan]:
    """Scan shards in parallel and log the progress."""
    processes = min(
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, _MAX_PROCESSES
    )
    local = not any(files.is_remote(shard) for shard in shards)
    scan_batch: Callable[[Sequence[str], Sequence[str]], list[ShardScan]] = _scan_here
    batch = 1
    if local and processes > 1 and len(shards) > _FEW_SHARDS:
        scan_batch = _scan_in_process
        batch = min(64, -(-len(shards) // (4 * processes)))
    batches = [shards[start : start + batch] for start in range(0, len(shards), batch)]
    start = last = time.monotonic()
    result: list[ShardScan] = []
    with concurrent.futures.ThreadPoolExecutor(processes if local else 4 * processes) as threads:
        for scans in _in_order(threads, scan_batch, batches, captions):
            result += scans
            if time.monotonic() - last > _PROGRESS_SECONDS:
                last = time.monotonic()
                _logger.info("%s: indexed %d of %d shards, %.0f s", name, len(result), len(shards), last - start)
    return result


def _in_order(
    threads: concurrent.futures.Executor,
    scan_batch: Callable,
    batches: Sequence[Sequence[str]],
    captions: Sequence[str],
) -> Iterator[list[ShardScan]]:
    futures = [threads.submit(scan_batch, batch, captions) for batch in batches]
    try:
        for future in futures:
            yield future.result()
    finally:
        for future in futures:
            future.cancel()


def _scan_here(shards: Sequence[str], captions: Sequence[str]) -> list[ShardScan]:
    return [
        _scan_remote(shard, captions) if files.is_remote(shard) else tar_scan.scan_file(shard, captions)
        for shard in shards
    ]


def _scan_remote(shard: str, captions: Sequence[str]) -> ShardScan:
    size = files.stamp(shard).size
    reader = files.Files([shard])

    def read(offset: int, count: int) -> bytes:
        return reader.read(0, offset, min(count, size - offset))

    return tar_scan.scan(read, size, _REMOTE_WINDOW, captions)


def _scan_in_process(shards: Sequence[str], captions: Sequence[str]) -> list[ShardScan]:
    """Scan shards in a new Python process, because parsing holds the GIL."""
    # A script of its own: spawned workers of `multiprocessing` would import the user's main module and JAX.
    command = [sys.executable, "-I", tar_scan.__file__]
    paths = [os.path.abspath(shard) for shard in shards]
    process = subprocess.run(command, input=pickle.dumps((paths, list(captions))), stdout=subprocess.PIPE, check=True)
    return [ShardScan(*scan) for scan in pickle.loads(process.stdout)]
