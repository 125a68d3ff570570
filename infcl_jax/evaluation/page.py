"""HTML page of evaluation results with examples."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.etree.ElementTree import Element, SubElement

import numpy as np
from PIL import Image

from infcl_jax.evaluation.html_page import (
    add,
    add_example,
    add_table,
    data_uri,
    format_metric,
    new_page,
    words,
    write_html,
)
from infcl_jax.evaluation.results import TaskResult

_THUMBNAIL = 224  # pixels of the longer side
_JPEG_QUALITY = 85


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
    rows = [_summary_row(result) for result in results]
    add_table(body, ("Task", "Kind", "Images", "Metric", "Value"), rows, "summary")
    for result in results:
        _add_task(body, result)
    write_html(path, root)


def thumbnail(image: np.ndarray) -> str:
    """Encode a thumbnail of an image as a JPEG data URI.

    Args:
      image: uint8 [H, W, 3].
    """
    picture = Image.fromarray(image)
    picture.thumbnail((_THUMBNAIL, _THUMBNAIL))
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=_JPEG_QUALITY)
    return data_uri(buffer.getvalue(), "image/jpeg")


def _summary_row(result: TaskResult) -> tuple[str, ...]:
    metric = result.main_metric
    value = format_metric(metric, result.metrics[metric])
    size = f"{result.images:,} tasks" if result.kind == "average" else f"{result.images:,}"
    return result.name, words(result.kind), size, words(metric), value


def _add_task(body: Element, result: TaskResult) -> None:
    section = SubElement(body, "section")
    add(section, "h2", result.name)
    values = [(words(name), format_metric(name, value)) for name, value in result.metrics.items()]
    add_table(section, ("Metric", "Value"), values, "metrics")
    if not result.examples:
        return
    add(section, "h3", "Examples")
    grid = SubElement(section, "div", {"class": "examples"})
    for e in result.examples:
        add_example(grid, thumbnail(e.image), e.expected, e.predicted, e.similarity, correct=e.correct)
