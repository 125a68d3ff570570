"""Common code of the benchmarks.

Flags, devices, timing, reference GEMM, tables, records and plots. Needs only JAX and the losses, neither the data
pipeline nor `ml_collections`.
"""

import datetime
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags, logging
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from matplotlib.axes import Axes

from infcl_jax import distributed

BATCH = flags.DEFINE_list("batch", "1024,4096", "Global batch sizes b.")
DEVICES = flags.DEFINE_integer("devices", None, "Number of devices to use; all by default.", lower_bound=1)
REPEATS = flags.DEFINE_integer(
    "repeats", 5, "Timed runs of each program; the median is reported. 0: time its first call.", lower_bound=0
)
OUTPUT = flags.DEFINE_string("output", None, "Folder of the JSON lines and the plot.")

OUT_OF_MEMORY = "out of memory"

# Least duration of a timed run, in seconds. Launch overhead (0.1 to 0.3 ms) is below 1 % of it.
_TIMED_SECONDS = 0.05

# Columns of a table: heading, key of the record, format.
Columns = Sequence[tuple[str, str, str]]

# Columns of a function that is timed alone and with its gradients.
PASSES: Columns = (
    ("forward ms", "forward_ms", ".3f"),
    ("backward ms", "backward_ms", ".3f"),
    ("total ms", "total_ms", ".3f"),
    ("forward TFLOP/s", "forward_tflops", ".3g"),
    ("TFLOP/s", "tflops", ".3g"),
    ("of product", "of_product", ".1%"),
)


def run(command: Callable[[], Any]) -> None:
    """Parse the flags and call `command()`.

    User errors exit with status 1 and one line on stderr.
    """

    def main(argv: list[str]) -> None:
        logging.set_verbosity(logging.WARNING)
        try:
            if len(argv) > 1:
                raise ValueError(f"expected flags only (--name=value), got {' '.join(argv[1:])}")
            command()
        except (ValueError, OSError) as error:
            sys.exit(_one_line(error))

    app.run(main, flags_parser=_parse_flags)


def _parse_flags(argv: list[str]) -> list[str]:
    try:
        return flags.FLAGS(argv)
    except flags.Error as error:
        sys.exit(_one_line(error))


def _one_line(error: Exception) -> str:
    return f"error: {' '.join(str(error).split())}"


def integers(name: str, texts: Sequence[str]) -> tuple[int, ...]:
    """Parse the values of a flag that lists positive integers.

    Args:
      name: name of the flag.
      texts: values of the flag.

    Raises:
      ValueError: the list is empty, or a value is not a positive integer.
    """
    if not texts or not all(text.isdecimal() and int(text) for text in texts):
        raise ValueError(f"expected --{name} to be positive integers such as 4096,16384, got {','.join(texts)!r}")
    return tuple(map(int, texts))


