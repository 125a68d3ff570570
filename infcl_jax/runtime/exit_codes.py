"""Exit statuses of the commands, and the errors and signals that lead to them."""

import os
import signal
from types import FrameType

from infcl_jax.runtime.printable import write_last_line

# EX_TEMPFAIL of sysexits.h: a temporary failure, and the same command continues the run.
RESUME = 75
# Errors that a user can correct: one line and status 1. All others are defects and keep their traceback.
USER_ERRORS = (ValueError, OSError, ImportError, FloatingPointError)
# SIGTERM of schedulers, SIGINT of Ctrl-C, SIGHUP of a closed terminal, SIGUSR1 of SLURM's --signal=USR1@SECONDS.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


class Interrupted(SystemExit):
    """Early end of a run that the same command continues; its status is `RESUME`.

    Examples:
      >>> from infcl_jax.runtime.exit_codes import Interrupted
      >>> try:
      ...     raise Interrupted("the scheduler stopped the run after step 100")
      ... except Interrupted as interrupted:
      ...     print(interrupted.message)
      the scheduler stopped the run after step 100

    Attributes:
      message: one line that explains the end. The commands print it on stderr.
    """

    def __init__(self, message: str):
        super().__init__(RESUME)
        self.message = message

    def __str__(self) -> str:
        return self.message


def unignored(*numbers: signal.Signals) -> list[signal.Signals]:
    """Return the signals that this process does not ignore.

    Shells start background jobs with SIGINT ignored, and nohup ignores SIGHUP. They stay ignored.
    """
    return [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]


def leave_at_stop() -> None:
    """Exit with `RESUME` at a stop signal, until a run replaces the handlers."""
    for number in unignored(*STOP_SIGNALS):
        signal.signal(number, _leave)


def ignore_stop() -> None:
    """Ignore stop signals from now on."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def nothing_to_save(reason: str, again: str = "command") -> str:
    """Describe the end of a run before its first new step."""
    return f"asked to stop: no new step to save; the same {again} continues the run ({reason})"


def _leave(number: int, frame: FrameType | None) -> None:
    write_last_line(nothing_to_save(signal.Signals(number).name))
    os._exit(RESUME)
