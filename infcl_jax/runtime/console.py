"""Output of the leading process."""

from infcl_jax.runtime.distributed import is_lead
from infcl_jax.runtime.outputs import print_line


def say(*lines: str) -> None:
    """Print a line, or the lines of a table, on the leading process only."""
    if is_lead():
        print_line(*lines)
