"""Tables of estimated times."""

from collections.abc import Mapping

from infcl_jax.planner.api import MemoryPlan
from infcl_jax.planner.report import aligned
from infcl_jax.planner.times import PHASES, StepTime


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


def duration(seconds: float) -> str:
    """Format a duration in minutes, hours or days."""
    if seconds < 2 * 3600:
        return f"{seconds / 60:,.0f} minutes"
    return f"{seconds / 3600:,.1f} hours" if seconds < 72 * 3600 else f"{seconds / 86400:,.1f} days"


def _milliseconds(seconds: float) -> str:
    milliseconds = 1e3 * seconds
    return f"{milliseconds:,.0f}" if milliseconds >= 10 else f"{milliseconds:.1f}"
