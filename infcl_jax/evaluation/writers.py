"""JSON and CSV files of evaluation results."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from infcl_jax.evaluation.page import thumbnail, write_page
from infcl_jax.evaluation.results import TaskResult
from infcl_jax.runtime.environment import describe_software, utc_date
from infcl_jax.runtime.file_io import open_regular, open_writable, replace_text
from infcl_jax.runtime.processes import is_lead

EXAMPLES_FILE = "examples.json"


def describe_environment(model: str, weights: str) -> dict[str, str]:
    """Describe an evaluation: model, weights, date, devices and versions.

    Examples:
      >>> describe_environment("ViT-B-32", "runs/photos")["model"]
      'ViT-B-32'

    Args:
      model: name of the model.
      weights: path or name of the weights.

    Returns:
      Texts by name, for `write_json`, `append_csv` and `write_page`. The date is in UTC.
    """
    return {"date": utc_date(), "model": model, "weights": weights, **describe_software()}


def write_results(folder: str | Path, results: Sequence[TaskResult], model: str, weights: str) -> None:
    """Write `results.json`, `results.html` and `examples.json`, and append to `results.csv`.

    Only the leading process writes.

    Examples:
      >>> result = TaskResult(name="cifar10", kind="zero_shot", metrics={"top1": 0.9}, main_metric="top1", images=10)
      >>> write_results(".", [result], "tiny", "runs/digits")

    Args:
      folder: output folder.
      results: results of all tasks; without any, nothing is written.
      model: name of the model.
      weights: origin of the weights.
    """
    if not (is_lead() and results):
        return
    folder, environment = Path(folder), describe_environment(model, weights)
    write_json(folder / "results.json", results, environment)
    write_page(folder / "results.html", results, environment)
    write_examples(folder / EXAMPLES_FILE, results)
    append_csv(folder / "results.csv", results, environment)


def write_json(path: str | Path, results: Sequence[TaskResult], environment: Mapping[str, str]) -> None:
    """Write results as one JSON object.

    The object has the fields `environment` and `results`, a list of objects with `name`, `kind`, `images`,
    `main_metric` and `metrics`. Values that are not finite are null. An existing file is replaced at once.

    Examples:
      >>> result = TaskResult(name="cifar10", kind="zero_shot", metrics={"top1": 0.9}, main_metric="top1", images=10)
      >>> write_json("results.json", [result], describe_environment("tiny", "runs/digits"))

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
    replace_text(path, f"{content}\n")


def write_examples(path: str | Path, results: Sequence[TaskResult]) -> None:
    """Write examples and confused classes as one JSON object.

    The object has a field for each task with examples. `confusions` is a list of objects with the fields of
    `Confusion`, and `examples` of those with the fields of `ExamplePrediction`. Images are thumbnails as data URIs. An
    existing file is replaced at once.

    Args:
      path: output file.
      results: results of all tasks.
    """
    content = {
        result.name: {
            "confusions": [dataclasses.asdict(confusion) for confusion in result.confusions],
            "examples": [vars(example) | {"image": thumbnail(example.image)} for example in result.examples],
        }
        for result in results
        if result.examples
    }
    replace_text(path, json.dumps(content, indent=1) + "\n")


def append_csv(path: str | Path, results: Sequence[TaskResult], environment: Mapping[str, str]) -> Path:
    """Append an evaluation as one row, so that a file compares models.

    Columns are the environment and then `task/metric`, in the order of the results. A file that starts with another
    header is left as it is: the row goes to `NAME-2.csv`, `NAME-3.csv` and so on.

    Examples:
      >>> result = TaskResult(name="cifar10", kind="zero_shot", metrics={"top1": 0.9}, main_metric="top1", images=10)
      >>> append_csv("results.csv", [result], describe_environment("tiny", "runs/digits")).name
      'results.csv'

    Args:
      path: output file; created with a header if it is missing.
      results: results of all tasks.
      environment: texts of `describe_environment`.

    Returns:
      The file with the row.

    Raises:
      OSError: the file cannot be written, or it is a link.
      ValueError: two results have the same name and metric, or the file is not a regular one.
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
    with open(open_writable(target, os.O_WRONLY | os.O_APPEND), "a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, header)
        if file.tell() == 0:
            writer.writeheader()
        writer.writerow(row)
    return target


def _header(path: Path) -> list[str]:
    """Read the first row of a CSV file; empty without one."""
    with io.TextIOWrapper(open_regular(path), "utf-8", "replace", newline="") as file:
        try:
            return next(csv.reader(file), [])
        except csv.Error as error:  # such as a field above 128 KiB
            return [str(error)]
