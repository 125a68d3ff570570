"""Charts of the metrics of runs."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from xml.etree.ElementTree import Element, SubElement

from infcl_jax.evaluation.html_page import add, words
from infcl_jax.evaluation.plots import is_score
from infcl_jax.report.charts import Line, add_chart, add_key
from infcl_jax.report.workdirs import Point, RunRecord

_X_AXES = ("step", "examples", "time")
_GIB = 2**30
_LONG_SECONDS = 7200.0  # duration of a run from which on time is in hours

# Shows the charts of the chosen axis. The fragment keeps the choice when the page is loaded again.
SCRIPT = """
for (const input of document.querySelectorAll("input[name=axis]")) {
  input.addEventListener("change", () => history.replaceState(null, "", "#axis=" + input.value));
  if (location.hash === "#axis=" + input.value) input.checked = true;
}
"""

STYLE = """
.axes { border: 0; margin: 1rem 0 0; padding: 0; }
.axes label { margin-right: 1rem; white-space: nowrap; }
""" + "".join(f"body:has(#axis-{name}:not(:checked)) .by-{name} {{ display: none; }}\n" for name in _X_AXES)


@dataclasses.dataclass(frozen=True)
class Metric:
    """Presentation of a metric."""

    title: str  # with the unit
    scale: float = 1.0  # factor from the logged value to the unit
    from_zero: bool = False  # whether the y axis starts at 0
    y_axis: str | None = None  # name of a y axis that charts share; None: an axis of its own


SPEED = {
    "examples_per_second": Metric("Throughput, examples/s", from_zero=True),
    "mfu": Metric("Model FLOPs utilization (MFU), %", 100.0, from_zero=True),
    "data/wait_fraction": Metric("Time waiting for data, %", 100.0, from_zero=True),
    "memory/peak_bytes": Metric("Peak memory of a device, GiB", 1 / _GIB, from_zero=True),
}
_LOSSES = {
    "loss": Metric("Training loss, nats", y_axis="loss of a batch"),
    "validation/batch_loss": Metric("Validation loss of batches, nats", y_axis="loss of a batch"),
    "validation/loss": Metric("Validation loss of the whole split, nats"),
}
_OPTIMIZATION = {
    "learning_rate": Metric("Learning rate", from_zero=True),
    "logit_scale": Metric("Logit scale"),
    "grad_norm": Metric("Gradient norm", y_axis="gradient norm"),
    "extra_positives": Metric("Positives in addition to the pairs", y_axis="positives per batch"),
    "grad_norm/image": Metric("Gradient norm, image tower", y_axis="gradient norm"),
    "grad_norm/text": Metric("Gradient norm, text tower", y_axis="gradient norm"),
}
_HIDDEN = ("seconds",)  # elapsed time, which is an axis


def add_curves(parent: Element, runs: Sequence[RunRecord]) -> None:
    """Add the charts for each x axis, and the choice of the axis.

    A chart has all runs that logged its metric more than once. All charts have the same x axis. Examples are the first
    choice if the batch sizes differ, otherwise steps.
    """
    sections = _sections(runs)
    if not sections:
        return
    logged = [run for run in runs if run.series]
    sizes = {run.batch_size for run in logged}
    axes = [name for name in _X_AXES if name != "examples" or None not in sizes]
    chosen = "examples" if len(sizes) > 1 and "examples" in axes else "step"
    choice = SubElement(parent, "fieldset", {"class": "axes"})
    add(choice, "span", "Horizontal axis: ")
    for name in axes:
        title, x = _x_axis(logged, name)
        label = SubElement(choice, "label")
        checked = {"checked": "checked"} if name == chosen else {}
        SubElement(label, "input", {"type": "radio", "name": "axis", "id": f"axis-{name}", "value": name} | checked)
        add(label, "span", title)
        block = SubElement(parent, "div", {"class": f"by-{name}"})
        limits = _limits(logged, x)
        for section, metrics in sections.items():
            _add_section(block, section, metrics, runs, x, limits, title)


def _sections(runs: Sequence[RunRecord]) -> dict[str, dict[str, Metric]]:
    """Return the metrics with a curve, by section; without counts that are 0 throughout."""
    names = list(dict.fromkeys(name for run in runs for name in run.series))
    scores = {name: Metric(f"{words(name)}, %", 100.0, from_zero=True) for name in names if is_score(name)}
    known = {*_LOSSES, *_OPTIMIZATION, *SPEED, *_HIDDEN}.union(*(run.evaluated for run in runs))
    logged = {name: [point.value for run in runs for point in run.series.get(name, ())] for name in names}
    others = {name: Metric(words(name)) for name in names if name not in known and any(logged[name])}
    sections = {
        "Learning": _LOSSES | scores,
        "Optimization": _OPTIMIZATION,
        "Speed and memory": SPEED,
        "Other metrics": others,
    }
    drawn = {name for run in runs for name, points in run.series.items() if len(points) > 1}
    curves = {title: {n: m for n, m in metrics.items() if n in drawn} for title, metrics in sections.items()}
    return {title: metrics for title, metrics in curves.items() if metrics}


def _add_section(
    block: Element,
    title: str,
    metrics: Mapping[str, Metric],
    runs: Sequence[RunRecord],
    x: Callable[[RunRecord, Point], float],
    limits: tuple[float, float],
    x_label: str,
) -> None:
    add(block, "h2", title)
    if len(runs) > 1:
        legend = SubElement(block, "p")
        for color, run in enumerate(runs):
            add_key(legend, run.name, color)
    lines = {name: _lines(runs, name, metric.scale, x) for name, metric in metrics.items()}
    grid = SubElement(block, "div", {"class": "charts"})
    for name, metric in metrics.items():
        same = [other for other in metrics if metrics[other].y_axis == metric.y_axis is not None] or [name]
        add_chart(
            grid,
            metric.title,
            lines[name],
            x_label=x_label,
            x_limits=limits,
            y_lines=[line for other in same for line in lines[other]],
            references=_references(runs, name),
            from_zero=metric.from_zero,
        )


def _lines(runs: Sequence[RunRecord], name: str, scale: float, x: Callable[[RunRecord, Point], float]) -> list[Line]:
    """Return the lines of the runs that logged a metric, without points of an unknown x."""
    lines = []
    for color, run in enumerate(runs):
        points = [(x(run, point), scale * point.value) for point in run.series.get(name, ())]
        if finite := [point for point in points if math.isfinite(point[0])]:
            lines.append(Line(run.name, color, *zip(*finite, strict=True)))
    return lines


def _references(runs: Sequence[RunRecord], name: str) -> list[tuple[str, float]]:
    """Return reference levels by label: chance losses, planned memory and its limit."""
    levels: dict[float, str] = {}
    for run in (run for run in runs if run.series.get(name)):
        if name in ("loss", "validation/batch_loss") and run.config.get("loss") == "clip" and run.batch_size:
            levels.setdefault(math.log(run.batch_size), f"chance of {run.batch_size:,} pairs")
        if name == "memory/peak_bytes":
            suffix = f" of {run.name}" if len(runs) > 1 else ""
            for label, key in (("planned", "peak"), ("limit", "limit")):
                if size := run.plan.get(key):
                    levels.setdefault(size / _GIB, label + suffix)
    return [(label, level) for level, label in levels.items()]


def _x_axis(runs: Sequence[RunRecord], name: str) -> tuple[str, Callable[[RunRecord, Point], float]]:
    """Return the title of an x axis and its coordinate function."""
    if name == "examples":
        return "examples seen", lambda run, point: float(point.step * (run.batch_size or 0))
    if name == "time":
        starts = {run.name: run.times[0] for run in runs}
        longest = max((run.times[1] - run.times[0] for run in runs), default=0.0)
        unit, seconds = ("hours", 3600.0) if longest > _LONG_SECONDS else ("minutes", 60.0)
        return f"{unit} since the first logged step", lambda run, point: (point.time - starts[run.name]) / seconds
    return "step", lambda run, point: float(point.step)


def _limits(runs: Sequence[RunRecord], x: Callable[[RunRecord, Point], float]) -> tuple[float, float]:
    """Return the limits of x over all metrics."""
    values = [x(run, point) for run in runs for points in run.series.values() for point in (points[0], points[-1])]
    return 0.0, max(filter(math.isfinite, values), default=0.0) or 1.0
