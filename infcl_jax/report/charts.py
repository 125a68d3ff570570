"""Line charts as inline SVG."""

import dataclasses
import itertools
import json
import math
import statistics
from collections.abc import Sequence
from xml.etree.ElementTree import Element, SubElement

from matplotlib.ticker import Locator, LogLocator, MaxNLocator

from infcl_jax.evaluation.html_page import add

# Readable on white and on black.
COLORS = ("#3b7dd8", "#e0732b", "#2f9e5b", "#c2479a", "#8a6fd1", "#a8862b", "#1d9aa3", "#d1495b")

STYLE = """
.charts { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fill, minmax(min(24rem, 100%), 1fr)); }
.charts h3 { font-size: 1rem; margin: 0; }
.chart { display: block; height: auto; touch-action: pan-y; width: 100%; }
.chart text { fill: currentColor; font: 11px system-ui, sans-serif; }
.chart .grid { stroke: var(--line); stroke-width: .6; }
.chart .cursor { stroke: currentColor; stroke-width: .8; visibility: hidden; }
.chart .reference { stroke: currentColor; stroke-dasharray: 5 4; stroke-width: 1; }
.chart polyline { fill: none; stroke-linejoin: round; stroke-width: 1.6; }
.chart polygon { opacity: .2; }
.key { display: inline-block; margin-right: 1rem; }
.key::before { background: var(--color); border-radius: .2rem; content: ""; display: inline-block; height: .7em;
  margin-right: .4em; width: .7em; }
.at { margin-right: 1rem; }
.key b, .at { font-variant-numeric: tabular-nums; }
"""

# Shows the values at the pointer in the legend, and the last points' values without a pointer.
SCRIPT = """
const text = v => Math.abs(v) >= 1000 ? Math.round(v).toLocaleString("en-US") : String(Number(v.toPrecision(4)));
for (const svg of document.querySelectorAll("svg.chart")) {
  const chart = JSON.parse(svg.dataset.chart), figure = svg.parentElement;
  const values = [...figure.querySelectorAll(".key b")], at = figure.querySelector(".at");
  const last = [at.textContent, ...values.map(v => v.textContent)];
  const cursor = svg.querySelector(".cursor"), [left, right] = chart.box, [low, high] = chart.x;
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect();
    const pixel = (event.clientX - box.left) * svg.viewBox.baseVal.width / box.width;
    const x = low + (pixel - left) / (right - left) * (high - low);
    let shown = null;
    chart.lines.forEach((line, i) => {
      let near = null;
      for (const p of line) if (near === null || Math.abs(p[0] - x) < Math.abs(near[0] - x)) near = p;
      if (near === null) return;
      values[i].textContent = near[1] === null ? "not finite" : text(near[1]);
      if (shown === null || Math.abs(near[0] - x) < Math.abs(shown - x)) shown = near[0];
    });
    if (shown === null) return;
    at.textContent = chart.label + " " + text(shown);
    const place = left + (shown - low) / (high - low) * (right - left);
    cursor.setAttribute("x1", place);
    cursor.setAttribute("x2", place);
    cursor.style.visibility = "visible";
  });
  svg.addEventListener("pointerleave", () => {
    [at, ...values].forEach((element, i) => { element.textContent = last[i]; });
    cursor.style.visibility = "hidden";
  });
}
"""

_WIDTH, _HEIGHT = 420, 230  # of the SVG's coordinates, some pixels on a phone
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 410, 8, 196  # of the axes
_POINTS = 200  # of a line; of more, each point is the mean of a bucket, with a band from minimum to maximum
_LOG_RATIO = 200.0  # of positive values, from which on an axis is logarithmic


@dataclasses.dataclass(frozen=True)
class Line:
    """Line of a chart: increasing x, and y, whose non-finite values leave gaps."""

    name: str
    color: int
    x: Sequence[float]
    y: Sequence[float]


@dataclasses.dataclass(frozen=True)
class Axes:
    """Limits of the axes of a chart."""

    x: tuple[float, float]
    y: tuple[float, float]
    log: bool  # whether y is logarithmic

    def left(self, x: float) -> float:
        """Return the horizontal SVG coordinate of x."""
        return _LEFT + (x - self.x[0]) / (self.x[1] - self.x[0]) * (_RIGHT - _LEFT)

    def top(self, y: float) -> float:
        """Return the vertical SVG coordinate of y."""
        low, high = self.y
        share = math.log(y / low) / math.log(high / low) if self.log else (y - low) / (high - low)
        return _BOTTOM - share * (_BOTTOM - _TOP)


def add_chart(
    parent: Element,
    title: str,
    lines: Sequence[Line],
    *,
    x_label: str,
    x_limits: tuple[float, float],
    y_lines: Sequence[Line],
    references: Sequence[tuple[str, float]] = (),
    from_zero: bool = False,
) -> None:
    """Add a line chart with a legend, which shows the values at the pointer.

    Lines without a finite value are only in the legend. The y axis covers `y_lines`: the lines, and those of charts
    with the same axis. It starts at 0, or is logarithmic if the values span a factor of 200.
    """
    figure = SubElement(parent, "figure")
    add(figure, "h3", title)
    axes = _axes(y_lines, x_limits, [value for _, value in references], from_zero)
    svg = SubElement(
        figure, "svg", {"class": "chart", "viewBox": f"0 0 {_WIDTH} {_HEIGHT}", "role": "img", "aria-label": title}
    )
    _add_grid(svg, axes, x_label)
    for name, value in references:
        y = axes.top(value)
        _line(svg, "reference", _LEFT, y, _RIGHT, y)
        add(svg, "text", name, {"x": str(_RIGHT - 4), "y": _number(y - 4), "text-anchor": "end"})
    data = [_add_line(svg, axes, line) for line in lines]
    _line(svg, "cursor", _LEFT, _TOP, _LEFT, _BOTTOM)
    chart = {"box": [_LEFT, _RIGHT], "x": axes.x, "label": x_label, "lines": data}
    svg.set("data-chart", json.dumps(chart, separators=(",", ":")))
    caption = SubElement(figure, "figcaption")
    add(caption, "span", "last value", {"class": "at"})
    for line in lines:
        key = add_key(caption, line.name, line.color)
        finite = [y for y in line.y if math.isfinite(y)]
        add(key, "b", format_value(finite[-1]) if finite else "not finite")


