"""Tables of memory and time, recommended settings, and advice after out-of-memory errors."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from infcl_jax.ops.pairwise.implementations import TABLE
from infcl_jax.planner.api import MemoryPlan, plan_memory
from infcl_jax.planner.search import SAFE_SHARE, recommended_cache
from infcl_jax.planner.times import PHASES, StepTime
from infcl_jax.training import NO_CACHE, GradCacheConfig
from infcl_jax.training.compiled_step import OutOfMemory, is_out_of_memory

_MIB = 1 << 20

# Label in the table, field of the plan, source of the figure.
_COMPONENTS = (
    ("parameters", "parameters", "exact"),
    ("optimizer state", "optimizer", "exact"),
    ("moving averages", "ema", "exact"),
    ("sample state", "samples", "exact"),
    ("teacher", "teacher", "exact"),
    ("gradients", "gradients", "exact"),
    ("updates", "updates", "exact"),
    ("batch", "batch", "exact"),
    ("next batch (prefetched)", "next_batch", "exact"),
    ("features and gradients", "features", "exact"),
    ("stored activations", "stored", "traced"),
    ("transient activations", "transient", "traced"),
    ("loss workspace", "loss", "formula"),
)


def format_plan(plan: MemoryPlan) -> str:
    """Format a plan as an aligned table of the components that take memory.

    Columns: component, MiB on each device, percentage of the memory limit (if known), source. "traced" figures come
    from the shapes in the encoders' jaxprs, see `plan_memory`. "formula" figures come from `loss_workspace`. The peak
    is at most the sum: not all components are live at the same time.

    Examples:
      >>> plan = plan_memory(Workload(model=model, optimizer=optax.adamw(1e-3), batch_size=64))
      >>> print(format_plan(plan))
      memory per device: 1 device(s), batch_size 64, no gradient caching, implementation xla
      component                MiB  source
      parameters               0.1  exact
      optimizer state ...
    """
    limit = plan.memory_limit
    components = [(label, getattr(plan, name), source) for label, name, source in _COMPONENTS]
    sizes = [component for component in components if component[1]] + [("peak", plan.peak, "estimate")]
    rows: list[tuple[str, ...]] = [("component", "MiB", "% of limit", "source")]
    rows += [(label, _mib(size), f"{100 * size / (limit or 1):.1f}", source) for label, size, source in sizes]
    if limit is None:
        rows = [(*row[:2], row[3]) for row in rows]
    else:
        rows.append(("limit", _mib(limit), "100.0", ""))
    w = plan.workload
    heading = f"memory per device: {w.devices} device(s), batch_size {w.batch_size}, {w.cache}, implementation "
    return f"{heading}{w.implementation}\n{aligned(rows, left=(0, len(rows[0]) - 1))}"


def plan_components(plan: MemoryPlan) -> dict[str, int]:
    """Return the bytes of each component that takes memory, by its label in `format_plan`.

    Examples:
      >>> plan = plan_memory(Workload(model=model, optimizer=optax.adamw(1e-3), batch_size=64))
      >>> list(plan_components(plan))[:3]
      ['parameters', 'optimizer state', 'gradients']
    """
    return {label: size for label, name, _ in _COMPONENTS if (size := getattr(plan, name))}


def describe_plan(plan: MemoryPlan) -> str:
    """Format a plan and the flags of the recommended gradient caching.

    Without a memory limit, only the table is returned.

    Examples:
      >>> run = Workload(model=model, optimizer=optax.adamw(1e-3), batch_size=4096)
      >>> print(describe_plan(plan_memory(run, memory_limit=2**27)))
      memory per device: 1 device(s), batch_size 4096, no gradient caching, implementation xla
      component ...
      does not fit; recommended: --config.grad_cache.chunk_size=2048 --config.grad_cache.keep=2
    """
    table = format_plan(plan)
    if plan.memory_limit is None:
        return table
    verdict = "fits" if plan.fits else "does not fit"
    # A plan that fits without caching needs no search, whose traces take seconds.
    found = plan.workload.cache == NO_CACHE and plan.peak <= SAFE_SHARE * plan.memory_limit
    try:
        cache = NO_CACHE if found else recommended_cache(plan.workload, plan.memory_limit)
    except ValueError as error:
        return f"{table}\n{verdict}; {error}"
    flags = _flags(cache, plan.workload.cache)
    return f"{table}\n{verdict}; recommended: {flags or 'no change'}"


def explain_out_of_memory(error: Exception, plan: MemoryPlan) -> Exception:
    """Convert an out-of-memory error of the training step to `OutOfMemory`.

    Examples:
      >>> plan = plan_memory(Workload(model=model, optimizer=optax.adamw(1e-3), batch_size=64))
      >>> def step(state, batch):
      ...     raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
      >>> try:
      ...     state, metrics = step(None, None)
      ... except jax.errors.JaxRuntimeError as error:
      ...     print(explain_out_of_memory(error, plan))
      the device ran out of memory; ...

    Returns:
      `OutOfMemory` with `error` as its cause, if that is a `JaxRuntimeError` with `RESOURCE_EXHAUSTED`; otherwise
      `error`.
    """
    if not is_out_of_memory(error):
        return error
    explained = OutOfMemory(f"the device ran out of memory; {_advice(plan)}{_suggestion(plan)}.\n{format_plan(plan)}")
    explained.__cause__ = error
    return explained


def format_time(time: StepTime, total_steps: int | None = None) -> str:
    """Format an estimate and its phases in milliseconds.

    Examples:
      >>> config = model_config("ViT-B/32", dtype="bfloat16")
      >>> run = Workload(model=config, optimizer=optax.adamw(1e-3), batch_size=4096, implementation="mosaic_gpu")
      >>> print(format_time(step_time(run, "H200"), total_steps=100_000))
      estimated step: 356 ms, 11,504 images/s on 1 H200-141 (rates measured); 100,000 steps take 9.9 hours
      forward 127, backward 228, loss 0.3, update 1.2 ms

    Args:
      time: estimate of a step.
      total_steps: steps of the run; None: unknown.
    """
    source = "rates measured" if time.measured else "extrapolated, not measured"
    gpus = f"{time.workload.devices:,} {time.device.name}"
    line = (
        f"estimated step: {_milliseconds(time.total)} ms, {time.images_per_second:,.0f} images/s on {gpus} ({source})"
    )
    if total_steps is not None:
        line += f"; {total_steps:,} steps take {duration(total_steps * time.total)}"
    phases = [f"{phase} {_milliseconds(getattr(time, phase))}" for phase in PHASES if getattr(time, phase) > 0]
    return f"{line}\n{', '.join(phases)} ms"


def format_scaling(
    times: Mapping[int, StepTime], plans: Mapping[int, MemoryPlan], total_steps: int | None = None
) -> str:
    """Format estimates on several numbers of GPUs as a table.

    The efficiency is the rate per GPU relative to that in the first row. A batch that does not fit without changes has
    the gradient caching that `recommended_cache` finds.

    Examples:
      >>> config = model_config("ViT-B/32", dtype="bfloat16")
      >>> run = Workload(model=config, optimizer=optax.adamw(1e-3), batch_size=32_768, implementation="mosaic_gpu")
      >>> limit = device_named("H200").memory_limit
      >>> with jax.sharding.use_abstract_mesh(device_named("H200").mesh):
      ...     plans = {count: fitting_plan(on_devices(run, count), limit) for count in (8, 64)}
      >>> times = {count: step_time(plan.workload, "H200") for count, plan in plans.items()}
      >>> print(format_scaling(times, plans))
      GPUs  GiB/GPU  gradient caching     step ms  images/s  efficiency
         8    112.6  no gradient caching      361    90,773        100%
        64     16.3  no gradient caching       76   428,977         59%

    Args:
      times: estimates by number of GPUs.
      plans: memory plans of the same workloads.
      total_steps: steps of the run, for the last column; None: unknown.
    """
    first = next(iter(times.values()))
    base = first.images_per_second / first.workload.devices
    heading = ["GPUs", "GiB/GPU", "gradient caching", "step ms", "images/s", "efficiency"]
    rows = [heading + ["run"] * (total_steps is not None)]
    for count, time in times.items():
        row = [
            f"{count:,}",
            f"{plans[count].peak / 2**30:,.1f}",
            str(time.workload.cache),
            _milliseconds(time.total),
            f"{time.images_per_second:,.0f}",
            f"{time.images_per_second / count / base:.0%}",
        ]
        rows.append(row if total_steps is None else [*row, duration(total_steps * time.total)])
    return aligned(rows, left=(heading.index("gradient caching"),))


def aligned(rows: Sequence[Sequence[str]], left: Collection[int]) -> str:
    """Format rows as a table with columns aligned to the right, but for `left`."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = [[f"{cell:{'<' if i in left else '>'}{widths[i]}}" for i, cell in enumerate(row)] for row in rows]
    return "\n".join("  ".join(row).rstrip() for row in cells)


