"""Lines of a long task: how far it is, its rate and the time left."""

import pytest

from infcl_jax.runtime.progress import Progress, format_seconds


@pytest.mark.parametrize(
    ("done", "total", "first", "each", "expected"),
    [
        # The first item compiles, and does not count.
        (0, 10, 1000, 60, ["x: 1 of 10 files", "x: 2 of 10 files, 0.017 files/s, 8:00 left"]),
        (0, 10, 6, 6, ["x: 2 of 10 files, 0.17 files/s, 0:48 left", "x: 4 of 10 files, 0.17 files/s, 0:36 left"]),
        (5, 20, 30, 12, ["x: 6 of 20 files", "x: 7 of 20 files, 0.083 files/s, 2:36 left"]),
        (0, 500, 1, 0.01, []),
    ],
)
def test_lines_are_ten_seconds_apart_with_rate_and_time_left(done, total, first, each, expected):
    now, said = [0.0], []
    progress = Progress("x", total, "files", said.append, done=done, clock=lambda: now[0])
    for number in range(done, total):
        now[0] += each if number > done else first
        progress.add()
    assert said[:2] == expected


def test_a_clock_that_stands_still_gives_no_rate():
    now, said = [0.0], []
    progress = Progress("x", 4, "files", said.append, clock=lambda: now[0])
    now[0] = 20.0
    progress.add(2)
    progress.add()
    assert said == ["x: 2 of 4 files"]


def test_durations_are_hours_minutes_and_seconds():
    assert [format_seconds(seconds) for seconds in (0.4, 61, 3723.4)] == ["0:00", "1:01", "1:02:03"]
