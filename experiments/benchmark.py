"""What the benchmarks share: flags, devices, timing, the product that sets the ceiling, records as JSON lines.

Needs neither the data pipeline nor `ml_collections`: it runs wherever JAX and the losses do.
"""

import datetime
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags, logging
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from infcl_jax import distributed

DEVICES = flags.DEFINE_integer("devices", None, "The first so many devices; all by default.", lower_bound=1)
REPEATS = flags.DEFINE_integer("repeats", 5, "Timed runs of a program, of which the median counts.", lower_bound=1)
OUTPUT = flags.DEFINE_string("output", None, "Folder for JSON lines and the picture.")

# A timed run lasts at least this long, so that starting a program (0.1 to 0.3 ms) does not show in its time.
_TIMED_SECONDS = 0.05


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
        """Median time of a call. Short calls follow each other without waiting, so that their start is not measured."""
        self()  # loads the program, connects the devices
        calls = math.ceil(_TIMED_SECONDS / self._elapsed(1))
        calls = int(multihost_utils.broadcast_one_to_all(np.int32(calls)))  # as many in all processes
        return statistics.median(self._elapsed(calls) for _ in range(repeats)) / calls

    def _elapsed(self, calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            results = self._compiled(*self._args)
        jax.block_until_ready(results)
        return time.perf_counter() - start


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


def append_record(path: Path, record: dict[str, Any]) -> None:
    """Adds a line to a file of JSON lines; on the leading process only."""
    if distributed.is_lead():
        with path.open("a") as file:
            file.write(json.dumps(record) + "\n")


def say(line: str) -> None:
    """Prints a line; on the leading process only."""
    if distributed.is_lead():
        print(line, flush=True)