def duration(seconds: float) -> str:
    """Format a duration in minutes, hours or days."""
    if seconds < 2 * 3600:
        return f"{seconds / 60:,.0f} minutes"
    return f"{seconds / 3600:,.1f} hours" if seconds < 72 * 3600 else f"{seconds / 86400:,.1f} days"


def _milliseconds(seconds: float) -> str:
    milliseconds = 1e3 * seconds
    return f"{milliseconds:,.0f}" if milliseconds >= 10 else f"{milliseconds:.1f}"


def _mib(size: int) -> str:
    return f"{size / _MIB:,.1f}"


def _flags(cache: GradCacheConfig, current: GradCacheConfig) -> str:
    """Flags that change the gradient caching from `current` to `cache`."""
    return " ".join(f"--config.grad_cache.{name}={value}" for name, value in cache.changes(current).items())


def _advice(plan: MemoryPlan) -> str:
    """Name the setting that reduces the largest component that settings affect."""
    w, cache = plan.workload, plan.workload.cache
    sizes = {
        "transient": plan.transient,
        "stored": plan.stored,
        "batch": plan.batch + plan.next_batch,
        "loss": plan.loss,
        "features": plan.features,
    }
    largest = max(sizes, key=lambda name: sizes[name])
    if largest in ("transient", "stored") and cache.chunk_size is None:
        return "set grad_cache.chunk_size: the activations are of the whole batch"
    if largest == "stored":
        return f"set grad_cache.keep below {cache.keep}" if cache.keep else "set grad_cache.keep_residual to False"
    if largest == "transient" and cache.chunk_size > w.devices:
        return f"set grad_cache.chunk_size below {cache.chunk_size}"
    if largest == "batch" and cache.offload == "none" and cache.chunk_size is not None:
        return "set grad_cache.offload to host: only three chunks of the batch are then in device memory"
    if largest == "loss" and TABLE[w.implementation].quadratic:
        return f"set implementation to xla or None: memory of {w.implementation} grows with the square of the batch"
    return f"set batch_size below {w.batch_size}, or use more devices"


def _suggestion(plan: MemoryPlan) -> str:
    """Suggest gradient caching with a smaller peak that should fit."""
    w = plan.workload
    try:
        cache = recommended_cache(w, plan.memory_limit) if plan.memory_limit else w.cache
    except ValueError:
        return ""
    smaller = plan_memory(dataclasses.replace(w, cache=cache)).peak < plan.peak
    return f"; {_flags(cache, w.cache)} should fit" if smaller else ""
