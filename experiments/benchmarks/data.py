r"""Benchmark of the data pipeline and its stages.

    python -m experiments.benchmarks.data --config=configs/base.py --config.model=ViT-B/32 --config.batch_size=1024 \
        --output=runs/data [--data='shards-{00000..00041}.tar'] [--kinds=tar,parquet] [--readers=auto,threads:8] \
        [--open_clip_python=PATH]

Reads by the settings of the configuration, as training does. Without `--data` it writes synthetic JPEG files of 640 x
480 pixels and 65 kB. With OpenCLIP installed, its pipeline reads the same tar files with as many workers, in a process
of its own. Prints a table and appends JSON lines to `benchmark_data.jsonl` in the output folder. docs/performance.md
defines the figures.
"""

import contextlib
import dataclasses
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from absl import flags
from jax.sharding import Mesh

from experiments import command, command_line
from experiments.benchmarks import harness, photographs
from infcl_jax import run
from infcl_jax.data import TrainIterator
from infcl_jax.data.parallelism import STAGES, limiting_stage, seconds_name
from infcl_jax.run.build import start_devices
from infcl_jax.runtime.console import say
from infcl_jax.settings import RunConfig, with_changes

RECORDS_FILE = "benchmark_data.jsonl"
OPEN_CLIP = "experiments.benchmarks.open_clip_data"

_KINDS = flags.DEFINE_list("kinds", ["tar"], f"Synthetic datasets, among {', '.join(photographs.KINDS)}.")
_READERS = flags.DEFINE_list("readers", ["auto"], "Readers, such as auto,threads:2,workers:16.")
_SECONDS = flags.DEFINE_float("seconds", 10.0, "Least duration of a measurement.", lower_bound=0.0)
_OPEN_CLIP_PYTHON = flags.DEFINE_string(
    "open_clip_python", sys.executable, "Python with OpenCLIP, PyTorch and webdataset; empty: skip OpenCLIP."
)

_CHUNK_ROWS = 64  # largest chunk of the pipeline, in rows
_BUFFERED_CHUNKS = 4  # largest number of chunks that wait for each reader
_COLUMNS = (
    ("pipeline", "pipeline", "s"),
    ("dataset", "kind", "s"),
    ("readers", "readers", "s"),
    ("images/s", "images_per_second", ",.0f"),
    ("read us", "read_us", ",.0f"),
    ("decode us", "decode_us", ",.0f"),
    ("tokenize us", "tokenize_us", ",.0f"),
    ("concatenate us", "concatenate_us", ",.0f"),
    ("transfer us", "transfer_us", ",.0f"),
    ("first batch s", "first_batch_s", ",.1f"),
    ("limited by", "limiting_stage", "s"),
)
_FIGURES = tuple(key for _, key, _ in _COLUMNS[3:])


@dataclasses.dataclass(frozen=True)
class Readers:
    """Reading threads or worker processes.

    Attributes:
      kind: "auto": chosen from the machine; "threads" or "workers".
      count: number of threads or workers; 0 for "auto".
    """

    kind: str
    count: int = 0

    @classmethod
    def parse(cls, text: str) -> "Readers":
        """Parse "auto", "threads:N" or "workers:N"."""
        kind, _, count = text.partition(":")
        if text == "auto":
            return cls("auto")
        if kind not in ("threads", "workers") or not count.isdecimal() or int(count) < 1:
            raise ValueError(f"expected --readers such as auto, threads:2 or workers:16, got {text!r}")
        return cls(kind, int(count))

    @property
    def settings(self) -> dict[str, int | None]:
        """Settings of a run."""
        return {
            "auto": {},
            "threads": {"num_workers": 0, "num_threads": self.count},
            "workers": {"num_workers": self.count},
        }[self.kind]


def benchmark_from_flags() -> None:
    """Run the benchmark with the settings of the flags."""
    config, output = command.chosen_config(), harness.output_folder()
    readers = [Readers.parse(text) for text in _READERS.value]
    kinds = command_line.names("kinds", _KINDS.value, tuple(photographs.KINDS))
    mesh = start_devices(config)
    output.mkdir(parents=True, exist_ok=True)
    datasets = _given_dataset(config) if photographs.DATA.value else _written_datasets(config, kinds, output)
    say(f"{harness.environment(mesh)['device']}, {len(os.sched_getaffinity(0))} CPU cores, load {_load()}")
    say(harness.header(_COLUMNS))
    for kind, dataset_config in datasets:
        for choice in readers:
            measure(dataset_config, kind, choice, mesh, _SECONDS.value, output, _OPEN_CLIP_PYTHON.value)


def _given_dataset(config: RunConfig) -> Iterator[tuple[str, RunConfig]]:
    yield "given", with_changes(config, {"dataset": photographs.DATA.value})


