"""Search for the largest settings whose plan fits into memory."""

import dataclasses
import math
from collections.abc import Callable

from infcl_jax.planner.api import MemoryPlan, Workload, plan_memory
from infcl_jax.training import NO_CACHE, GradCacheConfig

# Share of the memory limit that a recommended plan may use: plans are within 5 % of measured memory
# (docs/archive/measurements.md).
SAFE_SHARE = 0.95


def largest_batch(workload: Workload, memory_limit: int) -> int:
    """Find the largest batch size that fits, without compilation.

    Examples:
      >>> run = Workload(model=model, optimizer=optax.adamw(1e-3), batch_size=64)
      >>> largest_batch(run, memory_limit=2**27)
      4015

    Args:
      workload: settings of the step; `batch_size` is ignored.
      memory_limit: bytes that JAX may use on a device.

    Returns:
      A multiple of the chunk size, or of the device count without one.

    Raises:
      ValueError: the smallest batch does not fit.
    """
    step = workload.cache.chunk_size or workload.devices

    def fits(count: int) -> bool:
        return plan_memory(dataclasses.replace(workload, batch_size=step * count), memory_limit).fits

    return step * _largest(fits, f"a batch of {step}")


def largest_chunk_size(workload: Workload, memory_limit: int) -> int:
    """Find the largest chunk size that fits, without compilation.

    Examples:
      >>> run = Workload(model=model, optimizer=optax.adamw(1e-3), batch_size=8192)
      >>> largest_chunk_size(run, memory_limit=2**27)
      4096

    Args:
      workload: settings of the step; `cache.chunk_size` is ignored.
      memory_limit: bytes that JAX may use on a device.

    Returns:
      The device count times a power of two, or the batch size if that is smaller.

    Raises:
      ValueError: a chunk of one row per device does not fit.
    """
    devices, batch_size = workload.devices, workload.batch_size
    sizes = [min(batch_size, devices << power) for power in range(math.ceil(math.log2(workload.block_rows)) + 1)]

    def fits(count: int) -> bool:
        return count <= len(sizes) and plan_memory(workload.with_cache(chunk_size=sizes[count - 1]), memory_limit).fits

    return sizes[_largest(fits, f"a chunk of {devices} of the batch of {batch_size}") - 1]


def largest_keep(workload: Workload, memory_limit: int) -> int:
    """Find the largest number of stored chunks that fits, without compilation.

    Examples:
      >>> run = Workload(
      ...     model=model, optimizer=optax.adamw(1e-3), batch_size=2048, cache=GradCacheConfig(chunk_size=256)
      ... )
      >>> largest_keep(run, memory_limit=2**27)
      8

    Args:
      workload: settings with a chunk size; `cache.keep` is ignored.
      memory_limit: bytes that JAX may use on a device.

    Returns:
      Number of chunks that can store activations; 0 if not even one fits.

    Raises:
      ValueError: the workload has no chunk size.
    """
    if workload.cache.chunk_size is None:
        raise ValueError("expected a chunk_size, to choose the number of stored chunks, got None; set chunk_size")
    chunks = math.ceil(workload.batch_size / workload.cache.chunk_size)

    def fits(count: int) -> bool:
        return count <= chunks and plan_memory(workload.with_cache(keep=count), memory_limit).fits

    return _largest(fits)


