"""Phases of the start of a run."""

import json

import pytest
import runs

from experiments.benchmarks import startup


def test_an_event_in_another_one_counts_once():
    spans, inner = [], [("trace", 1.0, 0.5), ("trace", 2.0, 0.1), ("trace", 1.9, 1.0)]
    for span in [*inner, ("lower", 0.5, 3.0), ("trace", 4.0, 2.0)]:
        startup._add(spans, startup._Span(*span))
    assert startup._totals(spans) == {"trace": 2.0, "lower": 3.0, "compile": 0.0}


@pytest.mark.full
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
