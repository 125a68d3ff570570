"""Lines on the console: the leading process's, each process's, and a live one."""

from __future__ import annotations

import functools
import logging
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax

from infcl_jax.runtime.outputs import print_line, write_stdout
from infcl_jax.runtime.printable import printable
from infcl_jax.runtime.processes import is_lead

_logger = logging.getLogger(__name__)
_CLEAR = "\r\x1b[K"  # to the start of the line, then erase it (ECMA-48)


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


class LiveLine:
    """Last line of a terminal, which is replaced in place."""

    def fit(self, fields: Sequence[str]) -> str:
        """Join and escape the fields that fit into the terminal."""
        fields = list(map(printable, fields))
        width = shutil.get_terminal_size().columns - 1  # a full line would wrap
        line = fields[0][:width]
        for field in fields[1:]:
            if len(line) + 2 + len(field) <= width:
                line += f"  {field}"
        return line

    def replace(self, text: str) -> None:
        """Replace the line."""
        write_stdout(f"{_CLEAR}{text}")

    def above(self, text: str, line: str) -> None:
        """Print text above the line."""
        write_stdout(f"{_CLEAR}{text}\n{line}")

    def end(self) -> None:
        """End the line; the next one starts below."""
        write_stdout("\n")


class NotebookLine(LiveLine):
    """Output of a notebook cell, which is replaced in place."""

    def __init__(self, display: Callable[..., Any]) -> None:
        self._display, self._handle = display, None  # `IPython.display.display` and the output

    def fit(self, fields: Sequence[str]) -> str:
        """Join the fields, with escaped control characters; the cell wraps them."""
        return "  ".join(map(printable, fields))

    def replace(self, text: str) -> None:
        """Replace the output."""
        content = {"text/plain": text}
        if self._handle is None:
            self._handle = self._display(content, raw=True, display_id=True)
        else:
            self._handle.update(content, raw=True)

    def above(self, text: str, line: str) -> None:
        """Print text below the output, which cannot move; the next output follows."""
        self.end()
        write_stdout(f"{text}\n")

    def end(self) -> None:
        """Leave the output as it is; the next line is a new output."""
        self._handle = None


def in_notebook() -> bool:
    """Return whether a Jupyter kernel runs this process."""
    ipython = sys.modules.get("IPython")  # a kernel has imported it
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


def live_line() -> LiveLine | None:
    """Return the live line of a notebook or a terminal; None elsewhere."""
    if in_notebook():
        from IPython.display import display

        return NotebookLine(display)
    try:
        terminal = sys.stdout.isatty()
    except ValueError:  # closed
        return None
    return LiveLine() if terminal and os.environ.get("TERM") != "dumb" else None
