"""Waits for data, slow steps, profiled steps, and garbage collection during training."""

import functools
import gc
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from infcl_jax.training import DataWait, Profile, rare_garbage_collection


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


def test_waits_for_other_processes_are_no_waits_for_data():
    clock, seconds = Clock(), 0.0

    def next_batch():
        nonlocal seconds
        clock.now, seconds = clock.now + 5.0, seconds + 5.0
        return {"image": np.zeros(1)}

    with DataWait(clock=clock) as wait:
        for _ in range(3):
            wait.batch(next_batch, lambda: seconds)
            wait.step({"loss": Array(clock, clock.now + 1.0)})
        assert wait.take(3)[0] == 0.0


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


def run(steps, workdir, said, first=1, last=6, **options):
    with Profile(steps, workdir, say=said.append, **options) as profile:
        for step in range(first, last + 1):
            profile.start(step)
            metrics = {"loss": jnp.float32(step) + 1}
            profile.stop(step, metrics)


def test_a_trace_is_written_with_a_line_that_says_where(tmp_path):
    said = []
    run((3, 4), tmp_path, said)
    (trace,) = tmp_path.glob("profile/plugins/profile/*/*.trace.json.gz")
    assert trace.stat().st_size > 0
    (line,) = said
    assert line.startswith(f"profile of steps 3 to 4: tensorboard --logdir={tmp_path / 'profile'} ")


@pytest.mark.parametrize(
    ("steps", "first", "last", "lead", "events"),
    [
        ((3, 4), 1, 6, True, ["start 3", "stop 4", "profile of steps 3 to 4"]),
        ((3, 3), 1, 6, True, ["start 3", "stop 3", "profile of steps 3 to 3"]),
        ((1, 4), 3, 6, True, ["start 3", "stop 4", "profile of steps 3 to 4"]),  # resumed inside
        ((3, 9), 1, 6, True, ["start 3", "stop 6", "profile of steps from 3 on"]),  # the run stops inside
        ((3, 4), 5, 6, True, []),
        ((), 1, 6, True, []),
        ((3, 4), 1, 6, False, []),
    ],
)
def test_the_traced_steps_are_those_of_the_window(tmp_path, monkeypatch, steps, first, last, lead, events):
    happened, now = [], [first - 1]
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: happened.append(f"start {now[0] + 1}"))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: happened.append(f"stop {now[0]}"))
    with Profile(steps, tmp_path, lead=lead, say=lambda line: happened.append(line.split(":")[0])) as profile:
        for step in range(first, last + 1):
            profile.start(step)
            now[0] = step
            profile.stop(step, {})
    assert happened == events


def test_a_profiler_that_fails_is_one_line(tmp_path, monkeypatch):
    def refuse(folder):
        raise RuntimeError("Profile has already been started.\nOnly one")

    said = []
    monkeypatch.setattr(jax.profiler, "start_trace", refuse)
    run((3, 4), tmp_path, said)
    assert said == [f"warning: no profile in {tmp_path / 'profile'}: Profile has already been started. Only one"]


@pytest.mark.parametrize("frozen", [False, True])
def test_collection_is_rare_and_restored(frozen):
    gc.freeze() if frozen else gc.unfreeze()
    before = gc.get_threshold(), gc.get_freeze_count() > 0
    with pytest.raises(KeyError), rare_garbage_collection():
        assert gc.get_freeze_count() > 0 and gc.get_threshold()[0] >= 50_000
        raise KeyError
    assert (gc.get_threshold(), gc.get_freeze_count() > 0) == before
    gc.freeze()  # as the other tests expect
