"""A run killed at a random moment, and the search for processes that outlive it."""

import os
import subprocess
import sys

import pytest

from tests.faults import kills


@pytest.mark.slow
def test_a_run_killed_at_a_random_moment_ends_as_if_nothing_had_been(monkeypatch, tmp_path):
    """Two processes with a worker each, sample state and tar files. `python -m tests.faults.kills` kills many runs."""
    monkeypatch.setattr(kills, "STEPS", 12)
    monkeypatch.setattr(kills, "EVAL_EVERY", 6)
    assert kills.kill_runs(1, seed=0, names=list(kills.SCENARIOS)[-1:], folder=tmp_path) == []


def test_processes_that_outlive_their_parent_are_named_and_ended(monkeypatch):
    monkeypatch.setattr(kills, "ORPHAN_SECONDS", 0.0)
    parent = "import subprocess; subprocess.Popen(['sleep', '60'])"  # returns once the child runs its program
    subprocess.run([sys.executable, "-c", parent], env=os.environ | {kills.MARKER: "a"}, check=True)
    assert kills.end_orphans("another") == []
    assert kills.end_orphans("a") == ["sleep 60 "]
    monkeypatch.setattr(kills, "ORPHAN_SECONDS", 60.0)
    assert kills.end_orphans("a") == []
