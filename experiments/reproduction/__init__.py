"""Tables and figures of four papers as lists of cells, their measurement and their pages."""

from experiments.reproduction.cells import measure_cells, read_cells
from experiments.reproduction.target import SCALES, Cell, Entry, Target
from experiments.reproduction.targets import TARGETS, target_named

__all__ = ["SCALES", "TARGETS", "Cell", "Entry", "Target", "measure_cells", "read_cells", "target_named"]
