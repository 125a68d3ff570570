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


def train(steps, step_seconds, batch_ready, *, transfer=0.0, pause=0.0, host=False, resumes=False, **options):
    """Seconds of waiting and of all steps in a loop whose batches are in host memory at `batch_ready(n)`."""
    clock, ready = Clock(), 0.0

    def next_batch(number):
        clock.now = max(clock.now, batch_ready(number))
        return {"image": np.zeros(1) if host else Array(clock, clock.now + transfer)}

    with DataWait(clock, **options) as wait:
        for number in range(steps):
            wait.batch(lambda number=number: next_batch(number))
            previous, ready = ready, max(ready, clock.now + transfer) + step_seconds
            wait.step({"loss": Array(clock, ready)})
            clock.now = max(clock.now, previous)  # reads the metrics of the previous step
            if pause and number == steps // 2:
                clock.now = ready + pause
                if resumes:
                    wait.resume()
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


@pytest.mark.parametrize("resumes", [False, True])
def test_every_step_is_observed_with_what_it_waits_for(resumes):
    observed = []
    options = {"observe": lambda *seconds: observed.append(seconds), "resumes": resumes}
    train(4, 1.0, lambda n: 3.0 if n == 1 else 0.0, pause=100.0, **options)
    expected = [(0.0, 2.0, 1.0), (0.0, 0.0, 1.0), (0.0 if resumes else 100.0, 0.0, 1.0)]
    assert observed == expected


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