def names(flag: str, texts: Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
    """Check the values of a flag that lists names.

    Args:
      flag: name of the flag.
      texts: values of the flag.
      known: valid names.

    Raises:
      ValueError: the list is empty, or a name is unknown.
    """
    unknown = [text for text in texts if text not in known]
    if unknown or not texts:
        raise ValueError(f"expected --{flag} among {', '.join(known)}, got {', '.join(unknown)!r}")
    return tuple(texts)


def batch_sizes() -> tuple[int, ...]:
    """Parse the values of `--batch`.

    Raises:
      ValueError: the list is empty, or a value is not a positive integer.
    """
    return integers("batch", BATCH.value)


def output_folder() -> Path:
    """Return the folder of `--output`.

    Raises:
      ValueError: `--output` is missing.
    """
    if not OUTPUT.value:
        raise ValueError("expected --output, the folder for the results, got none")
    return Path(OUTPUT.value)


def check_even(name: str, sizes: Iterable[int], mesh: Mesh) -> None:
    """Check that a flag's sizes are multiples of the device count.

    Raises:
      ValueError: a size is not.
    """
    if uneven := [size for size in sizes if size % mesh.size]:
        raise ValueError(f"expected --{name} to be multiples of the {mesh.size} devices, got {uneven[0]}")


def start_devices(count: int | None) -> Mesh:
    """Initialize all processes and return the mesh of the first devices.

    Args:
      count: number of devices; None: all.

    Raises:
      ValueError: there are fewer devices, or several processes would not use all of them.
    """
    distributed.initialize()
    devices = jax.devices()
    minimum = 1 if jax.process_count() == 1 else len(devices)  # every process contributes all its devices
    count = len(devices) if count is None else count
    if not minimum <= count <= len(devices):
        raise ValueError(f"expected --devices from {minimum} to {len(devices)}, the devices available, got {count}")
    return distributed.data_mesh(devices[:count])


def seconds(call: Callable[[], Any], repeats: int, least: float = _TIMED_SECONDS) -> float:
    """Measure the median time of a call over several runs.

    The calls of a run are queued without synchronization, which hides launch overhead. On the CPU each call is waited
    for: launch overhead is negligible there, and queued collectives of simulated devices can deadlock over threads.

    Args:
      call: function that returns the arrays to wait for.
      repeats: number of runs; 0: time the first call, initialization included.
      least: least duration of a run, in seconds.

    Returns:
      Seconds per call.
    """
    if not repeats:
        return _elapsed(call, 1)
    jax.block_until_ready(call())  # warm-up: loads the program, connects the devices
    first = _elapsed(call, 1)
    # Every process makes the same number of calls, else their collectives deadlock.
    calls = int(multihost_utils.broadcast_one_to_all(np.int32(math.ceil(least / first))))
    return statistics.median(_elapsed(call, calls) for _ in range(repeats)) / calls


def _elapsed(call: Callable[[], Any], calls: int) -> float:
    wait = jax.default_backend() == "cpu"
    start = time.perf_counter()
    for _ in range(calls):
        results = call()
        if wait:
            jax.block_until_ready(results)
    jax.block_until_ready(results)
    return time.perf_counter() - start


class Program:
    """A function compiled for its arguments, with its time and memory.

    Example:
      >>> program = Program(jax.value_and_grad(loss), parameters)
      >>> program.memory_bytes, program.seconds(repeats=5)
    """

    def __init__(self, function: Callable[..., Any], *args: Any):
        self._function, self._args = function, args
        self._compiled = jax.jit(function).lower(*args).compile()

    def __call__(self) -> Any:
        """Run the program and wait for its results."""
        return jax.block_until_ready(self._compiled(*self._args))

    @property
    def memory_bytes(self) -> int:
        """Workspace of one device in bytes, as planned by XLA.

        Arguments and results are excluded.
        """
        return self._compiled.memory_analysis().temp_size_in_bytes

    def seconds(self, repeats: int) -> float:
        """Measure the median time of a call, see `harness.seconds`."""
        return seconds(lambda: self._compiled(*self._args), repeats)


class Product(NamedTuple):
    """Reference GEMM: a square bf16 matrix product, the ceiling of all rates.

    Attributes:
      size: rows and columns of both factors.
      tflops: measured throughput on one device, in TFLOP/s.
    """

    size: int
    tflops: float

    def __str__(self) -> str:
        return f"{self.size}^3 bf16 product: {self.tflops:.3g} TFLOP/s"


def measure_product(repeats: int) -> Product:
    """Measure the reference GEMM on one device of this process.

    The factors are random: 8192^3, or 1024^3 on the CPU.

    Args:
      repeats: timed runs.
    """
    size = 1024 if jax.default_backend() == "cpu" else 8192
    keys = jax.random.split(jax.random.key(0))
    factors = [jax.random.normal(key, (size, size), jnp.bfloat16) for key in keys]
    return Product(size, tflops(2 * size**3, Program(jnp.matmul, *factors).seconds(repeats)))


def tflops(operations: float, seconds: float, devices: int = 1) -> float:
    """Compute the throughput in TFLOP/s per device.

    Args:
      operations: FLOPs of all devices.
      seconds: time in seconds.
      devices: number of devices.
    """
    return operations / seconds / devices / 1e12


def circumstances(mesh: Mesh) -> dict[str, Any]:
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
    """Collect the figures of one case, complete or until memory runs out.

    Args:
      names: names of all figures.
      figures: iterator that yields figures as they are measured.

    Returns:
      Figures by name, None where missing, and the status: "ok" or "out of memory".
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
    path: Path, columns: Columns, mesh: Mesh, product: Product, case: dict[str, Any], figures: dict[str, Any]
) -> dict[str, Any]:
    """Record a case and print its row of the table.

    Only the leading process writes and prints.

    Args:
      path: file of JSON lines.
      columns: columns of the table.
      mesh: devices.
      product: reference GEMM of the same process.
      case: settings of the measurement.
      figures: results, from `collect`.

    Returns:
      The record: circumstances, case, reference GEMM and figures.
    """
    record = circumstances(mesh) | case | {f"product_{name}": value for name, value in product._asdict().items()}
    record |= figures
    append_record(path, record)
    say(row(columns, record))
    return record


def say(line: str) -> None:
    """Print a line, on the leading process only."""
    if distributed.is_lead():
        print(line, flush=True)


def start_table(about: str, columns: Columns, mesh: Mesh, repeats: int, output: Path) -> Product:
    """Create the output folder, time the reference GEMM, print the header.

    Args:
      about: description of the benchmark.
      columns: columns of the table.
      mesh: devices.
      repeats: timed runs of the reference GEMM.
      output: output folder.

    Returns:
      The reference GEMM.
    """
    if distributed.is_lead():
        output.mkdir(parents=True, exist_ok=True)
    product, context = measure_product(max(1, repeats)), circumstances(mesh)
    say(
        f"{context['device']}, {mesh.size} device(s), {context['processes']} process(es), JAX {context['jax']}; "
        f"{about}; {product}"
    )
    say(_table_line(columns, (heading for heading, *_ in columns)))
    return product


def row(columns: Columns, record: dict[str, Any]) -> str:
    """Format a record as a row of the table."""
    cells = ("-" if record[key] is None else format(record[key], style) for _, key, style in columns)
    return _table_line(columns, cells)


def _table_line(columns: Columns, cells: Iterable[str]) -> str:
    return "  ".join(f"{cell:>{max(len(heading), 9)}}" for cell, (heading, *_) in zip(cells, columns, strict=True))


def over_batches(axes: Axes, records: Sequence[dict[str, Any]], label: str) -> None:
    """Label the axes of a plot over the batch size.

    Args:
      axes: axes of the plot.
      records: records whose batch sizes become ticks.
      label: label of the vertical axis.
    """
    batches = sorted({record["batch"] for record in records})
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [f"{b:,}" for b in batches], fontsize=8)
    axes.set_xlabel("global batch size b")
    axes.set_ylabel(label)
    axes.grid(alpha=0.3)
