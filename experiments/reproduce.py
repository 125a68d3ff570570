"""Regenerate the tables and figures of four papers.

    python -m experiments.reproduce --list
    python -m experiments.reproduce --target=inf-cl-table-1 --scale=tiny

Writes `table.md`, `figure.png` and `results.json` of the target, with the measured figures and the paper's, to
RESULTS/SCALE/TARGET. Each finished cell is a file in RESULTS/SCALE/cells: the same command continues after an
interruption and repeats failed cells. The scales "small" and "paper" print their plan first, "paper" starts with
--yes.
"""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
from absl import flags

from experiments import command_line
from experiments.reproduction import SCALES, TARGETS, Target, measure_cells, target_named
from experiments.reproduction.cells import FINISHED
from experiments.reproduction.output import overview, write_output
from experiments.reproduction.plan import GPU, PLANNED_SCALES, describe_target, gpus_of
from infcl_jax.data.decode import gpu_decoder_installed
from infcl_jax.planner import device_named
from infcl_jax.runtime import compilation_cache, distributed
from infcl_jax.runtime.console import say

_ALL = "all"
_TARGET = flags.DEFINE_string("target", None, "Table or figure to regenerate, or all.")
_SCALE = flags.DEFINE_string("scale", "tiny", f"One of {', '.join(SCALES)}.")
_RESULTS = flags.DEFINE_string("results", "runs/reproduction", "Folder of the results.")
_YES = flags.DEFINE_bool("yes", False, "Start the scale paper; without it, only its plan is printed.")
_GPU = flags.DEFINE_string("gpu", GPU, "GPU for which the scales small and paper are planned, see experiments.plan.")
_GPUS = flags.DEFINE_integer("gpus", None, "Number of GPUs of a plan. Default: 1 at small, 8 at paper.", lower_bound=1)
_JOBS = flags.DEFINE_integer("jobs", 1, "Targets measured at the same time, with --target=all.", lower_bound=1)
_LIST = flags.DEFINE_bool("list", False, "List the targets with their costs, and exit.")


def reproduce(target: Target, scale: str, workdir: str | Path) -> list[str]:
    """Measure the cells of a target and write its table, picture and results; return errors of cells that failed."""
    folder = Path(workdir, scale)
    cells = target.cells(scale)
    say(f"{target.name}: {target.title}; the paper used {target.paper.hardware}")
    records = measure_cells(cells, folder)
    table = write_output(target, scale, records, folder / target.name)
    say(*table.read_text().splitlines())
    say(f"written: {table.parent}")
    return [records[cell.key]["error"] for cell in cells if records[cell.key]["status"] not in FINISHED]


def main() -> None:
    """Run what the flags say."""
    if _LIST.value:
        print(overview(list(TARGETS.values())))
        return
    if _SCALE.value not in SCALES:
        raise ValueError(f"expected --scale to be one of {', '.join(SCALES)}, got {_SCALE.value!r}")
    if _TARGET.value is None:
        raise ValueError("expected --target, a name of --list, or all, got none")
    if _TARGET.value == _ALL:
        _run_all()
        return
    target = target_named(_TARGET.value)
    if _SCALE.value == "tiny":
        jax.config.update("jax_platforms", "cpu")  # also where there is a GPU
        jax.config.update("jax_num_cpu_devices", target.devices)
    plan_only = _SCALE.value == "paper" and not _YES.value
    if not plan_only:
        distributed.initialize(gpu_decode=gpu_decoder_installed())  # before the plan, which starts JAX
    if _SCALE.value in PLANNED_SCALES:
        gpus = _GPUS.value or gpus_of(_SCALE.value)
        print(describe_target(target, _SCALE.value, device_named(_GPU.value).name, gpus))
    if plan_only:
        print("start it with --yes")
        return
    compilation_cache.enable(None, say)
    if errors := reproduce(target, _SCALE.value, _RESULTS.value):
        raise ValueError(f"expected all cells to succeed, got {len(errors)} failures, the first: {errors[0]}")


def _run_all() -> None:
    """Run every target in a process of its own, since targets need different numbers of simulated devices."""
    others = [flag for flag in sys.argv[1:] if not flag.lstrip("-").startswith("target=")]

    def succeeds(name: str) -> bool:
        command = [sys.executable, "-m", "experiments.reproduce", f"--target={name}", *others]
        return not subprocess.run(command, check=False).returncode

    with ThreadPoolExecutor(_JOBS.value) as pool:
        failed = [name for name, success in zip(TARGETS, pool.map(succeeds, TARGETS), strict=True) if not success]
    if failed:
        raise ValueError(f"expected all targets to succeed, got failures of {', '.join(failed)}")


if __name__ == "__main__":
    command_line.run(main)
