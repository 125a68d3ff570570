"""JSON and CSV files of evaluation results."""

from __future__ import annotations

import csv
import datetime
import importlib.metadata
import json
import math
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax

from infcl_jax.evaluation.results import TaskResult

_PACKAGES = ("infcl_jax", "jax", "jaxlib", "flax", "numpy")


def describe_environment(model: str, weights: str) -> dict[str, str]:
    """Describe an evaluation: model, weights, date, devices and versions.

    Args:
      model: name of the model.
      weights: path or name of the weights.

    Returns:
      Texts by name, for `write_json`, `append_csv` and `write_page`. The date is in UTC.
    """
    device = jax.devices()[0]
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "model": model,
        "weights": weights,
        "devices": f"{jax.device_count()} x {device.device_kind}",
        "python": platform.python_version(),
        **{package: _version(package) for package in _PACKAGES},
    }


def write_json(path: str | Path, results: Sequence[TaskResult], environment: Mapping[str, str]) -> None:
    """Write results as one JSON object.

    The object has the fields `environment` and `results`, a list of objects with `name`, `kind`, `images`,
    `main_metric` and `metrics`. Values that are not finite are null. An existing file is replaced at once.

    Args:
      path: output file.
      results: results of all tasks.
      environment: texts of `describe_environment`.
    """
    fields = [
        {
            "name": result.name,
            "kind": result.kind,
            "images": result.images,
            "main_metric": result.main_metric,
            "metrics": {name: float(v) if math.isfinite(v) else None for name, v in result.metrics.items()},
        }
        for result in results
    ]
    content = json.dumps({"environment": dict(environment), "results": fields}, indent=2, allow_nan=False)
    temporary = Path(f"{path}.tmp")
    temporary.write_text(content + "\n", encoding="utf-8")
    os.replace(temporary, path)


def append_csv(path: str | Path, results: Sequence[TaskResult], environment: Mapping[str, str]) -> Path:
    """Append an evaluation as one row, so that a file compares models.

    Columns are the environment and then `task/metric`, in the order of the results. A file that starts with another
    header is left as it is: the row goes to `NAME-2.csv`, `NAME-3.csv` and so on.

    Args:
      path: output file; created with a header if it is missing.
      results: results of all tasks.
      environment: texts of `describe_environment`.

    Returns:
      The file with the row.

    Raises:
      ValueError: two results have the same name and metric.
    """
    row = dict(environment)
    for result in results:
        columns = {f"{result.name}/{metric}": repr(float(value)) for metric, value in result.metrics.items()}
        if repeated := row.keys() & columns.keys():
            raise ValueError(f"expected different names of results, got {min(repeated)} twice; rename a task")
        row |= columns
    header = list(row)
    target, number = Path(path), 1
    while target.exists() and _header(target) not in ([], header):
        number += 1
        target = Path(path).with_stem(f"{Path(path).stem}-{number}")
    with target.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, header)
        if file.tell() == 0:
            writer.writeheader()
        writer.writerow(row)
    return target


def _header(path: Path) -> list[str]:
    """Read the first row of a CSV file; empty without one."""
    with path.open(newline="", encoding="utf-8") as file:
        return next(csv.reader(file), [])


def _version(package: str) -> str:
    """Return the version of a package, or "not installed" in a clone."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