def store_activations(workload: Workload, memory_limit: int) -> Workload:
    """Store as many activations as fit.

    If the activations of all chunks fit, they are all stored. Otherwise residual streams come first, then whole chunks:
    a GiB of residual streams saves about twice the time that a GiB of chunks saves (docs/archive/measurements.md).

    Examples:
      >>> run = Workload(
      ...     model=model, optimizer=optax.adamw(1e-3), batch_size=2048, cache=GradCacheConfig(chunk_size=256)
      ... )
      >>> store_activations(run, memory_limit=2**30).cache.keep
      8

    Args:
      workload: settings with a chunk size. `keep` is replaced; `keep_residual` may become True.
      memory_limit: bytes that JAX may use on a device, times `SAFE_SHARE` if a run depends on the result.

    Returns:
      The workload with new `keep` and `keep_residual`.

    Raises:
      ValueError: the workload has no chunk size.
    """
    chunks_stored = workload.with_cache(keep=largest_keep(workload, memory_limit))
    residuals_stored = workload.with_cache(keep=0, keep_residual=True)
    if chunks_stored.stored_rows == chunks_stored.block_rows or not plan_memory(residuals_stored, memory_limit).fits:
        return chunks_stored
    return residuals_stored.with_cache(keep=largest_keep(residuals_stored, memory_limit))


def recommended_cache(workload: Workload, memory_limit: int) -> GradCacheConfig:
    """Choose the gradient caching that fits and recomputes least.

    No caching if the whole batch fits. Otherwise large chunks, with as many stored activations as fit. The batch moves
    to host memory only if no chunks fit otherwise.

    Examples:
      >>> run = Workload(model=model, optimizer=optax.adamw(1e-3), batch_size=4096)
      >>> recommended_cache(run, memory_limit=2**27)
      GradCacheConfig(chunk_size=2048, passage_chunk_size=None, keep=2, keep_residual=False, offload='none')

    Args:
      workload: settings of the step. Of `cache` only the offload is considered.
      memory_limit: bytes that JAX may use on a device; plans use at most `SAFE_SHARE` of it.

    Raises:
      ValueError: no settings fit.
    """
    limit = int(SAFE_SHARE * memory_limit)
    if plan_memory(dataclasses.replace(workload, cache=NO_CACHE), limit).fits:
        return NO_CACHE
    for offload in dict.fromkeys((workload.cache.offload, "host")):
        smallest = GradCacheConfig(chunk_size=workload.devices, offload=offload)
        chunked = dataclasses.replace(workload, cache=smallest)
        if plan_memory(chunked, limit).fits:
            break
    largest = largest_chunk_size(chunked, limit)  # raises if no offload fits
    # Smaller chunks need less transient memory, which leaves more for stored activations.
    sizes = [largest // divisor for divisor in (1, 2, 4) if not largest % (divisor * workload.devices)]
    candidates = [store_activations(chunked.with_cache(chunk_size=size), limit) for size in sizes]
    return min(candidates, key=_recomputed_share).cache


def fitting_plan(workload: Workload, memory_limit: int) -> MemoryPlan:
    """Plan a workload, with the recommended gradient caching if it does not fit.

    Examples:
      >>> run = Workload(model=model, optimizer=optax.adamw(1e-3), batch_size=4096)
      >>> fitting_plan(run, memory_limit=2**27).workload.cache.chunk_size
      2048

    Args:
      workload: settings of the step.
      memory_limit: bytes that JAX may use on a device.

    Raises:
      ValueError: nothing fits.
    """
    plan = plan_memory(workload, memory_limit)
    if plan.peak <= SAFE_SHARE * memory_limit:
        return plan
    cache = recommended_cache(workload, memory_limit)
    return plan_memory(dataclasses.replace(workload, cache=cache), memory_limit)


def _recomputed_share(workload: Workload) -> float:
    """Fraction of the forward GEMMs that is recomputed."""
    recomputed = 1 - workload.stored_rows / workload.block_rows
    # A stored residual stream saves 5/12 of a transformer's forward GEMMs, see `cached_value_and_grad`.
    return recomputed * (7 / 12 if workload.cache.keep_residual else 1)


def _largest(fits: Callable[[int], bool], least: str | None = None) -> int:
    """Find the largest count that fits by doubling, then bisection.

    `fits` must be False above some count. If 1 does not fit, returns 0, or raises an error that names the `least`.
    """
    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    if not low and least:
        raise ValueError(
            f"expected memory for {least} with these settings, got less; use smaller chunks, more devices or a smaller"
            " model"
        )
    return low
