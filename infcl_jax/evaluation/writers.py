"""Results of an evaluation as text, JSON, CSV and an HTML page."""

import csv
import dataclasses
import io
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import SubElement

from PIL import Image

from infcl_jax.evaluation.html_page import (
    add,
    add_examples,
    add_table,
    data_uri,
    format_metric,
    new_page,
    words,
    write_html,
)
from infcl_jax.evaluation.results import TaskResult
from infcl_jax.runtime.environment import describe_software, utc_date
from infcl_jax.runtime.file_io import open_regular, open_writable, replace_text
from infcl_jax.runtime.printable import printable
from infcl_jax.runtime.processes import is_lead

EVALUATION_FILE = "evaluation.json"  # of a run, as is the plot of its retrieved images
GRID_FILE = "retrieval.png"
EXAMPLES_FILE = "examples.json"

_THUMBNAIL = 224  # pixels of the longer side
_JPEG_QUALITY = 85
# Names of metrics at k, such as "retrieval/image_to_text_r5" and "zero_shot/top1".
_TOP_K = re.compile(r"(?P<task>.+)[/_](?P<kind>r|top)(?P<k>\d+)")
_IN_LINE = re.compile(r"loss$|/(mean_average_precision|average\w*|\d+_shot)$")
_KINDS = {"r": "R@k", "top": "top-k accuracy"}


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


def write_page(path: str | Path, results: Sequence[TaskResult], environment: Mapping[str, str]) -> None:
    """Write results and examples as one self-contained HTML page.

    The page has a table of main metrics, and for each task a table of all metrics and its examples: mistakes with
    predicted and true class, or images with their nearest captions. Images are embedded.

    Examples:
      >>> result = TaskResult(name="cifar10", kind="zero_shot", metrics={"top1": 0.9}, main_metric="top1", images=10)
      >>> write_page("results.html", [result], describe_environment("tiny", "runs/digits"))

    Args:
      path: output file.
      results: results of all tasks.
      environment: texts of `describe_environment`; "model" is the title.
    """
    root, body = new_page(f"Evaluation of {environment.get('model', 'a model')}")
    add_table(body, (), environment.items(), "environment")
    rows = []
    for result in results:
        metric, size = result.main_metric, f"{result.images:,}{' tasks' if result.kind == 'average' else ''}"
        value = format_metric(metric, result.metrics[metric])
        rows.append((result.name, words(result.kind), size, words(metric), value))
    add_table(body, ("Task", "Kind", "Images", "Metric", "Value"), rows, "summary")
    for result in results:
        section = SubElement(body, "section")
        add(section, "h2", result.name)
        values = [(words(name), format_metric(name, value)) for name, value in result.metrics.items()]
        add_table(section, ("Metric", "Value"), values, "metrics")
        if result.examples:
            add(section, "h3", "Examples")
            add_examples(section, _shown(result))
    write_html(path, root)


def write_examples(path: str | Path, results: Sequence[TaskResult]) -> None:
    """Write examples and confused classes as one JSON object; an existing file is replaced at once.

    The object has a field for each task with examples. `confusions` is a list of objects with the fields of
    `Confusion`, and `examples` of those with the fields of `ExamplePrediction`. Images are thumbnails as data URIs.
    """
    content = {
        result.name: {
            "confusions": [dataclasses.asdict(confusion) for confusion in result.confusions],
            "examples": _shown(result),
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


def format_table(results: Mapping[str, float]) -> str:
    """Format results as a table of tasks (rows) by k (columns).

    Other metrics follow in rows of their own.

    Examples:
      >>> print(format_table({"validation/loss": 2.1, "zero_shot/top1": 0.631, "zero_shot/top5": 0.87}))
                                    k = 1    k = 5
      zero-shot (top-k accuracy)   63.1 %   87.0 %
      validation loss (nats)       2.1000

    Args:
      results: metrics of `infcl_jax.evaluation.Suite`.

    Returns:
      Lines without a final newline. Losses are in nats, all other metrics are percentages.
    """
    rows: dict[str, dict[int, str]] = {}
    others = {}
    for name, value in results.items():
        if match := _TOP_K.fullmatch(name):
            label = f"{_line_words(match['task'])} ({_KINDS[match['kind']]})"
            rows.setdefault(label, {})[int(match["k"])] = f"{100 * value:.1f} %"
        else:
            others[f"{_line_words(name)} (nats)" if name.endswith("loss") else _line_words(name)] = _format(name, value)
    ks = sorted({k for row in rows.values() for k in row})
    width = max(map(len, (*rows, *others)), default=0)
    lines = [_line(label, [row.get(k, "") for k in ks], width) for label, row in rows.items()]
    header = [_line("", [f"k = {k}" for k in ks], width)] if ks else []
    return "\n".join(header + lines + [_line(label, [value], width) for label, value in others.items()])


def format_line(results: Mapping[str, float]) -> str:
    """Format the losses and main results as one line.

    Examples:
      >>> format_line({"validation/loss": 2.1, "zero_shot/top1": 0.631, "zero_shot/top5": 0.87})
      'validation/loss 2.1000  zero_shot/top1 63.1 %'
    """
    entries = []
    for name, value in results.items():
        match = _TOP_K.fullmatch(name)
        if match["k"] == "1" if match else _IN_LINE.search(name):
            entries.append(f"{name} {_format(name, value)}")
    return "  ".join(entries)


def _format(name: str, value: float) -> str:
    """Format a loss in nats or a fraction as a percentage."""
    return f"{value:.4f}" if name.endswith("loss") else f"{100 * value:.1f} %"


def _line_words(name: str) -> str:
    """Turn "retrieval/image_to_text" into "retrieval image to text", in one line."""
    return printable(words(name)).replace("/", " ")


def _line(label: str, cells: list[str], width: int) -> str:
    return "  ".join([label.ljust(width), *(cell.rjust(7) for cell in cells)]).rstrip()


def _shown(result: TaskResult) -> list[dict[str, Any]]:
    """Return the fields of the examples, with thumbnails as JPEG data URIs."""
    shown = []
    for example in result.examples:
        picture, buffer = Image.fromarray(example.image), io.BytesIO()
        picture.thumbnail((_THUMBNAIL, _THUMBNAIL))
        picture.save(buffer, "JPEG", quality=_JPEG_QUALITY)
        shown.append(vars(example) | {"image": data_uri(buffer.getvalue(), "image/jpeg")})
    return shown


def _header(path: Path) -> list[str]:
    """Read the first row of a CSV file; empty without one."""
    with io.TextIOWrapper(open_regular(path), "utf-8", "replace", newline="") as file:
        try:
            return next(csv.reader(file), [])
        except csv.Error as error:  # such as a field above 128 KiB
            return [str(error)]
