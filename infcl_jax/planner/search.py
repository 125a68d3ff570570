"""The largest settings of a training step that fit into the memory, by its plan."""

import dataclasses
import math
from collections.abc import Callable

from infcl_jax.planner.api import Workload, plan_memory


def largest_batch(workload: Workload, memory: int) -> int:
    """The largest batch size that fits, by the formulas alone: nothing is compiled.

    Args:
      workload: all but the batch size. Its chunk size stays, so that memory grows with the features alone (and the
        batch, where that is on the devices).
      memory: bytes that JAX may use of a device.

    Returns:
      A multiple of the devices, and of the chunk size if there is one.

    Raises:
      ValueError: not even the smallest fits.
    """
    step = workload.chunk_size or workload.devices

    def fits(count: int) -> bool:
        return plan_memory(dataclasses.replace(workload, batch_size=step * count), memory).fits

    return step * _at_least_one(_largest(fits), f"a batch of {step}")


def best_chunk_size(workload: Workload, memory: int) -> int:
    """The largest chunk size that fits, by the formulas alone: nothing is compiled.

    Args:
      workload: all but the chunk size.
      memory: bytes that JAX may use of a device.

    Returns:
      A power of two for each device, times the devices; at most the first that holds the whole batch.

    Raises:
      ValueError: not even one row for each device fits.
    """
    devices = workload.devices
    most = math.ceil(math.log2(workload.rows))

    def fits(power: int) -> bool:
        chunk_size = devices << (power - 1)
        return power <= most + 1 and plan_memory(dataclasses.replace(workload, chunk_size=chunk_size), memory).fits

    power = _at_least_one(_largest(fits), f"a chunk of {devices} of the batch of {workload.batch_size}")
    return devices << (power - 1)


def most_kept(workload: Workload, memory: int) -> int:
    """How many chunks' activations fit beside everything else, by the formulas alone: nothing is compiled.

    Args:
      workload: with a chunk size; what it keeps does not matter.
      memory: bytes that JAX may use of a device. Where a run depends on it, leave some: plans are within 5 %.

    Returns:
      From 0, also where nothing fits, to the number of chunks.

    Raises:
      ValueError: there is no chunk size.
    """
    if workload.chunk_size is None:
        raise ValueError("expected a chunk_size, of which some chunks are kept, got None")
    chunks = math.ceil(workload.batch_size / workload.chunk_size)

    def fits(count: int) -> bool:
        return count <= chunks and plan_memory(dataclasses.replace(workload, keep=count), memory).fits

    return _largest(fits)


def keep_most(workload: Workload, memory: int) -> Workload:
    """The workload with as much kept as fits: all chunks, or else first the residual streams and then chunks.

    A GiB of residual streams saves about twice the time that one of chunks saves (docs/benchmarks.md).

    Args:
      workload: as of `most_kept`; residual streams that it keeps already stay.
      memory: likewise.

    Raises:
      ValueError: there is no chunk size.
    """
    kept = dataclasses.replace(workload, keep=most_kept(workload, memory))
    streams = dataclasses.replace(workload, keep=0, keep_residual=True)
    if kept.kept_rows == kept.rows or not plan_memory(streams, memory).fits:
        return kept
    return dataclasses.replace(streams, keep=most_kept(streams, memory))


def _at_least_one(count: int, least: str) -> int:
    if not count:
        raise ValueError(
            f"expected memory for {least} at least, got less; use smaller chunks, more devices or a smaller model"
        )
    return count


def _largest(fits: Callable[[int], bool]) -> int:
    """The largest count that fits, 0 if 1 does not: doubled until it does not fit, then halved in between."""
    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
