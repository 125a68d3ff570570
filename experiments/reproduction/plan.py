"""Plan of a target at the scale "paper": memory and time of each cell."""

from typing import Any, cast

from experiments.reproduction.cells import describe
from experiments.reproduction.measurements import on_device
from experiments.reproduction.target import Cell, Target
from experiments.reproduction.training import run_config
from infcl_jax import run
from infcl_jax.planner import format_plan, plan_memory, step_time

_DAY = 86_400
# Samples by dataset, for the sample state of global contrastive losses (Table 2 of FastCLIP).
_SAMPLES = {"cc3m": 2_700_000, "cc12m": 9_100_000, "laion": 315_000_000}


def describe_target(target: Target, device: str, devices: int) -> str:
    """Format the plan of all cells of a target at the scale "paper".

    Args:
      target: the target.
      device: GPU of `infcl_jax.planner.DEVICES` to plan for.
      devices: number of GPUs.

    Raises:
      ValueError: a setting of a cell does not fit the GPUs.
    """
    heading = f"{target.name}: {target.title}\npaper: {target.paper.reference}\nhardware: {target.paper.hardware}"
    lines = [heading, f"plan for {devices} {device} GPU(s)"]
    all_seconds, unknown = 0.0, 0
    for cell in target.cells("paper"):
        seconds, text = _describe(cell, device, devices)
        lines.append(f"\n{text}")
        all_seconds += seconds or 0.0
        unknown += seconds is None
    note = f", without {unknown} cell(s) of unknown time" if unknown else ""
    lines.append(f"\nestimated time of all cells: {all_seconds / _DAY:.2f} days{note}")
    return "\n".join(lines)


def _describe(cell: Cell, device: str, devices: int) -> tuple[float | None, str]:
    """Return the seconds of a cell, if known, and its description."""
    if cell.measure != "full_run":
        return None, describe(cell)
    config = run_config(cell.arguments.get("config", "base"), cell.arguments.get("changes", {}))
    if config.loss == "retrieval":
        return None, f"{describe(cell)}\nplanned by: python -m experiments.plan --config=configs/dpr.py"
    with on_device(device) as limit:
        workload = run.workload(config, devices, limit, source=cast(Any, range(_SAMPLES.get(config.dataset, 0))))
        plan = plan_memory(workload, limit)
    seconds = step_time(workload, device).total
    whole = seconds * config.total_steps
    length = f"{seconds:.2f} s per step, {config.total_steps:,} steps: {whole / _DAY:.2f} days"
    return whole, "\n".join((describe(cell), format_plan(plan), length))
