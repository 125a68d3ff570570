import functools
import threading

import numpy as np
import pytest

from infcl_jax.training import DataWait


class Clock(threading.local):
    """A clock of each thread, which waiting moves."""

    now = 0.0

    def __call__(self):
        return self.now


class Array:
    """Stands in for an array on a device that is ready at a time."""

    def __init__(self, clock, ready):
        self.clock, self.ready = clock, ready

    def block_until_ready(self):
        self.clock.now = max(self.clock.now, self.ready)
        return self


def train(steps, step_seconds, batch_ready, *, transfer=0.0, pause=0.0, host=False, **options):
    """Seconds of waiting and of all steps in a loop whose batches are in host memory at `batch_ready(n)`."""
    clock, ready = Clock(), 0.0

    def next_batch(number):
        clock.now = max(clock.now, batch_ready(number))
        return {"image": np.zeros(1) if host else Array(clock, clock.now + transfer)}

    with DataWait(clock=clock, **options) as wait:
        for number in range(steps):
            wait.batch(lambda number=number: next_batch(number))
            previous, ready = ready, max(ready, clock.now + transfer) + step_seconds
            wait.step({"loss": Array(clock, ready)})
            clock.now = max(clock.now, previous)  # reads the metrics of the previous step
            if pause and number == steps // 2:
                clock.now = ready + pause
        return wait.take(steps)


@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize("data_seconds", [0.25, 0.5, 1.0, 1.25, 2.0])
def test_devices_wait_for_data_that_is_slower_than_the_step(data_seconds, host):
    waited, total = train(100, 1.0, lambda n: n * data_seconds, host=host)
    assert total == pytest.approx(1.0 + 99 * max(1.0, data_seconds))
    assert waited == pytest.approx(99 * max(0.0, data_seconds - 1.0))


def test_transfers_count_unless_they_overlap_with_the_previous_step():
    assert train(10, 1.0, lambda n: 0.0, transfer=0.5)[0] == 0.5  # of the first batch
    assert train(10, 1.0, lambda n: 2.0 * n, transfer=0.5)[0] == 0.5 + 9 * 1.0
    assert train(10, 1.0, lambda n: 0.0, transfer=3.0)[0] == pytest.approx(3.0 + 8 * 1.0)


def test_pauses_are_not_part_of_the_time():
    assert train(10, 1.0, lambda n: 0.0, pause=100.0) == train(10, 1.0, lambda n: 0.0) == (0.0, 10.0)


@pytest.mark.parametrize(
    ("batch", "device", "pause", "resumes", "line"),
    [
        (30.0, 1.0, 0.0, False, "step 130 took 31.0 s (median 1.00 s), 30.0 s of it waiting for data"),
        (0.0, 40.0, 0.0, False, "step 130 took 40.0 s (median 1.00 s), 40.0 s of it waiting for the devices"),
        (0.0, 1.0, 20.0, False, "step 130 took 21.0 s (median 1.00 s), 20.0 s of it waiting for the training loop"),
        (0.0, 1.0, 20.0, True, None),  # an evaluation
        (0.0, 9.9, 0.0, False, None),  # more than 5 times the median, but short
    ],
)
def test_a_slow_step_names_what_it_waits_for(capsys, batch, device, pause, resumes, line):
    clock, ready = Clock(), 0.0

    def next_batch(seconds):
        clock.now += seconds
        return {"image": np.zeros(1)}

    with DataWait(100, clock) as wait:
        for step in range(101, 136):
            slow = step in (130, 133)  # the second follows too soon
            clock.now = ready + (pause if slow else 0.0)
            if slow and resumes:
                wait.resume()
            wait.batch(functools.partial(next_batch, batch if slow else 0.0))
            ready = clock.now + (device if slow else 1.0)
            wait.step({"loss": Array(clock, ready)})
        wait.take(35)
    assert capsys.readouterr().out == ("" if line is None else f"warning: {line}\n")


@pytest.mark.parametrize(("usual", "seconds"), [(10.0, 39.0), (0.001, 9.0)])
def test_a_step_within_the_bounds_is_not_slow(capsys, usual, seconds):
    train(30, usual, lambda number: 0.0 if number < 28 else 28 * usual + seconds, host=True)
    assert capsys.readouterr().out == ""


def test_an_error_of_the_step_ends_the_measurement_alone():
    class Failed:
        def block_until_ready(self):
            raise RuntimeError("RESOURCE_EXHAUSTED")

    with DataWait() as wait:
        wait.batch(dict)
        wait.step(Failed())
        wait._thread.join()
        assert wait.batch(lambda: "next") == "next"
    assert wait.take() == (0.0, 0.0)
