"""Timing and memory of compiled programs, and the reference GEMM."""

import functools
import math
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

# Least duration of a timed run, in seconds. Launch overhead (0.1 to 0.3 ms) is below 1 % of it.
_TIMED_SECONDS = 0.05


def seconds(call: Callable[[], Any], repeats: int, least: float = _TIMED_SECONDS) -> float:
    """Measure the median time of a call over several runs.

    The calls of a run are queued without synchronization, so launches overlap with execution. On the CPU each call is
    synchronized: queued collectives of simulated devices can deadlock, because they compete for threads.

    Args:
      call: function that returns the arrays to wait for.
      repeats: number of runs; 0: time the first call, initialization included.
      least: least duration of a run, in seconds.

    Returns:
      Seconds per call.
    """
    if not repeats:
        return _elapsed(call, 1)
    jax.block_until_ready(call())  # warm-up: loads the program, sets up communicators
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
        """Measure the median time of a call, see `timing.seconds`."""
        return seconds(lambda: self._compiled(*self._args), repeats)


class Gemm(NamedTuple):
    """Reference GEMM: a square bf16 matrix product, to which rates are compared."""

    size: int
    tflops: float

    def __str__(self) -> str:
        return f"{self.size}^3 bf16 GEMM: {self.tflops:.3g} TFLOP/s"


def measure_gemm(repeats: int) -> Gemm:
    """Measure the reference GEMM on one device of this process.

    The size is 8192^3, or 1024^3 on the CPU, with random factors.
    """
    return Gemm(*_square_gemm(jnp.matmul, jnp.bfloat16, repeats))


def fp32_gemm_tflops(repeats: int) -> float:
    """Measure a GEMM of the same size in fp32, without rounding of its factors, in TFLOP/s."""
    matmul = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
    return _square_gemm(matmul, jnp.float32, repeats)[1]


def _square_gemm(matmul: Callable[..., jax.Array], dtype: Any, repeats: int) -> tuple[int, float]:
    """Measure a product of two square matrices: its size and TFLOP/s."""
    size = 1024 if jax.default_backend() == "cpu" else 8192
    keys = jax.random.split(jax.random.key(0))
    factors = [jax.random.normal(key, (size, size), dtype) for key in keys]
    return size, tflops(2 * size**3, Program(matmul, *factors).seconds(repeats))


def tflops(operations: float, seconds: float, devices: int = 1) -> float:
    """Compute the throughput in TFLOP/s per device.

    Args:
      operations: FLOPs of all devices.
      seconds: time in seconds.
      devices: number of devices.
    """
    return operations / seconds / devices / 1e12