def _written_datasets(config: RunConfig, kinds: tuple[str, ...], output: Path) -> Iterator[tuple[str, RunConfig]]:
    """Write one dataset after the other, and yield its kind and configuration."""
    count = max(photographs.IMAGES.value, config.batch_size)
    pairs, shards = (
        photographs.samples(count, distinct=photographs.DISTINCT.value),
        min(count, max(4, os.cpu_count() or 1)),
    )
    for kind in kinds:
        folder = output / "datasets" / kind
        dataset = photographs.write(kind, folder, pairs, shards)
        yield kind, with_changes(config, {"dataset": dataset, "data_dir": str(folder)})


def measure(
    config: RunConfig, kind: str, readers: Readers, mesh: Mesh, seconds: float, output: Path, open_clip_python: str
) -> list[dict[str, Any]]:
    """Measure, print and record one dataset and one number of readers.

    Returns:
      The records: one of this pipeline and, for tar files and where it is installed, one of OpenCLIP's.
    """
    config = with_changes(config, readers.settings)
    with contextlib.closing(run.training_data(config, run.training_source(config))) as data:
        chosen = data.parallelism
        figures = pipeline_figures(config, data, mesh, seconds)
    case = {"kind": kind, "batch": config.batch_size, "seconds": seconds, "load": _load(), "cores": chosen.cores}
    counts = {"num_workers": chosen.num_workers, "num_threads": chosen.num_threads}
    name = f"{'workers' if chosen.num_workers else 'threads'}:{chosen.readers}"
    case |= harness.environment(mesh)
    records = [_report(output, case | {"pipeline": "infcl_jax", "readers": name} | counts | figures)]
    if config.dataset.endswith(".tar") and open_clip_python:
        figures = open_clip_figures(config, chosen.readers, seconds, open_clip_python)
        if figures is not None:
            open_clip = {"pipeline": "OpenCLIP", "readers": f"workers:{chosen.readers}", "num_workers": chosen.readers}
            records.append(_report(output, case | open_clip | dict.fromkeys(_FIGURES) | figures))
    return records


def _report(output: Path, record: dict[str, Any]) -> dict[str, Any]:
    """Append and print a record."""
    harness.append_record(output / RECORDS_FILE, record)
    say(harness.row(_COLUMNS, record))
    return record


def pipeline_figures(config: RunConfig, data: TrainIterator, mesh: Mesh, seconds: float) -> dict[str, Any]:
    """Measure the pipeline of training, from files to arrays on the devices.

    Returns:
      Figures by name, see docs/performance.md.
    """
    start = time.perf_counter()
    jax.block_until_ready(run.next_batch(config, data, mesh))
    first_batch = time.perf_counter() - start
    rows, readers = config.batch_size // jax.process_count(), data.parallelism.readers
    buffered = data.parallelism.prefetch_batches + math.ceil(_BUFFERED_CHUNKS * readers * _CHUNK_ROWS / rows)
    for _ in range(buffered):  # read before the start
        jax.block_until_ready(run.next_batch(config, data, mesh))
    before, images, transfer, elapsed, start = data.stats(), 0, 0.0, 0.0, time.perf_counter()
    while not images or elapsed < seconds:
        batch = run.next_batch(config, data, mesh)
        returned = time.perf_counter()
        jax.block_until_ready(batch)
        elapsed = time.perf_counter() - start
        transfer += time.perf_counter() - returned
        images += rows
    stats = {name: value - before.get(name, 0.0) for name, value in data.stats().items()}
    stages = {f"{stage}_us": 1e6 * stats.get(seconds_name(stage), 0.0) / images for stage in STAGES}
    return stages | {
        "images_per_second": images / elapsed,
        "transfer_us": 1e6 * transfer / images,
        "first_batch_s": first_batch,
        "limiting_stage": limiting_stage(stats, readers),
    }


def open_clip_figures(config: RunConfig, workers: int, seconds: float, python: str) -> dict[str, Any] | None:
    """Measure OpenCLIP's pipeline on the same tar files, in a process of its own.

    Returns:
      Figures by name; None if it is not installed or fails, which is printed.
    """
    image_size = run.read_model_config(config).vision.image_size
    values = {"data": config.dataset, "batch": config.batch_size, "workers": workers, "image_size": image_size}
    values |= {"seconds": seconds}
    # The other Python must not import this one's packages.
    environ = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    arguments = [python, "-m", OPEN_CLIP, *(f"--{name}={value}" for name, value in values.items())]
    finished = subprocess.run(arguments, capture_output=True, text=True, env=environ, check=False)
    if finished.returncode:
        reason = (finished.stderr.strip().splitlines() or ["no message"])[-1]
        say(f"OpenCLIP's pipeline is left out: {reason}")
        return None
    return json.loads(finished.stdout.splitlines()[-1])


def _load() -> str:
    """Format the load average of the last minute."""
    return f"{os.getloadavg()[0]:.1f}"


if __name__ == "__main__":
    command.run(benchmark_from_flags)
