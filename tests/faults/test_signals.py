"""Signals to runs of one and of two processes; `python -m tests.faults.signals` tries more."""

import signal

import pytest

from tests.faults.signals import Case, run_case


@pytest.mark.parametrize(
    "case",
    [
        Case(signal.SIGUSR1, processes=2, rank=1, started=True, delay=0.1),
        pytest.param(Case(signal.SIGHUP, processes=1, rank=0, started=False, delay=0.1), marks=pytest.mark.full),
    ],
)
def test_all_processes_leave_with_the_same_step(case, tmp_path):
    outcome = run_case(case, tmp_path)
    assert outcome.fault == ""
    assert (outcome.saved is not None) == case.started
