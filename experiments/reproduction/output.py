"""Output of a target: table, picture and results as JSON."""

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.reproduction.cells import OUT_OF_MEMORY
from experiments.reproduction.target import Entry, Target

TABLE_FILE, PICTURE_FILE, RESULTS_FILE = "table.md", "figure.png", "results.json"
FAILED, MISSING, NONE = "failed", "not run", "-"

_DPI = 72
_LEAST = 1e-9  # relative difference that is drawn for equal losses
_COLORS = 10

Records = Mapping[str, Mapping[str, Any]]


def write_output(target: Target, scale: str, records: Records, folder: str | Path) -> Path:
    """Write the table, the picture and the results of a target.

    Returns:
      The file of the table.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    entries = target.entries(scale)
    (folder / TABLE_FILE).write_text(tables(target, entries, records) + "\n")
    results = [
        {
            "row": entry.row,
            "column": entry.column,
            "measured": measured(entry, records),
            "paper": entry.paper,
            "cells": [cell.key for cell in entry.cells],
        }
        for entry in entries
    ]
    about = {"target": target.name, "scale": scale, "paper": target.paper.reference, "hardware": target.paper.hardware}
    (folder / RESULTS_FILE).write_text(json.dumps(about | {"entries": results}, indent=1) + "\n")
    draw(target, entries, records, folder / PICTURE_FILE)
    return folder / TABLE_FILE


def measured(entry: Entry, records: Records) -> list[float] | str | None:
    """Return the values of an entry, one of each seed.

    Without values: "failed", "out of memory" or "not run"; None for a figure of the paper alone.
    """
    if not entry.cells:
        return None
    cell_records = [records.get(cell.key) for cell in entry.cells]
    if None in cell_records:
        return MISSING
    if any(record["status"] == OUT_OF_MEMORY for record in cell_records):
        return OUT_OF_MEMORY
    if any(record["status"] != "ok" or entry.value not in record["values"] for record in cell_records):
        return FAILED
    return [record["values"][entry.value] for record in cell_records]


def overview(targets: Sequence[Target]) -> str:
    """Format the list of targets as a table in Markdown."""
    lines = ["| target | paper | shows | tiny, estimated | small, estimated |", "| --- | --- | --- | --- | --- |"]
    lines += [f"| `{t.name}` | {t.paper.name} | {t.title} | {' | '.join(t.costs)} |" for t in targets]
    return "\n".join(lines) + "\n"


def tables(target: Target, entries: Sequence[Entry], records: Records) -> str:
    """Format the figures as Markdown: a table "measured / paper" if they are comparable, else one for each.

    Several seeds give their mean and range.
    """
    here = [(entry, _here(entry, records, target.style)) for entry in entries]
    paper = [(entry, _paper(entry, target.style)) for entry in entries]
    if target.comparable:
        pairs = [(entry, f"{a} / {b}") for (entry, a), (_, b) in zip(here, paper, strict=True)]
        return _table("measured / paper", pairs)
    measured_here = _table("measured here", [(entry, text) for entry, text in here if entry.cells])
    published = _table("in the paper", [(entry, text) for entry, text in paper if entry.paper is not None])
    return "\n\n".join(filter(None, (measured_here, published)))


def _table(title: str, texts: Sequence[tuple[Entry, str]]) -> str:
    """Format the texts of entries as one table; an empty one as an empty text."""
    if not texts:
        return ""
    columns = list(dict.fromkeys(entry.column for entry, _ in texts))
    cells: dict[str, dict[str, str]] = {}
    for entry, text in texts:
        cells.setdefault(entry.row, {})[entry.column] = text
    lines = [f"| {title} | {' | '.join(columns)} |", f"|{' --- |' * (len(columns) + 1)}"]
    lines += [f"| {row} | {' | '.join(by_column.get(c, '') for c in columns)} |" for row, by_column in cells.items()]
    return "\n".join(lines)


def _here(entry: Entry, records: Records, style: str) -> str:
    values = measured(entry, records)
    if not isinstance(values, list):
        return values or NONE
    mean = _figure(statistics.mean(values), style)
    return f"{mean} ({_figure(min(values), style)} to {_figure(max(values), style)})" if len(values) > 1 else mean


def _paper(entry: Entry, style: str) -> str:
    if entry.paper is None or isinstance(entry.paper, str):
        return entry.paper or NONE
    return _figure(entry.paper, style)


def _figure(value: float, style: str) -> str:
    """Format a figure; large ones without an exponent."""
    return format(value, ",.0f" if abs(value) >= 1000 and "e" in format(value, style) else style)


def draw(target: Target, entries: Sequence[Entry], records: Records, path: Path) -> None:
    """Draw the figures over the columns: measured solid, the paper's dashed.

    With `Target.curve`, draw the curves over the steps.
    """
    if target.curve is not None:
        _draw_curves(target, entries, records, path)
        return
    columns = list(dict.fromkeys(entry.column for entry in entries))
    rows = list(dict.fromkeys(entry.row for entry in entries))
    figure = Figure(figsize=(8, 4.2), dpi=_DPI, layout="constrained")
    axes = figure.subplots()
    if len(columns) == 1:  # the rows take the place of the columns
        columns, rows = rows, columns
        entries = [entry._replace(row=entry.column, column=entry.row) for entry in entries]
    for number, row in enumerate(rows):
        own = [entry for entry in entries if entry.row == row]
        color = f"C{number % _COLORS}"
        points = [(columns.index(e.column), v) for e in own if isinstance(v := measured(e, records), list)]
        paper = [(columns.index(e.column), e.paper) for e in own if isinstance(e.paper, int | float)]
        if points:
            positions, values = [x for x, _ in points], [v for _, v in points]
            axes.plot(
                positions, [statistics.mean(v) for v in values], color=color, marker="o", label=row.replace("`", "")
            )
            if max(map(len, values)) > 1:
                axes.fill_between(positions, [min(v) for v in values], [max(v) for v in values], color=color, alpha=0.2)
                axes.vlines(positions, [min(v) for v in values], [max(v) for v in values], color=color, alpha=0.5)
        if paper:
            label = None if points else row.replace("`", "")
            axes.plot(*zip(*paper, strict=True), color=color, linestyle="--", marker="x", alpha=0.6, label=label)
    axes.set_xticks(range(len(columns)), columns, fontsize=7, rotation=20, ha="right")
    axes.set(xlabel=target.axis, ylabel=target.unit, yscale="log" if target.log else "linear")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=6.5, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5), title="dashed: paper")
    figure.savefig(path)


def _draw_curves(target: Target, entries: Sequence[Entry], records: Records, path: Path) -> None:
    """Draw the losses of all entries and their differences from the first."""
    figure = Figure(figsize=(8, 3.2), dpi=_DPI, layout="constrained")
    left, right = figure.subplots(1, 2)
    values_by_row = {
        e.row: records[e.cells[0].key]["values"] for e in entries if isinstance(measured(e, records), list)
    }
    curves = {row: np.asarray(values[target.curve]) for row, values in values_by_row.items()}
    first = next(iter(curves.values()), None)
    for row, curve in curves.items():
        steps = range(1, len(curve) + 1)
        left.plot(steps, curve, label=row.replace("`", ""), linewidth=1)
        if len(curve) == len(first):
            right.plot(steps, np.maximum(deviation(curve, first), _LEAST), linewidth=1)
    left.set(xlabel="step", ylabel=target.unit)
    right.set(xlabel="step", ylabel="relative difference from the first", yscale="log")
    left.legend(fontsize=6.5, frameon=False)
    figure.savefig(path)


def deviation(curve: Sequence[float] | np.ndarray, reference: Sequence[float] | np.ndarray) -> np.ndarray:
    """Compute the relative difference of every step's loss."""
    return np.abs(np.asarray(curve) - reference) / np.abs(reference)
