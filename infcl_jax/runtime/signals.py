"""Stop signals of schedulers and terminals, for processes that no run handles."""

import os
import signal
from types import FrameType

from infcl_jax.runtime.exit_codes import RESUME
from infcl_jax.runtime.printable import write_last_line

# SIGTERM of schedulers, SIGINT of Ctrl-C, SIGHUP of a closed terminal, SIGUSR1 of SLURM's --signal=USR1@SECONDS.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


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
