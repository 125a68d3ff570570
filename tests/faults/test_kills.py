"""Runs killed at random moments, and the search for processes that outlive them."""

import os
import subprocess
import sys

import pytest

from tests.faults import kills


@pytest.mark.slow
def test_runs_killed_at_random_moments_end_as_if_nothing_had_been(tmp_path):
    """Two processes with a worker each, sample state and tar files."""
    assert kills.kill_runs(2, seed=0, names=list(kills.SCENARIOS)[-1:], folder=tmp_path) == []


def test_processes_that_outlive_their_parent_are_named_and_ended(monkeypatch):
    monkeypatch.setattr(kills, "ORPHAN_SECONDS", 0.0)
    parent = "import subprocess; subprocess.Popen(['sleep', '60'])"  # returns once the child runs its program
    subprocess.run([sys.executable, "-c", parent], env=os.environ | {kills.MARKER: "a"}, check=True)
    assert kills.end_orphans("another") == []
    assert kills.end_orphans("a") == ["sleep 60 "]
    monkeypatch.setattr(kills, "ORPHAN_SECONDS", 60.0)
    assert kills.end_orphans("a") == []
