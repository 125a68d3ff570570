"""Evaluations of runs: tables of results, retrieved images and mistakes."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from xml.etree.ElementTree import Element, SubElement

from infcl_jax.evaluation.html_page import Best, add, add_examples, add_table, data_uri, format_metric, words
from infcl_jax.report.workdirs import RunRecord

STYLE = """
img.retrieval { background: white; border-radius: .4rem; margin: 0; }
img.retrieval { min-width: 44rem; }  /* for readable captions: on a phone, its box scrolls */
"""

_MISSING = "-"
_GRID_LEGEND = (
    "Each row has a caption of the evaluation split, the rank of its own image, and the images whose features are most "
    "similar to it, the most similar first. A green frame marks the caption's own image: in the first column it is "
    "retrieved at rank 1. A row without a frame has it further behind."
)


def add_evaluations(body: Element, runs: Sequence[RunRecord], different: Collection[str]) -> None:
    """Add a table of the latest evaluations with marked best values.

    Args:
      body: element that gets the table.
      runs: runs of the report.
      different: settings of evaluations that differ between the runs.
    """
    names = list(dict.fromkeys(name for run in runs for name in run.results))
    if not names:
        return
    add(body, "h2", "Evaluations")
    rows = [("step", *(_MISSING if run.results_step is None else f"{run.results_step:,}" for run in runs))]
    one_size = len({run.batch_size for run in runs}) == 1
    for name in names:
        comparable = one_size or not name.endswith("batch_loss")  # which grows with the batch size
        rows.append((words(name), *_cells(name, [run.results.get(name) for run in runs], comparable)))
    add_table(body, ("Metric", *(run.name for run in runs)), rows, "evaluations")
    note = "The latest evaluation of each run."
    if len(runs) > 1:
        note += " The best value of a row is green and bold."
    if different:
        note += f" Values may not compare, since these settings of the evaluations differ: {', '.join(different)}."
    add(body, "p", note, {"class": "note"})


def add_retrieval(body: Element, runs: Sequence[RunRecord]) -> None:
    """Add the images that captions retrieve, with a legend."""
    shown = [run for run in runs if run.grid is not None]
    if not shown:
        return
    add(body, "h2", "Retrieved images")
    add(body, "p", _GRID_LEGEND)
    for run in shown:
        add(body, "h3", run.name)
        box = SubElement(body, "div", {"class": "scroll"})
        source = data_uri(run.grid, "image/png")
        SubElement(box, "img", {"class": "retrieval", "src": source, "alt": f"retrieved images of {run.name}"})


def add_mistakes(body: Element, runs: Sequence[RunRecord]) -> None:
    """Add the most confused classes and examples of mistakes."""
    tasks = [(run, name, task) for run in runs for name, task in run.examples.items()]
    if not tasks:
        return
    add(body, "h2", "Mistakes")
    for run, name, task in tasks:
        add(body, "h3", f"{run.name}: {words(name)}")
        if confusions := task["confusions"]:
            add(body, "p", "Most confused classes")
            rows = [(c["expected"], c["predicted"], f"{c['images']:,}") for c in confusions]
            add_table(body, ("True", "Predicted", "Images"), rows, "confusions")
        examples = task["examples"]
        wrong = [e for e in examples if not e["correct"]]
        if not wrong:
            add(body, "p", "No mistakes among the examples.")
            continue
        block = SubElement(body, "details")
        add(block, "summary", f"Mistakes: {len(wrong)} of {len(examples)} examples")
        add_examples(block, wrong)


def _cells(name: str, values: Sequence[float | None], comparable: bool) -> list[str]:
    """Format the values of a metric and mark the best of comparable ones, the lowest of losses."""
    finite = [value for value in values if value is not None and math.isfinite(value)]
    best = (min if name.endswith("loss") else max)(finite) if comparable and len(finite) > 1 else None
    cells = []
    for value in values:
        text = _MISSING if value is None else format_metric(name, value)
        cells.append(Best(text) if value is not None and value == best else text)
    return cells
