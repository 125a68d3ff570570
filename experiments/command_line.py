"""Entry point of commands and benchmarks: flags and one-line errors.

Imports neither JAX nor `infcl_jax`, which `experiments.benchmarks.open_clip` does not need.
"""

import sys
from collections.abc import Callable
from typing import Any

from absl import app, flags, logging

_TRACEBACK = flags.DEFINE_bool("traceback", False, "Show the traceback of an error, not only its message.")

# Errors that a user can correct. All others are defects and keep their traceback.
USER_ERRORS = (ValueError, OSError, ImportError, FloatingPointError)


def one_line(error: Exception) -> str:
    """Format an error as one line."""
    return f"error: {' '.join(str(error).split())}"


def parse_flags(argv: list[str]) -> list[str]:
    """Parse the flags; an error exits with status 1 and one line on stderr."""
    try:
        return flags.FLAGS(argv)
    except flags.Error as error:
        sys.exit(one_line(error))


def run(
    command: Callable[[], Any],
    *,
    parser: Callable[[list[str]], list[str]] = parse_flags,
    user_errors: tuple[type[Exception], ...] = USER_ERRORS,
    message: Callable[[Exception], str] = one_line,
) -> None:
    """Parse the flags and call `command()`.

    User errors exit with status 1 and their message on stderr. With `--traceback` they are raised.

    Args:
      command: function without arguments.
      parser: parser of the flags, for `absl.app.run`.
      user_errors: errors that a user can correct.
      message: formatter of these errors.
    """

    def main(argv: list[str]) -> None:
        logging.set_verbosity(logging.WARNING)
        try:
            if len(argv) > 1:
                raise ValueError(f"expected flags only (--name=value), got {' '.join(argv[1:])}")
            command()
        except user_errors as error:
            if _TRACEBACK.value:
                raise
            sys.exit(message(error))

    app.run(main, flags_parser=parser)
