"""Progress of long tasks and of runs: rates, time left and measurements, without sleeping."""

import jax.numpy as jnp
import pytest

from infcl_jax.runtime.progress import Progress, format_seconds
from infcl_jax.training import Pauses, RunConsole, TrainProgress


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


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def make_progress(total=100, eval_every=0, checkpoint_every=0, lead=True, **options):
    clock = Clock()
    pauses = Pauses(
        total_steps=total, eval_every=eval_every, checkpoint_every=checkpoint_every, evaluates=eval_every > 0
    )
    return TrainProgress(RunConsole(lead=lead), pauses, **{"batch_size": 64, "clock": clock} | options), clock


def lines(capsys):
    """Printed lines without their times of day."""
    return [line.split("  ", 1)[1] for line in capsys.readouterr().out.splitlines()]


def test_rates_leave_out_the_compile_step_and_pauses(capsys):
    progress, clock = make_progress(eval_every=200)
    clock.now += 500  # compilation
    first = progress.update(1, {"loss": 4.0, "logit_scale": 14.285, "finite": {"the loss": True}})
    assert lines(capsys) == ["step   1/100  loss 4.0000  scale 14.29"]
    assert set(first) == {"seconds"}
    clock.now += 5
    assert progress.update(11, {"loss": jnp.asarray(3.5)})["examples_per_second"] == pytest.approx(128)
    with progress.pause("evaluation"):
        clock.now += 100
    with progress.pause("checkpoint"):
        clock.now += 40
    clock.now += 5
    assert progress.update(21, {"loss": 3.0})["examples_per_second"] == pytest.approx(128)
    # 79 steps of half a second, an evaluation of 100 s and a checkpoint of 40 s.
    assert lines(capsys)[-1] == "step  21/100  loss 3.0000  left 3:00  128 images/s  scale 14.29"


def test_a_pause_ends_when_its_body_raises():
    progress, clock = make_progress()
    progress.update(1, {})
    with pytest.raises(KeyError), progress.pause("evaluation"):
        clock.now += 50
        raise KeyError
    clock.now += 1
    assert progress.update(2, {})["examples_per_second"] == pytest.approx(64)


def test_the_first_evaluations_are_named_until_one_is_measured(capsys):
    progress, clock = make_progress(eval_every=40)
    progress.update(1, {})
    clock.now += 10
    progress.update(11, {})
    with progress.pause("evaluation"):
        clock.now += 7
    clock.now += 30
    progress.update(41, {})
    assert lines(capsys)[1:] == [
        "step  11/100  left 1:29 + 3 evaluations  64 images/s",
        "step  41/100  left 1:13  64 images/s",  # 59 steps and 2 evaluations
    ]


@pytest.mark.parametrize("total", [7, 12])
@pytest.mark.parametrize(("eval_every", "checkpoint_every"), [(0, 0), (3, 0), (4, 6), (6, 4), (20, 1)])
@pytest.mark.parametrize("saves_evaluated", [False, True])
def test_pauses_are_those_of_the_loop(total, eval_every, checkpoint_every, saves_evaluated):
    intervals = {"eval_every": eval_every, "checkpoint_every": checkpoint_every}
    pauses = Pauses(total_steps=total, saves_evaluated=saves_evaluated, **intervals)
    for step in range(1, total + 1):
        left = range(step, total + 1)
        evaluated = {s for s in left if s == total or (eval_every and s % eval_every == 0)}
        saved = {s for s in left if s == total or (checkpoint_every and s % checkpoint_every == 0)}
        saved |= evaluated if saves_evaluated else set()
        assert pauses.left(step) == {"evaluation": len(evaluated), "checkpoint": len(saved)}


def test_only_due_steps_are_measured_and_rates_span_the_interval(capsys):
    progress, clock = make_progress(total=25, every=10)
    measured = []
    for step in range(3, 26):
        measured.append(bool(progress.update(step, {"loss": float(step)})))
        clock.now += 1
    assert [step for step, due in enumerate(measured, start=3) if due] == [3, 10, 20, 25]
    printed = lines(capsys)
    assert [line.split("/")[0] for line in printed] == ["step  3", "step 10", "step 20", "step 25"]
    assert all("64 images/s" in line for line in printed[1:])


def test_everything_that_is_known_is_shown(capsys, monkeypatch):
    monkeypatch.setattr("infcl_jax.runtime.progress.peak_memory", lambda devices: 3 * 2**29)
    progress, clock = make_progress(devices=4, utilization=lambda rate: rate / 1000)
    norms = {"grad_norm": 5.0, "grad_norm/image": 3.0, "grad_norm/text": 4.0}
    progress.update(1, {})
    clock.now += 0.5
    measured = progress.update(2, {"loss": 1.0, "data/wait_fraction": 0.042, **norms})
    assert measured.pop("seconds") >= 0
    assert measured == {"examples_per_second": 128, "mfu": 0.128, "memory/peak_bytes": 3 * 2**29}
    assert lines(capsys)[-1].split("  ")[2:] == [
        *("loss 1.0000", "left 0:49"),
        *("128 images/s", "32 per device", "MFU 12.8 %", "data wait 4 %", "memory 1.5 GiB"),
        "grad norm 5 (image 3, text 4)",
    ]


def test_other_processes_measure_but_stay_silent(capsys):
    progress, clock = make_progress(lead=False)
    progress.update(1, {})
    clock.now += 1
    assert progress.update(2, {})["examples_per_second"] == pytest.approx(64)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("options", [{"total": 0}, {"batch_size": 0}, {"every": 0}, {"devices": 0}])
def test_bad_intervals_are_named(options):
    with pytest.raises(ValueError, match=rf"^expected \w*{next(iter(options))}\w* >= 1, got 0$"):
        make_progress(**options)
