"""Watchdogs with a clock of their own: what is said, and how often."""

import math

import pytest

from infcl_jax.runtime import watchdog
from infcl_jax.runtime.watchdog import DataStall, LossSpikes, SlowSteps


def spikes(losses):
    """Steps of the lines, and the number of spikes."""
    detector = LossSpikes()
    lines = [step for step, loss in enumerate(losses, start=1) if detector.update(step, loss)]
    return lines, detector.take().get("loss_spikes", 0)


def noisy(count, level=4.0, width=0.05):
    """Losses that fall slowly, with deterministic noise."""
    return [level - 0.001 * n + width * math.sin(37 * n) for n in range(count)]


def test_noise_is_no_spike():
    assert spikes(noisy(1000)) == spikes(noisy(1000, level=0.1, width=0.01)) == ([], 0)


@pytest.mark.parametrize(("rise", "found"), [(0.1, 0), (0.19, 0), (3.0, 1), (math.nan, 0), (math.inf, 0)])
def test_a_loss_far_above_the_last_ones_is_a_spike(rise, found):
    losses = noisy(60, width=0.001)
    losses[50] += rise
    assert spikes(losses) == ([51] * found, found)


def test_the_rise_counts_in_deviations():
    losses = noisy(60, width=0.5)
    losses[50] += 1.5  # 4 deviations
    assert spikes(losses) == ([], 0)


def test_few_steps_are_no_level():
    assert spikes([4.0] * 19 + [9.0]) == ([], 0)
    assert spikes([4.0] * 20 + [9.0]) == ([21], 1)


def test_repeated_spikes_give_one_line_in_a_hundred_steps():
    losses = noisy(300)
    for step in range(50, 250, 10):
        losses[step - 1] += 5.0
    assert spikes(losses) == ([50, 150], 20)


@pytest.mark.parametrize(
    ("waits", "cause"),
    [
        ((0.0, 30.0, 2.0), "for data"),
        ((1.0, 2.0, 40.0), "for the devices"),
        ((20.0, 0.0, 1.0), "for the training loop"),
    ],
)
def test_a_slow_step_names_what_it_waits_for(waits, cause):
    said = []
    steps = SlowSteps(100, process="process 3: ", say=said.append)
    for _ in range(25):
        steps.update(0.0, 0.1, 0.9)
    for _ in range(3):
        steps.update(*waits)
    (line,) = said  # the next two follow too soon
    assert line.startswith(f"warning: process 3: step 126 took {sum(waits):.1f} s (median 1.00 s), {max(waits):.1f} s")
    assert line.endswith(cause)


@pytest.mark.parametrize(("usual", "seconds"), [(1.0, 9.9), (10.0, 49.0), (0.001, 9.0)])
def test_a_step_within_the_bounds_is_not_slow(usual, seconds):
    said = []
    steps = SlowSteps(say=said.append)
    for _ in range(25):
        steps.update(0.0, 0.0, usual)
    steps.update(0.0, seconds, 0.0)
    assert said == []


def test_a_batch_that_does_not_arrive_is_described_with_growing_distance():
    said, clock = [], [1000.0]
    stall = DataStall(lambda: "batch 7 of photos in 0003.tar", say=said.append, clock=lambda: clock[0])

    def wait(seconds):
        for _ in range(seconds):
            clock[0] += 1.0
            stall.check()
        return "batch"

    wait(500)  # the training loop does not wait
    assert said == []
    assert stall.guard(lambda: wait(29)) == "batch" and said == []
    stall.guard(lambda: wait(250))
    expected = [
        f"warning: waiting for data for {seconds} s: batch 7 of photos in 0003.tar" for seconds in (30, 60, 120, 240)
    ]
    assert said == expected
    with pytest.raises(ZeroDivisionError):
        stall.guard(lambda: 1 // 0)
    wait(100)
    assert said == expected


def test_the_thread_checks_until_the_end(monkeypatch):
    monkeypatch.setattr(watchdog, "DATA_SECONDS", 0.0)
    monkeypatch.setattr(watchdog, "_POLL_SECONDS", 0.0)
    said = []
    with DataStall(say=said.append) as stall:
        stall.guard(lambda: [None for _ in iter(lambda: bool(said), True)])
    assert not stall._thread.is_alive() and "waiting for data" in said[0]
