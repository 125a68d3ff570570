r"""Measure the index of tar files on a synthetic data set.

    python -m experiments.benchmarks.tar_index --shards=100 --samples_per_shard=10000 --folder=/tmp/tar_index

One sparse tar file with images of zeros is hard-linked as every shard, so the set takes little disk space. The times
are those to build the index, to load it from its cache, to unpickle it in a worker process and to read a sample.
"""

import io
import os
import pickle
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from experiments import command_line
from infcl_jax.data import load_source
from infcl_jax.data.sources.tar_scan import BLOCK

_SHARDS = flags.DEFINE_integer("shards", 100, "Number of tar files.", lower_bound=1)
_SAMPLES = flags.DEFINE_integer("samples_per_shard", 10000, "Samples of each tar file.", lower_bound=1)
_IMAGE_BYTES = flags.DEFINE_integer("image_bytes", 65536, "Size of an image file.", lower_bound=1)
_FOLDER = flags.DEFINE_string("folder", None, "Folder of the tar files and the index.")

_READS = 2000  # samples read for the time of one


def write_shard(path: Path, samples: int, image_bytes: int) -> None:
    """Write a sparse tar file of samples with jpg, txt and json."""
    with path.open("wb") as file:
        for index in range(samples):
            for extension, contents in (("jpg", None), ("txt", b"a caption"), ("json", b'{"caption": "a caption"}')):
                member = tarfile.TarInfo(f"{index:09d}.{extension}")
                member.size = image_bytes if contents is None else len(contents)
                file.write(member.tobuf(tarfile.GNU_FORMAT))
                file.write(contents or b"")
                file.seek(-(-(file.tell() + (0 if contents else image_bytes)) // BLOCK) * BLOCK)
        file.truncate(file.tell() + 20 * BLOCK)


def _timed(function: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    result = function()
    return result, time.perf_counter() - start


def main() -> None:
    """Write the shards, then build, load, unpickle and read.

    Raises:
      ValueError: no folder is given.
    """
    if not _FOLDER.value:
        raise ValueError("expected --folder, the folder of the tar files, got none")
    folder = Path(_FOLDER.value)
    folder.mkdir(parents=True, exist_ok=True)
    write_shard(folder / "00000.tar", _SAMPLES.value, _IMAGE_BYTES.value)
    for number in range(1, _SHARDS.value):
        link = folder / f"{number:05d}.tar"
        link.unlink(missing_ok=True)
        os.link(folder / "00000.tar", link)
    dataset = f"{folder}/{{00000..{_SHARDS.value - 1:05d}}}.tar"
    source, build = _timed(lambda: load_source(dataset, "train"))
    _, load = _timed(lambda: load_source(dataset, "train"))
    pickled = pickle.dumps(source)
    _, unpickle = _timed(lambda: pickle.load(io.BytesIO(pickled)))
    rows = np.random.default_rng(0).integers(0, len(source), _READS).tolist()
    _, read = _timed(lambda: [source[row] for row in rows])
    (cache,) = folder.glob(".tar_index_*")
    size = cache.stat().st_size
    print(f"{len(source)} samples in {_SHARDS.value} tar files, {os.cpu_count()} CPU cores")
    print(f"build {build:.1f} s ({build / len(source) * 1e6:.1f} us per sample), load {load:.2f} s")
    print(f"index {size / 1e6:.1f} MB ({size / len(source):.1f} bytes per sample)")
    print(f"pickle {len(pickled) / 1e3:.1f} kB, unpickle {unpickle * 1e3:.1f} ms")
    print(f"read {read / _READS * 1e6:.0f} us per sample")


if __name__ == "__main__":
    command_line.run(main)
