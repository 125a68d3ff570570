"""Search for the largest settings whose plan fits into memory."""

import dataclasses
import math
from collections.abc import Callable

from infcl_jax.planner.api import Workload, plan_memory


def largest_batch(workload: Workload, memory: int) -> int:
    """Find the largest batch size that fits, without compilation.

    Args:
      workload: all settings but the batch size. With a fixed chunk size, memory grows only with the features (and with
        the batch, if that is in device memory).
      memory: bytes that JAX may use on a device.

    Returns:
      A multiple of the chunk size, or of the device count without one.

    Raises:
      ValueError: the smallest batch does not fit.
    """
    step = workload.chunk_size or workload.devices

    def fits(count: int) -> bool:
        return plan_memory(dataclasses.replace(workload, batch_size=step * count), memory).fits

    return step * _at_least_one(_largest(fits), f"a batch of {step}")


def best_chunk_size(workload: Workload, memory: int) -> int:
    """Find the largest chunk size that fits, without compilation.

    Args:
      workload: all settings but the chunk size.
      memory: bytes that JAX may use on a device.

    Returns:
      The device count times a power of two; at most the first such number that holds the whole batch.

    Raises:
      ValueError: a chunk of one row per device does not fit.
    """
    devices = workload.devices
    most = math.ceil(math.log2(workload.rows))

    def fits(power: int) -> bool:
        chunk_size = devices << (power - 1)
        return power <= most + 1 and plan_memory(dataclasses.replace(workload, chunk_size=chunk_size), memory).fits

    power = _at_least_one(_largest(fits), f"a chunk of {devices} of the batch of {workload.batch_size}")
    return devices << (power - 1)


def most_kept(workload: Workload, memory: int) -> int:
    """Find the largest `keep` that fits, without compilation.

    Args:
      workload: settings with a chunk size; `keep` is ignored.
      memory: bytes that JAX may use on a device. Leave a margin if a run depends on the result: plans are within 5 %.

    Returns:
      Number of chunks that can store activations; 0 if nothing fits.

    Raises:
      ValueError: `workload.chunk_size` is None.
    """
    if workload.chunk_size is None:
        raise ValueError("expected a chunk_size, to choose the number of stored chunks, got None; set chunk_size")
    chunks = math.ceil(workload.batch_size / workload.chunk_size)

    def fits(count: int) -> bool:
        return count <= chunks and plan_memory(dataclasses.replace(workload, keep=count), memory).fits

    return _largest(fits)


def keep_most(workload: Workload, memory: int) -> Workload:
    """Store as many activations as fit.

    If the activations of all chunks fit, they are all stored. Otherwise residual streams come first, then whole chunks:
    a GiB of residual streams saves about twice the time that a GiB of chunks saves (docs/benchmarks.md).

    Args:
      workload: settings with a chunk size. `keep` is replaced; `keep_residual=True` is not changed.
      memory: bytes that JAX may use on a device.

    Returns:
      The workload with new `keep` and `keep_residual`.

    Raises:
      ValueError: `workload.chunk_size` is None.
    """
    chunks_stored = dataclasses.replace(workload, keep=most_kept(workload, memory))
    streams = dataclasses.replace(workload, keep=0, keep_residual=True)
    if chunks_stored.kept_rows == chunks_stored.rows or not plan_memory(streams, memory).fits:
        return chunks_stored
    return dataclasses.replace(streams, keep=most_kept(streams, memory))


def _at_least_one(count: int, least: str) -> int:
    if not count:
        raise ValueError(
            f"expected memory for {least} at least, got less; use smaller chunks, more devices or a smaller model"
        )
    return count


def _largest(fits: Callable[[int], bool]) -> int:
    """Find the largest count that fits by doubling, then bisection.

    Returns 0 if 1 does not fit.
    """
    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
