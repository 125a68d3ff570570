"""Output of the leading process."""

from infcl_jax.runtime.outputs import print_line
from infcl_jax.runtime.processes import is_lead


def say(*lines: str) -> None:
    """Print a line, or the lines of a table, on the leading process only."""
    if is_lead():
        print_line(*lines)
