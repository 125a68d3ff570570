"""Phases of the start of a run."""

import json

import pytest
import runs


@pytest.mark.slow
def test_the_phases_add_up_and_the_cache_saves_compilation():
    flags = ("--model=tiny", "--batch_size=64")
    finished = runs.command("experiments.benchmarks.startup", *flags)
    empty, filled = (json.loads(line) for line in finished.stdout.splitlines() if line.startswith("{"))
    for phases, cache in ((empty, "empty"), (filled, "filled")):
        assert phases.pop("cache") == cache
        total, ahead = phases.pop("total"), phases.pop("compile_ahead")
        assert sum(phases.values()) == pytest.approx(total, abs=0.1)
        assert 0 < ahead < total
        phases["compile"] += ahead
    assert filled["compile"] < empty["compile"] / 2
