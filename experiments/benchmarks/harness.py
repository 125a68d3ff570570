"""What the benchmarks share: flags, devices, timing, the product that sets the ceiling, tables, records, pictures.

Needs neither the data pipeline nor `ml_collections`: it runs wherever JAX and the losses do.
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
DEVICES = flags.DEFINE_integer("devices", None, "The first so many devices; all by default.", lower_bound=1)
REPEATS = flags.DEFINE_integer(
    "repeats", 5, "Timed runs of a program, of which the median counts; 0: its first call counts.", lower_bound=0
)
OUTPUT = flags.DEFINE_string("output", None, "Folder for JSON lines and the picture.")

OUT_OF_MEMORY = "out of memory"

# A timed run lasts at least this long, so that starting a program (0.1 to 0.3 ms) does not show in its time.
_TIMED_SECONDS = 0.05

# Of a table: heading, key of the record, format.
Columns = Sequence[tuple[str, str, str]]

# Of a function that is timed alone and with its gradients.
PASSES: Columns = (
    ("forward ms", "forward_ms", ".3f"),
    ("backward ms", "backward_ms", ".3f"),
    ("total ms", "total_ms", ".3f"),
    ("forward TFLOP/s", "forward_tflops", ".3g"),
    ("TFLOP/s", "tflops", ".3g"),
    ("of product", "of_product", ".1%"),
)


def run(command: Callable[[], Any]) -> None:
    """Parses the flags and calls `command()`; a mistake becomes one line on stderr and exit status 1."""

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
    """The values of a flag that lists positive integers.

    Raises:
      ValueError: there is none, or one of them is something else.
    """
    if not texts or not all(text.isdecimal() and int(text) for text in texts):
        raise ValueError(f"expected --{name} to be positive integers such as 4096,16384, got {','.join(texts)!r}")
    return tuple(map(int, texts))


def names(flag: str, texts: Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
    """The values of a flag that lists some of the known names.

    Raises:
      ValueError: there is none, or one that is not known.
    """
    unknown = [text for text in texts if text not in known]
    if unknown or not texts:
        raise ValueError(f"expected --{flag} among {', '.join(known)}, got {', '.join(unknown)!r}")
    return tuple(texts)


def batch_sizes() -> tuple[int, ...]:
    """The values of `--batch`; errors as `integers`."""
    return integers("batch", BATCH.value)


def output_folder() -> Path:
    """The folder that `--output` names.

    Raises:
      ValueError: it names none.
    """
    if not OUTPUT.value:
        raise ValueError("expected --output, the folder for the results, got none")
    return Path(OUTPUT.value)


def check_even(name: str, sizes: Iterable[int], mesh: Mesh) -> None:
    """Raises `ValueError` unless the devices can share each of a flag's sizes evenly."""
    if uneven := [size for size in sizes if size % mesh.size]:
        raise ValueError(f"expected --{name} to be multiples of the {mesh.size} devices, got {uneven[0]}")


def start_devices(count: int | None) -> Mesh:
    """Joins the other processes, if any, and returns the mesh of the first `count` devices; of all if None.

    Raises:
      ValueError: there are fewer, or one of several processes would have none of them.
    """
    distributed.initialize()
    devices = jax.devices()
    least = 1 if jax.process_count() == 1 else len(devices)  # every process takes part with all of its own
    count = len(devices) if count is None else count
    if not least <= count <= len(devices):
        raise ValueError(f"expected --devices from {least} to {len(devices)}, what there is here, got {count}")
    return distributed.data_mesh(devices[:count])


def seconds(call: Callable[[], Any], repeats: int, least: float = _TIMED_SECONDS) -> float:
    """Median time of a call over several runs.

    The calls of a run follow each other without waiting, so that their start is not measured; not so on the CPU, where
    it takes next to nothing, and where queued collectives of simulated devices can take each other's threads for good.

    Args:
      call: returns the arrays to wait for.
      repeats: runs; 0: the first call counts, with all that only a first call does.
      least: seconds that a run lasts at least.
    """
    if not repeats:
        return _elapsed(call, 1)
    jax.block_until_ready(call())  # loads the program, connects the devices
    first = _elapsed(call, 1)
    calls = int(multihost_utils.broadcast_one_to_all(np.int32(math.ceil(least / first))))  # as many in all processes
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
    """A function compiled for its arguments, with the time and the memory it takes.

    Example:
      >>> program = Program(jax.value_and_grad(loss), parameters)
      >>> program.memory_bytes, program.seconds(repeats=5)
    """

    def __init__(self, function: Callable[..., Any], *args: Any):
        self._function, self._args = function, args
        self._compiled = jax.jit(function).lower(*args).compile()

    def __call__(self) -> Any:
        """Runs the program and waits for its results."""
        return jax.block_until_ready(self._compiled(*self._args))

    @property
    def memory_bytes(self) -> int:
        """Bytes of one device that the program needs beyond its arguments and its results, as XLA plans them."""
        return self._compiled.memory_analysis().temp_size_in_bytes

    def seconds(self, repeats: int) -> float:
        """Median time of a call, see `seconds`."""
        return seconds(lambda: self._compiled(*self._args), repeats)


