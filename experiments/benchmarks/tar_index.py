r"""Measure the index of synthetic tar files and the start of a run.

    python -m experiments.benchmarks.tar_index --folder=/tmp/tar_index --shards=100
    python -m experiments.benchmarks.tar_index --folder=/tmp/tar_index --shards=10000 --repeat_scan
    python -m experiments.benchmarks.tar_index --folder=/tmp/tar_index --shards=10000 --nobuild

One sparse tar file is hard-linked as every shard, so the set takes little disk space. The first command scans every
shard. The second one scans one shard and takes its samples for every other shard, so only the scan is shortened. The
third one measures a new process: it loads the index and reads the first batch of a run that resumes amid its epoch.
"""

import os
import pickle
import resource
import tarfile
import time
import unittest.mock
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from experiments import command_line
from infcl_jax.data import ByteTokenizer, load_source, train_iterator
from infcl_jax.data.encode import encode_jpeg
from infcl_jax.data.sources import tar_index
from infcl_jax.data.sources.tar_scan import BLOCK, Layout, ShardScan, scan_file

_SHARDS = flags.DEFINE_integer("shards", 100, "Number of tar files.", lower_bound=1)
_SAMPLES = flags.DEFINE_integer("samples_per_shard", 10000, "Samples of each tar file.", lower_bound=1)
_IMAGE_BYTES = flags.DEFINE_integer("image_bytes", 65536, "Size of an image file.", lower_bound=4096)
_FOLDER = flags.DEFINE_string("folder", None, "Folder in which synthetic_tars, with the index, is written.")
_BUILD = flags.DEFINE_bool("build", True, "Write the tar files and build their index.")
_REPEAT_SCAN = flags.DEFINE_bool("repeat_scan", False, "Scan one tar file and repeat its samples for all others.")

_READS = 2000  # samples read for the time of one
_BATCH, _IMAGE_SIZE, _SEED = 1024, 224, 0


def write_shard(path: Path, samples: int, image_bytes: int) -> None:
    """Write a sparse tar file of samples with jpg, txt and json."""
    image = encode_jpeg(np.zeros((_IMAGE_SIZE, _IMAGE_SIZE, 3), np.uint8))  # decoders ignore the zeros after it
    sizes = {"jpg": image_bytes}
    contents = {"jpg": image, "txt": b"a caption", "json": b'{"caption": "a caption"}'}
    with path.open("wb") as file:
        for index in range(samples):
            for extension, data in contents.items():
                member = tarfile.TarInfo(f"{index:09d}.{extension}")
                member.size = sizes.get(extension, len(data))
                file.write(member.tobuf(tarfile.GNU_FORMAT) + data)
                file.seek(-(-(file.tell() + member.size - len(data)) // BLOCK) * BLOCK)
        file.truncate(file.tell() + 20 * BLOCK)


def _write_shards(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for path in [*folder.glob("*.tar"), *folder.glob(".tar_index_*")]:
        path.unlink()
    write_shard(folder / "00000.tar", _SAMPLES.value, _IMAGE_BYTES.value)
    for number in range(1, _SHARDS.value):
        os.link(folder / "00000.tar", folder / f"{number:05d}.tar")


def _scan_once(shards: Sequence[str], layout: Layout, name: str) -> list[ShardScan]:
    """Give every shard the samples of the first, in place of `tar_index._scan_all`."""
    scan = scan_file(shards[0], layout)
    return [scan._replace(entries=bytes(bytearray(scan.entries))) for _ in shards]


def _timed(function: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    result = function()
    return result, time.perf_counter() - start


def _anonymous_mib() -> float:
    """Return the memory of this process without the pages of files, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon:"))


def _build(folder: Path, dataset: str) -> None:
    _write_shards(folder)
    scan = _scan_once if _REPEAT_SCAN.value else tar_index._scan_all
    with unittest.mock.patch.object(tar_index, "_scan_all", scan):
        source, seconds = _timed(lambda: load_source(dataset, "train"))
    (cache,) = folder.glob(".tar_index_*")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    scanned = "one scanned" if _REPEAT_SCAN.value else "all scanned"
    print(f"{len(source)} samples in {_SHARDS.value} tar files, {scanned}, {os.cpu_count()} CPU cores")
    print(f"build {seconds:.1f} s ({seconds / len(source) * 1e6:.2f} us per sample), peak memory {peak:.0f} MiB")
    print(f"index {cache.stat().st_size / 1e6:.1f} MB ({cache.stat().st_size / len(source):.1f} bytes per sample)")


def _resume(dataset: str) -> None:
    """Load the index and resume in the middle of an epoch."""
    before = _anonymous_mib()
    source, load = _timed(lambda: load_source(dataset, "train"))
    memory = _anonymous_mib() - before
    size = min(_BATCH, len(source))
    iterator, create = _timed(
        lambda: train_iterator(source, tokenizer=ByteTokenizer(), image_size=_IMAGE_SIZE, batch_size=size, seed=_SEED)
    )
    iterator.set_state({**iterator.get_state(), "next_batch": len(source) // size // 2})
    _, first = _timed(lambda: next(iterator))
    iterator.close()
    pickled = pickle.dumps(source)
    _, unpickle = _timed(lambda: pickle.loads(pickled))
    rows = np.random.default_rng(_SEED).integers(0, len(source), _READS).tolist()
    _, read = _timed(lambda: [source[row] for row in rows])
    print(f"load {load:.2f} s, memory {max(0.0, memory):.0f} MiB and the pages of the index in use")
    print(f"create the iterator {create:.2f} s, first batch of {size} after a resume {first:.2f} s")
    print(f"pickle {len(pickled) / 1e3:.1f} kB, unpickle {unpickle * 1e3:.1f} ms")
    print(f"read {read / _READS * 1e6:.0f} us per sample")


def main() -> None:
    """Write the shards, build their index, and resume from it."""
    if not _FOLDER.value:
        raise ValueError("expected --folder, the folder of the tar files, got none")
    folder = Path(_FOLDER.value) / "synthetic_tars"  # its tar files are replaced, others are left alone
    dataset = f"{folder}/{{00000..{_SHARDS.value - 1:05d}}}.tar"
    if _BUILD.value:
        _build(folder, dataset)
    _resume(dataset)


if __name__ == "__main__":
    command_line.run(main)
