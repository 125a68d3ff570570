"""Plans of targets: memory and time of each cell on named GPUs."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

from experiments.reproduction.cells import describe
from experiments.reproduction.measurements import on_device, retrieval_config
from experiments.reproduction.target import Cell, Target
from experiments.reproduction.training import run_config
from infcl_jax import run
from infcl_jax.planner import (
    Workload,
    device_named,
    loss_time,
    loss_workspace,
    plan_memory,
    rates_of,
    step_time,
)
from infcl_jax.planner.report import duration
from infcl_jax.settings import make_config, total_steps

PLANNED_SCALES = ("small", "paper")
SMALL_GPUS, PAPER_GPUS = 1, 8
GPU = "H100-80"  # of the published plans

# Training samples by dataset, for sample states (Table 2 of FastCLIP) and for epochs (`configs/dpr.py`).
_SAMPLES = {
    "cc3m": 2_700_000,
    "cc12m": 9_100_000,
    "laion": 315_000_000,
    "shapes/quickstart": 32_768,
    "data/dpr/biencoder-nq-train.json": 58_880,
}
_GIB = 2**30
_SHORT = 600  # seconds


class CellPlan(NamedTuple):
    """Plan of a cell.

    Attributes:
      cell: the cell.
      gpus: number of GPUs; 0 for what the planner computes without one.
      memory: peak memory of a GPU in bytes; of a loss alone, its workspace. None without GPUs.
      fits: whether the memory is within the limit of the GPU.
      step_seconds: estimated seconds of a step, or of the loss with its gradients; None without GPUs
        and for a search.
      steps: steps of a training run; None for a measurement of a few steps.
    """

    cell: Cell
    gpus: int = 0
    memory: int | None = None
    fits: bool = True
    step_seconds: float | None = None
    steps: int | None = None

    @property
    def seconds(self) -> float:
        """Estimated seconds of the steps of a training run; 0 for a measurement."""
        return (self.step_seconds or 0.0) * (self.steps or 0)


def gpus_of(scale: str) -> int:
    """Return the number of GPUs of the published plans."""
    return SMALL_GPUS if scale == "small" else PAPER_GPUS


def plan_target(target: Target, scale: str, device: str, devices: int) -> list[CellPlan]:
    """Plan the cells of a target."""
    return [_plan(cell, device, devices) for cell in target.cells(scale)]


def describe_target(target: Target, scale: str, device: str, devices: int) -> str:
    """Format the plan of a target: a row for each cell."""
    plans = plan_target(target, scale, device, devices)
    rows = [("GPUs", "GiB/GPU", "step ms", "steps", "time", "cell")]
    for plan in plans:
        memory = "" if plan.memory is None else f"{plan.memory / _GIB:,.1f}{'' if plan.fits else ' (does not fit)'}"
        step = "" if plan.step_seconds is None else f"{1e3 * plan.step_seconds:,.1f}"
        steps, time = ("", "") if plan.steps is None else (f"{plan.steps:,}", _time(plan.seconds))
        rows.append((str(plan.gpus or ""), memory, step, steps, time, describe(plan.cell)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(text.rjust(width) for text, width in zip(row[:-1], widths, strict=False)) for row in rows]
    return "\n".join(
        [
            f"{target.name}: {target.title}",
            f"paper: {target.paper.reference}",
            f"hardware of the paper: {target.paper.hardware}",
            f"plan of the scale {scale}, training runs on {devices} {device} GPU(s)",
            *(f"{line}  {row[-1]}" for line, row in zip(lines, rows, strict=True)),
            f"estimated time of all steps: {_time(sum(plan.seconds for plan in plans))}",
        ]
    )


def _time(seconds: float) -> str:
    """Format a duration, a short one in seconds."""
    return duration(seconds) if seconds >= _SHORT else f"{seconds:,.0f} s"


def _plan(cell: Cell, device: str, devices: int) -> CellPlan:
    if cell.measure in ("loss_time", "loss_memory"):
        return _plan_loss(cell, device)
    if cell.measure == "measured_batch":  # fills the GPUs
        return CellPlan(cell, cell.arguments["devices"], device_named(device).memory_limit)
    if cell.measure not in _CONFIGS:
        return CellPlan(cell)
    config = _CONFIGS[cell.measure](cell.arguments)
    gpus = devices if cell.measure == "full_run" else cell.arguments.get("devices", 1)
    source = cast(Any, range(cell.arguments.get("samples") or _SAMPLES.get(config.dataset, 0)))
    with on_device(device) as limit:
        workload: Workload = run.workload(config, gpus, limit, source=source)
        memory = plan_memory(workload, limit)
    steps = total_steps(config, source) if cell.measure in _RUNS else None
    return CellPlan(cell, gpus, memory.peak, memory.fits, step_time(workload, device).total, steps)


def _plan_loss(cell: Cell, device: str) -> CellPlan:
    """Plan a loss on features of its own."""
    given, named = cell.arguments, device_named(device)
    implementation, dtype = given["implementation"] or named.implementation, given.get("dtype", "float32")
    batch, dim, gpus = given["batch"], given["dim"], given["devices"]
    memory = loss_workspace(implementation, batch, dim, dtype, gpus)
    seconds = loss_time(implementation, batch, batch, dim, dtype, rates_of(device), gpus)
    return CellPlan(cell, gpus, memory, memory <= named.memory_limit, seconds)


def _run_settings(arguments: Mapping[str, Any]) -> Any:
    return run_config(arguments.get("config", "base"), arguments.get("changes", {}))


def _step_settings(arguments: Mapping[str, Any]) -> Any:
    cache = {f"grad_cache.{name}": value for name, value in (arguments.get("cache") or {}).items()}
    names = {"model": "model", "model_overrides": "model_overrides", "batch": "batch_size", "loss": "loss"}
    own = {setting: arguments[name] for name, setting in names.items() if name in arguments}
    sizes = {"implementation": arguments.get("implementation"), "dataset": "cc3m", "total_steps": 10_000}
    return make_config(own | cache | sizes)


def _retrieval_settings(arguments: Mapping[str, Any]) -> Any:
    return retrieval_config(arguments["model"], arguments["batch"], arguments.get("cache"))


# Settings of the measurements with a training step, from the arguments of a cell.
_RUNS = ("full_run", "short_run")
_CONFIGS: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    **dict.fromkeys(_RUNS, _run_settings),
    "step_time": _step_settings,
    "retrieval_step_time": _retrieval_settings,
}