class Product(NamedTuple):
    """A square bf16 matrix product, the ceiling that rates are compared with.

    Attributes:
      size: rows and columns of both factors.
      tflops: its measured rate on one device, in TFLOP/s.
    """

    size: int
    tflops: float

    def __str__(self) -> str:
        return f"{self.size}^3 bf16 product: {self.tflops:.3g} TFLOP/s"


def measure_product(repeats: int) -> Product:
    """The 8192^3 product of random numbers on one device of this process; 1024^3 on the CPU."""
    size = 1024 if jax.default_backend() == "cpu" else 8192
    keys = jax.random.split(jax.random.key(0))
    factors = [jax.random.normal(key, (size, size), jnp.bfloat16) for key in keys]
    return Product(size, tflops(2 * size**3, Program(jnp.matmul, *factors).seconds(repeats)))


def tflops(operations: float, seconds: float, devices: int = 1) -> float:
    """Rate in TFLOP/s of each device."""
    return operations / seconds / devices / 1e12


def circumstances(mesh: Mesh) -> dict[str, Any]:
    """When and on what a measurement is made; part of every record."""
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
    """The figures of one case and its status; where memory runs out, those before are kept.

    Args:
      names: of all figures. Those that cannot be had are None.
      figures: makes one measurement after the other.
    """
    found: dict[str, Any] = dict.fromkeys(names) | {"status": "ok"}
    try:
        for known in figures:
            found |= known
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        found["status"] = OUT_OF_MEMORY
    return found


def is_out_of_memory(error: jax.errors.JaxRuntimeError) -> bool:
    """Whether memory ran out, on the devices or on the host."""
    return "RESOURCE_EXHAUSTED" in str(error)


def append_record(path: Path, record: dict[str, Any]) -> None:
    """Adds a line to a file of JSON lines; on the leading process only."""
    if distributed.is_lead():
        with path.open("a") as file:
            file.write(json.dumps(record) + "\n")


def report(
    path: Path, columns: Columns, mesh: Mesh, product: Product, case: dict[str, Any], figures: dict[str, Any]
) -> dict[str, Any]:
    """Records a case and prints its line of the table; on the leading process only.

    Args:
      path: of the file of JSON lines.
      columns: of the table.
      mesh: the devices.
      product: of the same run.
      case: what was measured, and how.
      figures: what was found, see `collect`.

    Returns:
      The record: the circumstances, the case, the product and the figures.
    """
    record = circumstances(mesh) | case | {f"product_{name}": value for name, value in product._asdict().items()}
    record |= figures
    append_record(path, record)
    say(row(columns, record))
    return record


def say(line: str) -> None:
    """Prints a line; on the leading process only."""
    if distributed.is_lead():
        print(line, flush=True)


def start_table(about: str, columns: Columns, mesh: Mesh, repeats: int, output: Path) -> Product:
    """Makes the output folder, times the product, and prints what is measured where and the first line of the table.

    Args:
      about: what is measured.
      columns: of the table.
      mesh: the devices.
      repeats: timed runs of the product.
      output: the folder.
    """
    if distributed.is_lead():
        output.mkdir(parents=True, exist_ok=True)
    product, where = measure_product(max(1, repeats)), circumstances(mesh)
    say(
        f"{where['device']}, {mesh.size} device(s), {where['processes']} process(es), JAX {where['jax']}; "
        f"{about}; {product}"
    )
    say(_table_line(columns, (heading for heading, *_ in columns)))
    return product


def row(columns: Columns, record: dict[str, Any]) -> str:
    """What a table shows of a record."""
    cells = ("-" if record[key] is None else format(record[key], style) for _, key, style in columns)
    return _table_line(columns, cells)


def _table_line(columns: Columns, cells: Iterable[str]) -> str:
    return "  ".join(f"{cell:>{max(len(heading), 9)}}" for cell, (heading, *_) in zip(cells, columns, strict=True))


def over_batches(axes: Axes, records: Sequence[dict[str, Any]], label: str) -> None:
    """Labels the axes of a picture of `label` over the batch sizes of the records."""
    batches = sorted({record["batch"] for record in records})
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [f"{b:,}" for b in batches], fontsize=8)
    axes.set_xlabel("global batch size b")
    axes.set_ylabel(label)
    axes.grid(alpha=0.3)
