"""Measurement of cells: each finished cell is a file, so that a rerun continues."""

import datetime
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from experiments.benchmarks.harness import is_out_of_memory
from experiments.reproduction.measurements import MEASUREMENTS
from experiments.reproduction.target import Cell
from infcl_jax.runtime.console import say
from infcl_jax.runtime.file_io import replace_text
from infcl_jax.runtime.processes import is_lead

CELLS = "cells"
RUNS = "runs"
OUT_OF_MEMORY = "out of memory"
FINISHED = ("ok", OUT_OF_MEMORY)  # a strategy that does not fit is a result


def measure_cells(cells: Sequence[Cell], folder: str | Path) -> dict[str, dict[str, Any]]:
    """Measure the cells that have no finished file.

    A cell that fails is recorded with its error, and the others go on. A rerun measures failed cells again.

    Args:
      cells: cells to measure.
      folder: folder of the scale; the files are in its folder `cells`, training runs in its folder `runs`.

    Returns:
      Record of each cell by its key: measure, arguments, status ("ok", "failed" or "out of memory"), values, error,
      seconds, and date, JAX version and device.
    """
    records = read_cells(cells, folder)
    for number, cell in enumerate(cells, 1):
        if records.get(cell.key, {}).get("status") in FINISHED:
            continue
        say(f"cell {number}/{len(cells)}: {describe(cell)}")
        record = _measure(cell, Path(folder))
        records[cell.key] = record
        if is_lead():
            _write(_path(cell, folder), record)
        say(f"  {record['seconds']:.1f} s: {record['error'] or _short(record['values'])}")
    return records


def read_cells(cells: Sequence[Cell], folder: str | Path) -> dict[str, dict[str, Any]]:
    """Read the records of measured cells by key; cells without a file are left out."""
    paths = {cell.key: _path(cell, folder) for cell in cells}
    return {key: json.loads(path.read_text()) for key, path in paths.items() if path.is_file()}


def describe(cell: Cell) -> str:
    """Format a cell as one line."""
    arguments = (f"{name}={value}" for name, value in cell.arguments.items() if value not in (None, {}, ""))
    return f"{cell.measure}({', '.join(arguments)})"


def _path(cell: Cell, folder: str | Path) -> Path:
    return Path(folder, CELLS, f"{cell.key}.json")


def _measure(cell: Cell, folder: Path) -> dict[str, Any]:
    device = jax.devices()[0]
    record: dict[str, Any] = {
        "measure": cell.measure,
        "arguments": dict(cell.arguments),
        "status": "ok",
        "values": {},
        "error": None,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "jax": jax.__version__,
        "device": device.device_kind,
        "devices": jax.device_count(),
        "cores": os.cpu_count(),
    }
    start = time.perf_counter()
    try:
        record["values"] = MEASUREMENTS[cell.measure](folder / RUNS / cell.key, **cell.arguments)
    except Exception as error:  # any failure of one cell must leave the others alone; a stop request is no Exception
        lines = str(error).strip().splitlines() or [""]
        status = (
            OUT_OF_MEMORY if isinstance(error, jax.errors.JaxRuntimeError) and is_out_of_memory(error) else "failed"
        )
        record |= {"status": status, "error": f"{type(error).__name__}: {lines[0]}"}
    return record | {"seconds": time.perf_counter() - start}


def _write(path: Path, record: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, json.dumps(record, indent=1) + "\n")  # targets in parallel may share the cell


def _short(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in values.items() if isinstance(value, int | float))
