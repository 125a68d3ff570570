"""Stop signals of a process that no run handles yet."""

import signal
import subprocess
import sys

import pytest

from infcl_jax.runtime.exit_codes import RESUME, STOP_SIGNALS

PROGRAM = """
import os, signal, sys
from infcl_jax.runtime import exit_codes
number = signal.Signals({number})
signal.signal(number, {former})
exit_codes.leave_at_stop()
assert "jax" not in sys.modules  # whose import takes seconds
os.kill(os.getpid(), number)
"""


def run(number, former="SIG_DFL"):
    program = PROGRAM.format(number=int(number), former=f"signal.{former}")
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_process_leaves_with_one_line_before_it_imports_jax(number):
    process = run(number)
    line = f"asked to stop: no new step to save; the same command continues the run ({number.name})\n"
    assert (process.returncode, process.stderr) == (RESUME, line)


def test_ignored_signals_stay_ignored():
    assert run(signal.SIGHUP, former="SIG_IGN").returncode == 0
