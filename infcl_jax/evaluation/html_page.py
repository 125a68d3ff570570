"""Elements of self-contained HTML pages."""

import base64
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from infcl_jax.runtime.file_io import replace_text
from infcl_jax.runtime.printable import printable

# Browsers load nothing from elsewhere, whatever a caption contains.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
_STYLE = """
:root { color-scheme: light dark; --line: #8886; --good: #2a8a3e; --bad: #c8452f; }
@media (prefers-color-scheme: dark) { :root { --good: #4fc46a; --bad: #e0705c; } }
body { font: 16px/1.45 system-ui, sans-serif; margin: 0 auto; max-width: 64rem; padding: 1rem; }
h1, h2, h3, p { overflow-wrap: anywhere; }
h2 { border-top: 1px solid var(--line); margin-top: 2.5rem; padding-top: 1rem; }
.scroll { overflow-x: auto; }
.scroll + .scroll { margin-top: 1.5rem; }
table { border-collapse: collapse; }
th, td { border-bottom: 1px solid var(--line); padding: .3rem .8rem .3rem 0; text-align: left; vertical-align: top; }
td.number { font-variant-numeric: tabular-nums; text-align: right; white-space: nowrap; }
td.best { color: var(--good); font-weight: 600; }
.environment td, figcaption { overflow-wrap: anywhere; }
.environment td { min-width: 9rem; text-align: left; }
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


class Best(str):
    """Text of the best cell of a row."""


def new_page(title: str, *, style: str = "", script: str = "") -> tuple[Element, Element]:
    """Create a page, which loads nothing: images are data URIs, and no script runs but `script`.

    Args:
      title: title and heading.
      style: CSS rules after the common ones.
      script: JavaScript, which the caller adds to the end of the body.

    Returns:
      The root, for `write_html`, and the body.
    """
    root = Element("html", {"lang": "en"})
    head = SubElement(root, "head")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"{_POLICY}; script-src 'sha256-{digest}'" if script else _POLICY
    SubElement(head, "meta", {"charset": "utf-8"})
    SubElement(head, "meta", {"http-equiv": "Content-Security-Policy", "content": policy})
    SubElement(head, "meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"})
    add(head, "title", title)
    add(head, "style", _STYLE + style)
    body = SubElement(root, "body")
    add(body, "h1", title)
    return root, body


def write_html(path: str | Path, root: Element) -> None:
    """Write the root of `new_page` with escaped control characters; an existing file is replaced at once."""
    for element in root.iter():
        if element.tag not in ("style", "script"):  # whose lines are our own
            element.text = element.text and printable(element.text)
            element.attrib.update({name: printable(value) for name, value in element.items()})
    text = ElementTree.tostring(root, encoding="unicode", method="html")
    replace_text(path, f"<!DOCTYPE html>\n{text}\n")


def add(parent: Element, tag: str, text: str, attributes: Mapping[str, str] | None = None) -> Element:
    """Add an element with text, which `ElementTree` escapes."""
    element = SubElement(parent, tag, dict(attributes or {}))
    element.text = text
    return element


def add_table(parent: Element, header: Sequence[str], rows: Iterable[Sequence[str]], name: str) -> None:
    """Add a table in a scrolling box, so that the page fits a phone.

    Args:
      parent: element that gets the table.
      header: names of the columns; empty: no header.
      rows: cells; the first of a row is its heading. With a header, cells that start with a digit are numbers.
      name: CSS class.
    """
    table = SubElement(SubElement(parent, "div", {"class": "scroll"}), "table", {"class": name})
    if header:
        line = SubElement(SubElement(table, "thead"), "tr")
        for text in header:
            add(line, "th", text, {"scope": "col"})
    body = SubElement(table, "tbody")
    for first, *others in rows:
        line = SubElement(body, "tr")
        add(line, "th", first, {"scope": "row"})
        for text in others:
            kinds = ["number"] if text[:1].isdigit() and header else []
            kinds += ["best"] if isinstance(text, Best) else []
            add(line, "td", text, {"class": " ".join(kinds)} if kinds else {})


def add_examples(parent: Element, examples: Iterable[Mapping[str, Any]]) -> None:
    """Add images with their best-ranked texts.

    Args:
      parent: element that gets the examples.
      examples: fields of `ExamplePrediction`, with the image as a data URI.
    """
    grid = SubElement(parent, "div", {"class": "examples"})
    for example in examples:
        expected, correct = "; ".join(example["expected"]), example["correct"]
        figure = SubElement(grid, "figure", {"class": "correct" if correct else "mistake"})
        SubElement(figure, "img", {"src": example["image"], "alt": expected})
        caption = SubElement(figure, "figcaption")
        add(caption, "p", "Correct" if correct else "Mistake", {"class": "verdict"})
        add(caption, "p", f"True: {expected}")
        add(caption, "p", "Predicted, with cosine similarity:")
        predictions = SubElement(caption, "ol")
        for text, value in zip(example["predicted"], example["similarity"], strict=True):
            add(predictions, "li", f"{text} ({value:.3f})")


def data_uri(content: bytes, kind: str) -> str:
    """Encode an image file as a data URI of a kind such as "image/png"."""
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def format_metric(metric: str, value: float) -> str:
    """Format a loss in nats or a fraction as a percentage."""
    return f"{value:.4f} nats" if metric.endswith("loss") else f"{100 * value:.2f} %"


def words(name: str) -> str:
    """Turn "mean_per_class_recall" into "mean per class recall"."""
    name = name.replace("zero_shot", "zero-shot").replace("few_shot", "few-shot").replace("_", " ")
    return re.sub(r" map$", " mAP", name)
