"""Lines of the leading process, and of each process."""

import jax

from infcl_jax.runtime.outputs import print_line
from infcl_jax.runtime.processes import is_lead


def say(*lines: str) -> None:
    """Print a line, or the lines of a table, on the leading process only."""
    if is_lead():
        print_line(*lines)


def process_prefix() -> str:
    """Return the start of lines that every process prints, such as "process 3: "; "" if there is one process."""
    return f"process {jax.process_index()}: " if jax.process_count() > 1 else ""
