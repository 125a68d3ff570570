"""Flags, devices, tables, records and plots of the benchmarks.

Needs neither the data pipeline nor `ml_collections`.
"""

import datetime
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from absl import flags
from jax.sharding import Mesh
from matplotlib.axes import Axes

from experiments import command_line
from experiments.benchmarks.timing import Gemm, measure_gemm
from infcl_jax import distributed
from infcl_jax.runtime.console import say

BATCH = flags.DEFINE_list("batch", "1024,4096", "Global batch sizes b.")
DEVICES = flags.DEFINE_integer("devices", None, "Number of devices to use; all by default.", lower_bound=1)
REPEATS = flags.DEFINE_integer(
    "repeats", 5, "Timed runs of each program; the median is reported. 0: time its first call.", lower_bound=0
)
OUTPUT = flags.DEFINE_string("output", None, "Folder of the JSON lines and the plot.")

OUT_OF_MEMORY = "out of memory"

# Columns of a table: heading, key of the record, format.
Columns = Sequence[tuple[str, str, str]]

# Columns of a function that is timed alone and with its gradients.
PASSES: Columns = (
    ("forward ms", "forward_ms", ".3f"),
    ("backward ms", "backward_ms", ".3f"),
    ("total ms", "total_ms", ".3f"),
    ("forward TFLOP/s", "forward_tflops", ".3g"),
    ("TFLOP/s", "tflops", ".3g"),
    ("% of GEMM", "gemm_fraction", ".1%"),
)


def batch_sizes() -> tuple[int, ...]:
    """Parse the values of `--batch`."""
    return command_line.integers("batch", BATCH.value)


def output_folder() -> Path:
    """Return the folder of `--output`."""
    if not OUTPUT.value:
        raise ValueError("expected --output, the folder for the results, got none")
    return Path(OUTPUT.value)


def check_even(name: str, sizes: Iterable[int], mesh: Mesh) -> None:
    """Check that a flag's sizes are multiples of the device count."""
    if uneven := [size for size in sizes if size % mesh.size]:
        raise ValueError(f"expected --{name} to be multiples of the {mesh.size} devices, got {uneven[0]}")


def start_devices(count: int | None, *, gpu_decode: bool = False) -> Mesh:
    """Initialize all processes and return the mesh of the first devices.

    Args:
      count: number of devices; None: all.
      gpu_decode: whether the GPUs may decode images.
    """
    distributed.initialize(gpu_decode=gpu_decode)
    devices = jax.devices()
    minimum = 1 if jax.process_count() == 1 else len(devices)  # every process contributes all its devices
    count = len(devices) if count is None else count
    if not minimum <= count <= len(devices):
        raise ValueError(f"expected --devices from {minimum} to {len(devices)}, the devices available, got {count}")
    return distributed.data_mesh(devices[:count])


def environment(mesh: Mesh) -> dict[str, Any]:
    """Return date, software and hardware of a measurement, for its record."""
    device = mesh.devices.flat[0]
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "jax": jax.__version__,
        "platform": device.platform,
        "device": device.device_kind,
        "devices": mesh.size,
        "processes": jax.process_count(),
    }


def collect(names: Iterable[str], figures: Iterator[dict[str, Any]]) -> dict[str, Any]:
    """Collect the figures of one case until memory runs out.

    Returns:
      Figures by name, None where missing, and "status": "ok" or "out of memory".
    """
    results: dict[str, Any] = dict.fromkeys(names) | {"status": "ok"}
    try:
        for new in figures:
            results |= new
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        results["status"] = OUT_OF_MEMORY
    return results


def is_out_of_memory(error: jax.errors.JaxRuntimeError) -> bool:
    """Return whether the devices or the host ran out of memory."""
    return "RESOURCE_EXHAUSTED" in str(error)


def append_record(path: Path, record: dict[str, Any]) -> None:
    """Append a record to a file of JSON lines.

    Only the leading process writes.
    """
    if distributed.is_lead():
        with path.open("a") as file:
            file.write(json.dumps(record) + "\n")


def report(
    path: Path, columns: Columns, mesh: Mesh, gemm: Gemm, case: dict[str, Any], figures: dict[str, Any]
) -> dict[str, Any]:
    """Record a case and print its row of the table.

    Only the leading process writes and prints.

    Returns:
      The record: environment, case, reference GEMM and figures.
    """
    record = environment(mesh) | case | {f"gemm_{name}": value for name, value in gemm._asdict().items()}
    record |= figures
    append_record(path, record)
    say(row(columns, record))
    return record


def start_table(about: str, columns: Columns, mesh: Mesh, repeats: int, output: Path) -> Gemm:
    """Create the output folder, time the reference GEMM, print the header."""
    if distributed.is_lead():
        output.mkdir(parents=True, exist_ok=True)
    gemm, context = measure_gemm(max(1, repeats)), environment(mesh)
    say(
        f"{context['device']}, {mesh.size} device(s), {context['processes']} process(es), JAX {context['jax']}; "
        f"{about}; {gemm}"
    )
    say(header(columns))
    return gemm


def header(columns: Columns) -> str:
    """Format the header of the table."""
    return _table_line(columns, (heading for heading, *_ in columns))


def row(columns: Columns, record: dict[str, Any]) -> str:
    """Format a record as a row of the table."""
    cells = ("-" if record[key] is None else format(record[key], style) for _, key, style in columns)
    return _table_line(columns, cells)


def _table_line(columns: Columns, cells: Iterable[str]) -> str:
    return "  ".join(f"{cell:>{max(len(heading), 9)}}" for cell, (heading, *_) in zip(cells, columns, strict=True))


def label_axes(axes: Axes, records: Sequence[dict[str, Any]], label: str) -> None:
    """Label the axes of a plot over the batch size."""
    batches = sorted({record["batch"] for record in records})
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [f"{b:,}" for b in batches], fontsize=8)
    axes.set_xlabel("global batch size b")
    axes.set_ylabel(label)
    axes.grid(alpha=0.3)
