"""Lines of the leading process, and of each process."""

import functools
import logging

import jax

from infcl_jax.runtime.outputs import print_line
from infcl_jax.runtime.processes import is_lead

_logger = logging.getLogger(__name__)


def say(*lines: str) -> None:
    """Print a line, or the lines of a table, on the leading process only."""
    if is_lead():
        print_line(*lines)


def process_prefix() -> str:
    """Return the start of lines that every process prints, such as "process 3: "; "" if there is one process."""
    return f"process {jax.process_index()}: " if jax.process_count() > 1 else ""


@functools.cache
def warn_once(message: str) -> None:
    """Log a warning unless the process has logged it before."""
    _logger.warning(message)
