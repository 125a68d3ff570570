"""Targets: a table or figure of a paper, as entries to measure."""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

SCALES = ("tiny", "small", "paper")
NOT_LEGIBLE = "not legible in the source"

_DIGEST = 12  # hexadecimal digits in the name of a cell's file


class Paper(NamedTuple):
    """A paper with the hardware of its experiments."""

    name: str
    reference: str
    hardware: str


class Cell(NamedTuple):
    """One measurement; targets with equal cells share it.

    Attributes:
      measure: name in `experiments.reproduction.measurements.MEASUREMENTS`.
      arguments: keyword arguments of the measurement, of types that JSON has.
    """

    measure: str
    arguments: Mapping[str, Any]

    @property
    def key(self) -> str:
        """Name of the cell's file, from its measurement and arguments."""
        text = json.dumps([self.measure, dict(self.arguments)], sort_keys=True)
        return f"{self.measure}-{hashlib.sha256(text.encode()).hexdigest()[:_DIGEST]}"


def cell(measure: str, **arguments: Any) -> Cell:
    """Create a cell from keyword arguments."""
    return Cell(measure, arguments)


class Entry(NamedTuple):
    """One figure of a table.

    Attributes:
      row: label of the row.
      column: label of the column.
      cells: cells whose values are averaged, one of each seed; (): the figure is not measured at this scale.
      value: name of a value of the cells.
      paper: figure of the paper, `NOT_LEGIBLE`, or None without a counterpart in the paper.
    """

    row: str
    column: str
    cells: tuple[Cell, ...]
    value: str
    paper: float | str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """A table or figure of a paper.

    Attributes:
      name: name on the command line.
      paper: its paper.
      title: number in the paper and subject.
      shows: what the measured figures show at each scale.
      entries: function from a scale to the entries.
      unit: unit of the figures, for the axis of the picture.
      style: format specification of the figures.
      axis: label of the columns, for the axis of the picture.
      log: whether the picture has a logarithmic axis of figures.
      devices: simulated CPU devices at the scale "tiny".
      costs: estimated duration at the scales "tiny" and "small".
      curve: name of a list among the values of a cell, such as losses, to plot in place of the entries; None: none.
      comparable: whether the figures are of the paper's sizes, such as memory, so that one table has both.
    """

    name: str
    paper: Paper
    title: str
    shows: str
    entries: Callable[[str], list[Entry]]
    unit: str
    style: str = ".3g"
    axis: str = ""
    log: bool = False
    devices: int = 1
    costs: tuple[str, str] = ("2 min", "10 min")
    curve: str | None = None
    comparable: bool = False

    def cells(self, scale: str) -> list[Cell]:
        """Return the distinct cells of a scale, in the order of the entries."""
        if scale not in SCALES:
            raise ValueError(f"expected scale to be one of {SCALES}, got {scale!r}")
        return list({c.key: c for entry in self.entries(scale) for c in entry.cells}.values())