def add_key(parent: Element, name: str, color: int) -> Element:
    """Add the legend of a run: its color and its name."""
    style = f"--color: {COLORS[color % len(COLORS)]}"
    return add(parent, "span", f"{name} ", {"class": "key", "style": style})


def format_value(value: float) -> str:
    """Format a number with four significant digits, and those above 1,000 as integers."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def thin(x: Sequence[float], y: Sequence[float], limit: int = _POINTS) -> list[tuple[float, float, float, float]]:
    """Reduce a line to at most `limit` buckets of neighboring points.

    Returns:
      (last x, mean, minimum, maximum) of each bucket; NaN of a bucket without finite values.
    """
    size = max(1, math.ceil(len(x) / limit))
    buckets = []
    for start in range(0, len(x), size):
        finite = [value for value in y[start : start + size] if math.isfinite(value)] or [math.nan]
        buckets.append((x[start : start + size][-1], statistics.fmean(finite), min(finite), max(finite)))
    return buckets


def _axes(lines: Sequence[Line], x_limits: tuple[float, float], references: Sequence[float], from_zero: bool) -> Axes:
    values = [y for line in lines for y in line.y if math.isfinite(y)]
    low, high = min([*values, *references], default=0.0), max([*values, *references], default=1.0)
    if not from_zero and values and low > 0 and max(values) > _LOG_RATIO * min(values):
        return Axes(x_limits, (low / 1.2, high * 1.2), log=True)
    if low >= 0 and (from_zero or low < 0.5 * high):
        low = 0.0
    margin = 0.06 * (high - low) or abs(high) * 0.1 or 1.0
    return Axes(x_limits, (low - margin if low else 0.0, high + margin), log=False)


def _add_grid(svg: Element, axes: Axes, x_label: str) -> None:
    linear = MaxNLocator(6, steps=(1, 2, 5, 10))
    for value in _ticks(axes.y, LogLocator(numticks=7) if axes.log else linear):
        y = axes.top(value)
        _line(svg, "grid", _LEFT, y, _RIGHT, y)
        add(svg, "text", _short(value), {"x": str(_LEFT - 6), "y": _number(y + 4), "text-anchor": "end"})
    for value in _ticks(axes.x, linear):
        x = axes.left(value)
        _line(svg, "grid", x, _TOP, x, _BOTTOM)
        add(svg, "text", _short(value), {"x": _number(x), "y": str(_BOTTOM + 15), "text-anchor": "middle"})
    middle = str((_LEFT + _RIGHT) / 2)
    add(svg, "text", x_label, {"x": middle, "y": str(_HEIGHT - 4), "text-anchor": "middle"})


def _ticks(limits: tuple[float, float], locator: Locator) -> list[float]:
    return [float(value) for value in locator.tick_values(*limits) if limits[0] <= value <= limits[1]]


def _add_line(svg: Element, axes: Axes, line: Line) -> list[tuple[float, float | None]]:
    """Draw a line, broken at non-finite values, and return its points."""
    color = COLORS[line.color % len(COLORS)]
    dash = ("", "6 3", "2 3")[line.color // len(COLORS) % 3]
    points = thin(line.x, line.y)
    for drawn, group in itertools.groupby(points, key=lambda point: math.isfinite(point[1])):
        if not drawn:
            continue
        segment = list(group)
        if len(line.x) > len(points):
            band = [(x, low) for x, _, low, _ in segment] + [(x, high) for x, _, _, high in reversed(segment)]
            SubElement(svg, "polygon", {"points": _points(axes, band), "fill": color})
        mean = [(x, y) for x, y, _, _ in segment]
        if len(segment) > 1:
            SubElement(svg, "polyline", {"points": _points(axes, mean), "stroke": color, "stroke-dasharray": dash})
        if len(points) <= 30 or len(segment) == 1:  # markers show single values
            for x, y in mean:
                circle = {"cx": _number(axes.left(x)), "cy": _number(axes.top(y)), "r": "2.5", "fill": color}
                SubElement(svg, "circle", circle)
    return [(float(f"{x:.8g}"), float(f"{y:.5g}") if math.isfinite(y) else None) for x, y, _, _ in points]


def _line(svg: Element, name: str, x1: float, y1: float, x2: float, y2: float) -> None:
    ends = {"x1": x1, "y1": y1, "x2": x2, "y2": y2}
    SubElement(svg, "line", {"class": name} | {k: _number(v) for k, v in ends.items()})


def _points(axes: Axes, points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{_number(axes.left(x))},{_number(axes.top(y))}" for x, y in points)


def _number(value: float) -> str:
    return f"{value:.1f}"


def _short(value: float) -> str:
    """Format the value of a tick, such as "1.5M"."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.4g}{unit}"
    return f"{value:.4g}"
