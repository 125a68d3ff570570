"""Starts that fail; `python -m tests.faults.starts` tries more."""

import pytest

from tests.faults import starts


@pytest.mark.parametrize(
    "name",
    [
        "SIGTERM 0.3 s after the start",
        pytest.param("port of a program", marks=pytest.mark.full),
        pytest.param("second job, ranks (1, 0), first training", marks=pytest.mark.slow),
        pytest.param("second job, ranks (0, 1), first waiting", marks=pytest.mark.full),
        pytest.param("SIGSEGV after joining", marks=pytest.mark.full),
    ],
)
def test_processes_end_with_one_line(tmp_path, name):
    run, statuses, texts = starts.cases()[name]
    assert starts.judge(run(tmp_path / "run"), statuses, *texts) == ""
