"""Plan tables, and advice after out-of-memory errors."""

import jax

from infcl_jax.ops.pairwise_lse.implementations import TABLE
from infcl_jax.planner.api import MemoryPlan
from infcl_jax.planner.search import best_chunk_size

_KIB, _MIB, _GIB = 1 << 10, 1 << 20, 1 << 30


class OutOfMemory(RuntimeError):
    """Out-of-memory error of a training step.

    The message names the setting to change and ends with the table of the plan.
    """


def format_plan(plan: MemoryPlan) -> str:
    """Format a plan as an aligned table.

    Columns: label, size on one device, percentage of the device's memory (if known), method.
    """
    lines = [
        (source.counts, format_bytes(getattr(plan, name)), _percent(getattr(plan, name), plan.memory), source.method)
        for name, source in plan.sources.items()
    ]
    lines.append(("most at one time", format_bytes(plan.total), _percent(plan.total, plan.memory), "estimate"))
    if plan.memory is not None:
        lines.append(("memory for JAX", format_bytes(plan.memory), "", ""))
    label, size, percent = (max(len(line[i]) for line in lines) for i in range(3))
    rows = [f"{line[0]:{label}}  {line[1]:>{size}}  {line[2]:>{percent}}  {line[3]}".rstrip() for line in lines]
    return "\n".join([_heading(plan), *rows])


def format_bytes(count: int) -> str:
    """Format bytes in KiB, MiB or GiB with one decimal.

    Values below 10 KiB are in B.
    """
    for unit, size in (("GiB", _GIB), ("MiB", _MIB), ("KiB", _KIB)):
        if count >= (size if unit != "KiB" else 10 * size):
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def explain_out_of_memory(error: Exception, plan: MemoryPlan) -> Exception:
    """Convert an out-of-memory error of the training step to `OutOfMemory`.

    Example:
      >>> try:
      ...     state, metrics = step(state, batch)
      ... except jax.errors.JaxRuntimeError as error:
      ...     raise explain_out_of_memory(error, plan)

    Returns:
      `OutOfMemory` with `error` as its cause, if that is a `JaxRuntimeError` with `RESOURCE_EXHAUSTED`; otherwise
      `error`.
    """
    if not isinstance(error, jax.errors.JaxRuntimeError) or "RESOURCE_EXHAUSTED" not in str(error):
        return error
    explained = OutOfMemory(f"the device ran out of memory; {_advice(plan)}.\n{format_plan(plan)}")
    explained.__cause__ = error
    return explained


def _heading(plan: MemoryPlan) -> str:
    w = plan.workload
    keep = f"keep {w.keep}{' and the residual streams' if w.keep_residual else ''}"
    chunks = "" if w.chunk_size is None else f", chunk_size {w.chunk_size}, {keep}, residency {w.residency}"
    return f"memory of each of {w.devices} device(s), batch_size {w.batch_size}{chunks}, loss {w.implementation}"


def _percent(count: int, memory: int | None) -> str:
    return "" if memory is None else f"{100 * count / memory:.1f} %"


def _advice(plan: MemoryPlan) -> str:
    """Name the setting that reduces the largest figure that settings affect."""
    w = plan.workload
    sizes = {
        "activations": plan.activations,
        "kept": plan.kept,
        "batch": plan.batch + plan.next_batch,
        "loss": plan.loss,
        "features": plan.features,
    }
    largest = max(sizes, key=lambda name: sizes[name])
    if largest in ("activations", "kept") and w.chunk_size is None:
        return f"set grad_cache.chunk_size{_suggestion(plan)}: the activations are of the whole batch"
    if largest == "kept":
        return f"set grad_cache.keep below {w.keep}" if w.keep else "set grad_cache.keep_residual to False"
    if largest == "activations" and w.chunk_size > w.devices:
        return f"set grad_cache.chunk_size below {w.chunk_size}{_suggestion(plan)}"
    if largest == "batch" and w.residency == "device" and w.chunk_size is not None:
        return "set grad_cache.residency to host: only three chunks of the batch are then in device memory"
    if largest == "loss" and TABLE[w.implementation].quadratic:
        return f"set implementation to xla or None: memory of {w.implementation} grows with the square of the batch"
    return f"set batch_size below {w.batch_size}, or use more devices"


def _suggestion(plan: MemoryPlan) -> str:
    """Suggest a chunk size that should fit, if the memory is known."""
    if plan.memory is None:
        return ""
    try:
        best = best_chunk_size(plan.workload, plan.memory)
    except ValueError:
        return ""
    return f" ({best} should fit)" if plan.workload.chunk_size is None or best < plan.workload.chunk_size else ""
