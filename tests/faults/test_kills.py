"""Runs killed at random moments, and the search for processes that outlive them."""

import os
import signal
import subprocess

import pytest

from tests.faults import kills


@pytest.mark.slow
def test_runs_killed_at_random_moments_end_as_if_nothing_had_been(tmp_path):
    """Two processes with a worker each, sample state and tar files."""
    assert kills.kill_runs(3, seed=0, names=list(kills.SCENARIOS)[-1:], folder=tmp_path) == []


def test_processes_that_outlive_their_parent_are_named_and_ended(monkeypatch):
    monkeypatch.setattr(kills, "ORPHAN_SECONDS", 0.0)
    sleeper = subprocess.Popen(["sleep", "60"], env=os.environ | {kills.MARKER: "a"})
    assert kills.end_orphans("another") == []
    assert kills.end_orphans("a") == ["sleep 60 "]
    assert sleeper.wait() == -signal.SIGKILL
    monkeypatch.setattr(kills, "ORPHAN_SECONDS", 60.0)
    assert kills.end_orphans("a") == []
