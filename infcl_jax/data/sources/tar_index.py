"""Index of the samples of tar files, cached on disk."""

import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import io
import itertools
import json
import logging
import os
import pickle
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from infcl_jax.data.parallelism import usable_cores
from infcl_jax.data.sources import captions, files, tar_scan
from infcl_jax.data.sources.base import locate, starts_of
from infcl_jax.data.sources.files import LARGEST_IMAGE, Files, FileStamp, check_size
from infcl_jax.data.sources.tar_scan import Layout, ShardScan
from infcl_jax.runtime.file_io import open_regular, parse_json, replacing, user_cache
from infcl_jax.runtime.progress import Progress

ENTRY_DTYPE = np.dtype(
    [
        ("image_block", "<u4"),
        ("image_size", "<u4"),
        ("caption_block", "<u4"),
        ("caption_size", "<u4"),
        ("caption_member", "u1"),
        ("name_blocks", "u1"),
    ]
)
assert ENTRY_DTYPE.itemsize == tar_scan.ENTRY.size

_MAGIC = b"infcltar5"
_START = struct.Struct("<9sQI")  # magic, bytes of the header, CRC-32 of all that follows
_ALIGNMENT = 64  # bytes
_REMOTE_WINDOW = 2**23  # bytes per request; hides the latency of an object store
_READ_BETWEEN = 2**16  # bytes; image and caption are read at once if at most this many bytes lie between them
_FEW_SHARDS = 8  # scanned in this process
_MAX_PROCESSES = 32

_logger = logging.getLogger(__name__)


class _Shard(NamedTuple):
    """Entry of a tar file in the header of an index, see `ShardScan`."""

    size: int  # bytes
    modified: str
    samples: int
    dropped: dict[str, int]
    dotted: str | None
    problem: str | None


@dataclasses.dataclass(frozen=True)
class TarIndex:
    """Samples of a list of tar files, 18 bytes each; see `ShardScan`."""

    files: Files
    members: tuple[str, ...]  # extensions of the caption or label members, see `Layout.captions`
    starts: np.ndarray  # int64 [shards + 1], index of the first sample of each shard, then the number of samples
    entries: np.ndarray  # `ENTRY_DTYPE` [samples]; memory-mapped if the index is cached on disk
    dropped: dict[str, int]
    dotted: str | None
    problems: tuple[str, ...]  # one line for each truncated or damaged shard
    path: str | None  # cache file

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | ({} if self.path is None else {"entries": None})

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.path is None:
            return
        shards, entries = _read(self.path, checksum=False)  # the process that pickled it has checked it
        if not np.array_equal(starts_of(shard.samples for shard in shards), self.starts):
            raise ValueError(
                f"expected {self.starts[-1]} samples in the tar index {self.path}, got {len(entries)}; it changed, "
                "start again"
            )
        self.__dict__["entries"] = entries

    def __len__(self) -> int:
        return len(self.entries)

    def locate(self, index: int) -> tuple[int, np.void]:
        """Return the shard number and the entry of a sample."""
        return locate(self.starts, index)[0], self.entries[index]

    def image(self, index: int) -> bytes:
        """Read the image of a sample."""
        shard, entry = self.locate(index)
        return self.files.read(shard, *_span(entry, "image"))

    def caption(self, index: int, limit: int | None = None) -> tuple[str, bytes]:
        """Read the last extension of the caption or label member of a sample, and its contents.

        The largest size depends on the extension, see `captions.largest`, unless there is a `limit`.
        """
        shard, entry = self.locate(index)
        extension = self._extension(entry)
        return extension, self.files.read(shard, *_span(entry, "caption"), limit or captions.largest(extension))

    def image_and_caption(self, index: int) -> tuple[bytes, str, bytes]:
        """Read the image, and the result of `caption`, at once if they are close to each other."""
        shard, entry = self.locate(index)
        extension, image, caption = self._extension(entry), _span(entry, "image"), _span(entry, "caption")
        check_size(image[1], LARGEST_IMAGE, "an image")
        check_size(caption[1], captions.largest(extension), "a caption")
        (first, first_size), (last, last_size) = sorted((image, caption))
        if last - (first + first_size) > _READ_BETWEEN:
            return self.image(index), *self.caption(index)
        data = self.files.read(shard, first, last + last_size - first, 2 * LARGEST_IMAGE)
        image_data, caption_data = (data[start - first : start - first + size] for start, size in (image, caption))
        return image_data, extension, caption_data

    def name(self, index: int) -> str:
        """Read the name of the image member of a sample."""
        shard, entry = self.locate(index)
        (start, size), header_bytes = _span(entry, "image"), (1 + int(entry["name_blocks"])) * tar_scan.BLOCK
        headers = self.files.read(shard, start - header_bytes, header_bytes)
        return next(tar_scan.members(io.BytesIO(headers), header_bytes + size, []))[0]

    def _extension(self, entry: np.void) -> str:
        return self.members[int(entry["caption_member"])].rpartition(".")[2]


