"""HTML page of evaluation results with examples."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

import numpy as np
from PIL import Image

from infcl_jax.evaluation.results import ExamplePrediction, TaskResult

_THUMBNAIL = 224  # pixels of the longer side
_JPEG_QUALITY = 85
# Browsers load nothing from elsewhere, whatever a caption contains.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
_STYLE = """
:root { color-scheme: light dark; --line: #8886; --good: #2a8a3e; --bad: #c8452f; }
body { font: 16px/1.45 system-ui, sans-serif; margin: 0 auto; max-width: 64rem; padding: 1rem; }
h2 { border-top: 1px solid var(--line); margin-top: 2.5rem; padding-top: 1rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; }
th, td { border-bottom: 1px solid var(--line); padding: .3rem .8rem .3rem 0; text-align: left; vertical-align: top; }
td.number { font-variant-numeric: tabular-nums; text-align: right; }
.environment td, figcaption { overflow-wrap: anywhere; }
.examples { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fill, minmax(min(14rem, 100%), 1fr)); }
figure { border: 1px solid var(--line); border-radius: .4rem; margin: 0; padding: .6rem; }
figure.correct { border-top: .25rem solid var(--good); }
figure.mistake { border-top: .25rem solid var(--bad); }
img { display: block; height: auto; margin: 0 auto .5rem; max-width: 100%; }
figcaption { font-size: .9rem; }
figcaption p { margin: .2rem 0; }
ol { margin: .2rem 0; padding-left: 1.4rem; }
.verdict { font-weight: 600; }
"""


def write_page(path: str | Path, results: Sequence[TaskResult], environment: Mapping[str, str]) -> None:
    """Write results and examples as one self-contained HTML page.

    The page has a table of main metrics, and for each task a table of all metrics and its examples: mistakes with
    predicted and true class, or images with their nearest captions. Images are embedded.

    Args:
      path: output file.
      results: results of all tasks.
      environment: texts of `describe_environment`; "model" is the title.
    """
    root = Element("html", {"lang": "en"})
    title = f"Evaluation of {environment.get('model', 'a model')}"
    head = SubElement(root, "head")
    SubElement(head, "meta", {"charset": "utf-8"})
    SubElement(head, "meta", {"http-equiv": "Content-Security-Policy", "content": _POLICY})
    SubElement(head, "meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"})
    _add(head, "title", title)
    _add(head, "style", _STYLE)
    body = SubElement(root, "body")
    _add(body, "h1", title)
    _table(body, (), environment.items(), "environment")
    rows = [_summary_row(result) for result in results]
    _table(body, ("Task", "Kind", "Images", "Metric", "Value"), rows, "summary")
    for result in results:
        _add_task(body, result)
    text = ElementTree.tostring(root, encoding="unicode", method="html")
    Path(path).write_text(f"<!DOCTYPE html>\n{text}\n", encoding="utf-8", errors="replace")


def _summary_row(result: TaskResult) -> tuple[str, ...]:
    metric = result.main_metric
    value = _format(metric, result.metrics[metric])
    size = f"{result.images:,} tasks" if result.kind == "average" else f"{result.images:,}"
    return result.name, _words(result.kind), size, _words(metric), value


def _add_task(body: Element, result: TaskResult) -> None:
    section = SubElement(body, "section")
    _add(section, "h2", result.name)
    values = [(_words(name), _format(name, value)) for name, value in result.metrics.items()]
    _table(section, ("Metric", "Value"), values, "metrics")
    if not result.examples:
        return
    _add(section, "h3", "Examples")
    grid = SubElement(section, "div", {"class": "examples"})
    for example in result.examples:
        _add_example(grid, example)


def _add_example(grid: Element, example: ExamplePrediction) -> None:
    figure = SubElement(grid, "figure", {"class": "correct" if example.correct else "mistake"})
    expected = "; ".join(example.expected)
    SubElement(figure, "img", {"src": _data_uri(example.image), "alt": expected})
    caption = SubElement(figure, "figcaption")
    _add(caption, "p", "Correct" if example.correct else "Mistake", {"class": "verdict"})
    _add(caption, "p", f"True: {expected}")
    _add(caption, "p", "Predicted, with cosine similarity:")
    predictions = SubElement(caption, "ol")
    for text, similarity in zip(example.predicted, example.similarity, strict=True):
        _add(predictions, "li", f"{text} ({similarity:.3f})")


def _table(parent: Element, header: Sequence[str], rows: Iterable[Sequence[str]], name: str) -> None:
    """Add a table in a scrolling box, so that the page fits a phone."""
    table = SubElement(SubElement(parent, "div", {"class": "scroll"}), "table", {"class": name})
    if header:
        line = SubElement(SubElement(table, "thead"), "tr")
        for text in header:
            _add(line, "th", text, {"scope": "col"})
    body = SubElement(table, "tbody")
    for first, *others in rows:
        line = SubElement(body, "tr")
        _add(line, "th", first, {"scope": "row"})
        for text in others:
            _add(line, "td", text, {"class": "number"} if text[:1].isdigit() and header else {})


def _add(parent: Element, tag: str, text: str, attributes: Mapping[str, str] | None = None) -> Element:
    """Add an element with text, which `ElementTree` escapes."""
    element = SubElement(parent, tag, dict(attributes or {}))
    element.text = text
    return element


def _data_uri(image: np.ndarray) -> str:
    """Encode a thumbnail as a JPEG data URI."""
    picture = Image.fromarray(image)
    picture.thumbnail((_THUMBNAIL, _THUMBNAIL))
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=_JPEG_QUALITY)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _format(metric: str, value: float) -> str:
    """Format a loss in nats or a fraction as a percentage."""
    return f"{value:.4f} nats" if metric.endswith("loss") else f"{100 * value:.2f} %"


def _words(name: str) -> str:
    """Turn "mean_per_class_recall" into "mean per class recall"."""
    return name.replace("zero_shot", "zero-shot").replace("few_shot", "few-shot").replace("_", " ")