def _span(entry: np.void, member: str) -> tuple[int, int]:
    """Return offset and size of a member, in bytes."""
    return (int(entry[f"{member}_block"]) * tar_scan.BLOCK, int(entry[f"{member}_size"]))


def load_index(shards: Sequence[str], layout: Layout, name: str) -> TarIndex:
    """Load the cached index of tar files, or build it.

    The cache is a hidden file next to the first shard, or in `~/.cache/infcl_jax` where that folder is not writable or
    not local. Shards whose size or modification time changed are scanned again; without an intact cache, all are. A
    cache that comes with the shards can name no other files than these.

    Raises:
      FileNotFoundError: shards do not exist.
      ValueError: a shard is no regular file, or it is compressed.
    """
    stamps = _stamps(shards, name)
    for cache in _cache_files(shards, layout):
        try:
            cached, entries = _read(cache)
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            _logger.warning("%s: the index is built again: %s", name, error)
            continue
        if [shard[:2] for shard in cached] == stamps:
            return _index(shards, layout, cached, entries, cache)
        return _build(shards, stamps, layout, name, cached, entries)
    return _build(shards, stamps, layout, name, [], np.zeros(0, ENTRY_DTYPE))


def _stamps(shards: Sequence[str], name: str) -> list[FileStamp]:
    def stamp_or_none(path: str) -> FileStamp | None:
        try:
            return files.stamp(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ValueError(f"a shard of {name} cannot be read: {error}") from error

    with concurrent.futures.ThreadPoolExecutor(16) as threads:  # waits for network file systems
        stamps = list(threads.map(stamp_or_none, shards))
    missing = [shard for shard, stamp in zip(shards, stamps, strict=True) if stamp is None]
    if missing:
        raise FileNotFoundError(
            f"{len(missing)} of the {len(shards)} shards of {name} do not exist, the first is {missing[0]}; "
            "check the path and the pattern"
        )
    return [stamp for stamp in stamps if stamp is not None]


def _cache_files(shards: Sequence[str], layout: Layout) -> list[str]:
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
        names = [os.path.relpath(shard, base) if base else files.absolute(shard) for shard in shards]
        digest = hashlib.sha256(json.dumps([layout, names]).encode()).hexdigest()[:16]
        result.append(str(folder / f".tar_index_{digest}"))
    return result


def _read(path: str, *, checksum: bool = True) -> tuple[list[_Shard], np.ndarray]:
    """Read and check the entries of shards, and map the entries of samples."""
    with open_regular(path) as file:
        end = os.fstat(file.fileno()).st_size
        magic, size, expected = _START.unpack(file.read(_START.size).ljust(_START.size, b"\0"))
        start = -(-(file.tell() + size) // _ALIGNMENT) * _ALIGNMENT
        if magic != _MAGIC or start > end:
            raise ValueError(f"expected a tar index at {path}, got another file or version")
        text = file.read(start - file.tell())
        shards = parse_json(text[:size], path).get("shards")
        if not isinstance(shards, list) or not all(map(_is_shard, shards)):
            raise ValueError(f"expected the shards of a tar index in {path}, got other JSON")
        count = sum(shard[2] for shard in shards)
        if end != start + count * ENTRY_DTYPE.itemsize:
            raise ValueError(f"expected {count} samples in the tar index {path}, got {end} bytes")
        entries = np.memmap(file, ENTRY_DTYPE, "r", start, (count,)) if count else np.zeros(0, ENTRY_DTYPE)
    if checksum and zlib.crc32(entries.view(np.uint8), zlib.crc32(text)) != expected:
        raise ValueError(f"expected another checksum of the tar index {path}; it is damaged")
    return [_Shard(*shard) for shard in shards], entries


def _is_shard(shard: Any) -> bool:
    """Check the header entry of a shard."""
    match shard:
        case [int(size), str(), int(count), dict(dropped), str() | None, str() | None]:
            numbers = [size, count, *dropped.values()]
            valid = all(isinstance(number, int) and 0 <= number < 2**63 for number in numbers)
            return valid and count <= size // tar_scan.BLOCK
    return False


def _index(
    paths: Sequence[str], layout: Layout, shards: Sequence[_Shard], entries: np.ndarray, cache: str | None
) -> TarIndex:
    starts = starts_of(shard.samples for shard in shards)
    dropped: dict[str, int] = {}
    for shard in shards:
        for reason, count in shard.dropped.items():
            dropped[reason] = dropped.get(reason, 0) + count
    dotted = next((shard.dotted for shard in shards if shard.dotted), None)
    problems = tuple(f"{path}: {shard.problem}" for path, shard in zip(paths, shards, strict=True) if shard.problem)
    return TarIndex(Files(paths), layout.captions, starts, entries, dropped, dotted, problems, cache)


def _build(
    shards: Sequence[str],
    stamps: Sequence[FileStamp],
    layout: Layout,
    name: str,
    old: Sequence[_Shard],
    old_entries: np.ndarray,
) -> TarIndex:
    """Scan the changed shards and cache the new index."""
    starts = starts_of(shard.samples for shard in old)
    unchanged = {
        number: ShardScan(old_entries[starts[number] : starts[number + 1]].tobytes(), *shard[3:])
        for number, (shard, stamp) in enumerate(zip(old, stamps, strict=False))
        if shard[:2] == stamp
    }
    changed = [number for number in range(len(shards)) if number not in unchanged]
    by_number = unchanged | dict(zip(changed, _scan_all([shards[i] for i in changed], layout, name), strict=True))
    scans = [by_number[number] for number in range(len(shards))]
    for shard, scan in zip(shards, scans, strict=True):
        if scan.problem and scan.problem.startswith(tar_scan.COMPRESSED):
            raise ValueError(files.compressed(shard, scan.problem.rpartition(" ")[2]))
    new = [
        _Shard(*stamp, len(scan.entries) // ENTRY_DTYPE.itemsize, scan.dropped, scan.dotted, scan.problem)
        for stamp, scan in zip(stamps, scans, strict=True)
    ]
    contents = [scan.entries for scan in scans]
    for cache in _cache_files(shards, layout):
        with contextlib.suppress(OSError):
            _write(cache, new, contents)
            return _index(shards, layout, new, _read(cache)[1], cache)
    return _index(shards, layout, new, np.frombuffer(b"".join(contents), ENTRY_DTYPE), None)


def _write(path: str, shards: Sequence[_Shard], contents: Sequence[bytes]) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    text = json.dumps({"shards": shards}).encode()
    size = len(text)
    text += bytes(-(_START.size + size) % _ALIGNMENT)
    checksum = functools.reduce(lambda value, data: zlib.crc32(data, value), contents, zlib.crc32(text))
    # Processes that build the same index at the same time each rename a complete file.
    with replacing(path) as temporary, open(temporary, "wb") as file:
        file.write(_START.pack(_MAGIC, size, checksum) + text)
        file.writelines(contents)


def _scan_all(shards: Sequence[str], layout: Layout, name: str) -> list[ShardScan]:
    """Scan shards in parallel and log the progress."""
    processes = min(usable_cores(), _MAX_PROCESSES)
    local = not any(files.is_remote(shard) for shard in shards)
    scan_batch: Callable[[Sequence[str], Layout], list[ShardScan]] = _scan_here
    batch = 1
    if local and processes > 1 and len(shards) > _FEW_SHARDS:
        scan_batch = _scan_in_process
        batch = min(64, -(-len(shards) // (4 * processes)))
    batches = list(itertools.batched(shards, batch))
    progress = Progress(f"{name}: indexed", len(shards), "shards", _logger.info)
    result: list[ShardScan] = []
    with concurrent.futures.ThreadPoolExecutor(processes if local else 4 * processes) as threads:
        for scans in threads.map(scan_batch, batches, itertools.repeat(layout)):
            result += scans
            progress.add(len(scans))
    return result


def _scan_here(shards: Sequence[str], layout: Layout) -> list[ShardScan]:
    scans = []
    for shard in shards:
        if files.is_remote(shard):
            with files.open_file(shard, _REMOTE_WINDOW) as file:
                scans.append(tar_scan.scan(file, files.stamp(shard).size, layout))
        else:
            scans.append(tar_scan.scan_file(shard, layout))
    return scans


def _scan_in_process(shards: Sequence[str], layout: Layout) -> list[ShardScan]:
    """Scan shards in a new Python process, because parsing holds the GIL."""
    # A script of its own: spawned workers of `multiprocessing` would import the user's main module and JAX.
    command = [sys.executable, "-I", tar_scan.__file__]
    paths = [os.path.abspath(shard) for shard in shards]
    process = subprocess.run(command, input=pickle.dumps((paths, tuple(layout))), stdout=subprocess.PIPE, check=True)
    return [ShardScan(*scan) for scan in pickle.loads(process.stdout)]
