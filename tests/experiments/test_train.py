"""Whole runs as processes: killed, stopped, resumed or distributed, with equal losses."""

import functools
import json
import os
import re
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import captioned
import jax
import numpy as np
import pytest
import runs
from runs import history

from infcl_jax import Callback, train
from infcl_jax.data.packing import PADDED
from infcl_jax.data.parallelism import Parallelism
from infcl_jax.data.reader import BadRecords
from infcl_jax.planner import OutOfMemory
from infcl_jax.run import batches, loop
from infcl_jax.run import train as run_train
from infcl_jax.run.batches import Batches, LostWorkers
from infcl_jax.run.loop import TrainLoop
from infcl_jax.runtime.exit_codes import RESUME, Interrupted
from infcl_jax.runtime.mesh import data_mesh
from infcl_jax.settings import make_config
from infcl_jax.training import (
    LOG_FILE,
    METRICS_FILE,
    Checkpointer,
    DataWait,
    Outputs,
    Safeguards,
    WorkdirLock,
    read_metrics,
)

TRAIN = "experiments.train"
STEPS, EVERY, DEVICES = 20, 5, 4
LIMIT = 240  # seconds for one process, on a busy machine
AFRESH = {"JAX_ENABLE_COMPILATION_CACHE": "0"}  # for the same bits although all is compiled again


def settings(devices=DEVICES, **changes):
    every = {"total_steps": STEPS, "checkpoint_every": EVERY, "eval_every": 2 * EVERY}
    small = every | {"cpu_devices": devices, "stop_timeout": LIMIT}
    return runs.config(**(small | changes))


def start(workdir, devices=DEVICES, **environ):
    return runs.start(TRAIN, f"--workdir={workdir}", *runs.flags(settings(devices)), **environ)


def command(module, workdir, *flags):
    """Run a command undisturbed on `DEVICES` devices, as a fork."""
    finished = runs.command(module, f"--workdir={workdir}", *flags, cpu_devices=DEVICES, seconds=LIMIT)
    assert (finished.returncode, finished.stderr) == (0, "")


def start_pair(workdir):
    """Start one run as two processes of two devices each, on the two-level mesh."""
    return runs.start_cluster(2, TRAIN, f"--workdir={workdir}", *runs.flags(settings(devices=2, mesh="hosts")))


def finish(*processes):
    """Wait for all processes; return their exit statuses and stderr."""
    finished = runs.finish(*processes, seconds=LIMIT)
    return [process.returncode for process in finished], [process.stderr for process in finished]


def stop(workdir, *processes, by):
    """Send the signal to the last process once the first checkpoint exists."""
    first, deadline = workdir / "checkpoints" / str(EVERY) / "manifest.json", time.monotonic() + LIMIT
    while not first.exists():
        assert time.monotonic() < deadline and processes[-1].poll() is None, finish(*processes)
        time.sleep(0.005)
    if by == signal.SIGINT:
        os.killpg(processes[-1].pid, by)
    else:
        processes[-1].send_signal(by)
    return finish(*processes)


def assert_close(got, expected):
    """Assert equal steps and names, and values equal up to rounding."""
    assert [list(line) for line in got] == [list(line) for line in expected]
    for line, reference in zip(got, expected, strict=True):
        assert line["step"] == reference["step"]
        for name, value in reference.items():
            # One sample more or less among 50 may have changed its rank; losses have no such steps.
            slack = 0.021 if name.startswith(("retrieval/", "zero_shot/")) else 0.0
            np.testing.assert_allclose(
                line[name], value, rtol=1e-4 if name.startswith("grad_norm") else 1e-5, atol=slack
            )


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The directory of a run that nothing disturbed, on four devices of one process."""
    workdir = tmp_path_factory.mktemp("uninterrupted")
    command(TRAIN, workdir, *runs.flags(settings()))
    return workdir


@pytest.mark.parametrize(("says", "kind"), [("RESOURCE_EXHAUSTED: 1 GiB", OutOfMemory), ("INTERNAL: x", RuntimeError)])
def test_out_of_memory_ends_with_the_plan(monkeypatch, tmp_path, says, kind):
    def fit(self, state):
        raise jax.errors.JaxRuntimeError(says)

    monkeypatch.setattr(TrainLoop, "fit", fit)
    with pytest.raises(kind) as caught, jax.numpy_dtype_promotion("standard"):  # optax's Adam mixes dtypes
        train(runs.config(), tmp_path)
    lines = str(caught.value).splitlines()
    assert ("set grad_cache.chunk_size" in lines[0] and lines[-1].startswith("peak")) == (kind is OutOfMemory)


def test_gradient_caching_follows_the_same_curve(tmp_path, finished):
    """Use offload "replay"; tests of the step cover the others."""
    cached = settings(**{"grad_cache.chunk_size": 16, "grad_cache.keep": 1, "grad_cache.offload": "replay"})
    command(TRAIN, tmp_path, *runs.flags(cached))
    for got, expected in zip(history(tmp_path), history(finished), strict=True):
        assert_close(got, expected)


@pytest.fixture(scope="module")
def uninterrupted(finished):
    """Its history."""
    return history(finished)


def train_on_tar(folder, tar, **changes):
    """Train three steps on a tar file, without evaluations."""
    config = settings(devices=1, dataset=str(folder / tar), total_steps=3, num_threads=3, **changes)
    config.evaluation.update(retrieval_dataset=None, zero_shot_dataset=None)
    return runs.command(TRAIN, f"--workdir={folder / 'run'}", *runs.flags(config))


@pytest.fixture(scope="module")
def on_tar(tmp_path_factory):
    """The folder of a tar file, of another one and of a finished run on the first, and the output of the run."""
    folder = tmp_path_factory.mktemp("tar")
    for number, name in enumerate(("a.tar", "other.tar")):
        captioned.write_tar(folder / name, captioned.members(captioned.samples(41)[number:][:40]))
    return folder, train_on_tar(folder, "a.tar")


def test_the_wait_for_tar_files_is_recorded(on_tar):
    folder, finished = on_tar
    assert finished.returncode == 0 and "data: 3 reading threads, 2 batches ahead\n" in finished.stdout
    logged = [line[26:] for line in (folder / "run" / LOG_FILE).read_text().splitlines()]
    assert logged[1:] == [line[10:] for line in finished.stdout.splitlines()]  # each after its time
    assert json.loads((folder / "run" / "config.json").read_text())["precision"] == "fp32"  # resolved
    first, *others = read_metrics(folder / "run" / METRICS_FILE)
    assert first.keys() >= {"seconds", "grad_norm", "grad_norm/image", "grad_norm/text"}
    assert "data/wait_fraction" not in first  # its time includes compilation
    assert len(others) == 2 and all(0 <= line["data/wait_fraction"] <= 1 for line in others)


def test_a_finished_run_does_not_change_and_finds_its_data_elsewhere(on_tar):
    folder, _ = on_tar
    (folder / "a.tar").rename(folder / "b.tar")
    before = {path: path.read_bytes() for path in (folder / "run").rglob("*") if path.is_file()}
    again = train_on_tar(folder, "b.tar", log_every=7)
    assert again.returncode == 0 and "the run has all of its 3 steps: nothing is written" in again.stdout
    assert [line[10:] for line in again.stdout.splitlines() if "dataset: " in line] == [
        f"dataset: '{folder}/a.tar' -> '{folder}/b.tar'"
    ]
    other = train_on_tar(folder, "other.tar")
    assert other.returncode == 1 and "with which the run in" in other.stderr and "got others in" in other.stderr
    log = folder / "run" / LOG_FILE
    after = {path: path.read_bytes() for path in (folder / "run").rglob("*") if path.is_file()}
    assert after == before, log.read_text()


def test_every_step_and_evaluation_is_recorded_once(uninterrupted):
    steps, evaluations = ([line["step"] for line in part] for part in uninterrupted)
    assert steps == list(range(1, STEPS + 1))
    assert evaluations == [10, 20]
    losses = [line["loss"] for line in uninterrupted[0]]
    assert losses[-1] < losses[0] - 0.3


def test_a_killed_run_continues_as_if_nothing_had_been(uninterrupted, tmp_path):
    assert stop(tmp_path, start(tmp_path), by=signal.SIGKILL)[0] == [-signal.SIGKILL]
    assert len(read_metrics(tmp_path / METRICS_FILE)) < len(uninterrupted[0])
    assert finish(start(tmp_path, **AFRESH)) == ([0], [""])
    assert history(tmp_path) == uninterrupted


@pytest.mark.slow
def test_a_killed_run_that_remembers_every_sample_continues_on_fewer_devices(tmp_path):
    """Resume per-sample temperatures. On as many devices, tests/faults/test_kills.py compares the bits."""
    four, two = (runs.flags(settings(devices, loss="fastclip_v2")) for devices in (4, 2))

    def run(name, flags, **environ):
        return runs.start(TRAIN, f"--workdir={tmp_path / name}", *flags, **environ)

    assert finish(run("whole", four))[0] == [0]
    assert stop(tmp_path / "fewer", run("fewer", four), by=signal.SIGKILL)[0] == [-signal.SIGKILL]
    assert finish(run("fewer", two, **AFRESH)) == ([0], [""])
    assert_close(history(tmp_path / "fewer")[0], history(tmp_path / "whole")[0])


def test_a_run_that_is_asked_to_stop_saves_and_continues(uninterrupted, tmp_path):
    (status,), (stderr,) = stop(tmp_path, start(tmp_path), by=signal.SIGTERM)
    assert status == RESUME
    (line,) = stderr.splitlines()
    saved = int(line.removeprefix("asked to stop: saved step ").split(";")[0])
    assert EVERY <= saved <= STEPS
    with Checkpointer(tmp_path) as checkpoints:
        assert checkpoints.latest_step() == saved
    command(TRAIN, tmp_path, *runs.flags(settings()))
    assert history(tmp_path) == uninterrupted
    log = (tmp_path / LOG_FILE).read_text()
    assert log.count("started on") == 2 and log.index("asked to stop") < log.index("resumed from step")


@pytest.mark.full
def test_ctrl_c_saves_as_well(tmp_path):
    """The terminal sends SIGINT to the whole process group, so to data workers too."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)  # a process inherits an ignored signal
    flags = runs.flags(settings(num_workers=1, total_steps=1000))
    process = runs.start(TRAIN, f"--workdir={tmp_path}", *flags, start_new_session=True)
    signal.signal(signal.SIGINT, previous)
    (status,), (stderr,) = stop(tmp_path, process, by=signal.SIGINT)
    assert status == RESUME
    (line,) = stderr.splitlines()
    with Checkpointer(tmp_path) as checkpoints:
        assert line.startswith(f"asked to stop: saved step {checkpoints.latest_step()};")


def test_a_second_run_in_the_same_workdir_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(run_train, "WorkdirLock", functools.partial(WorkdirLock, wait=0))
    with WorkdirLock(tmp_path), pytest.raises(Interrupted, match="is in use by process"):
        train(runs.config(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_two_processes_train_as_one(uninterrupted, tmp_path):
    assert finish(*start_pair(tmp_path)) == ([0, 0], ["", ""])
    for got, expected in zip(history(tmp_path), uninterrupted, strict=True):
        assert_close(got, expected)


@pytest.mark.slow
def test_two_processes_stop_together_and_one_continues(uninterrupted, tmp_path):
    statuses, errors = stop(tmp_path, *start_pair(tmp_path), by=signal.SIGTERM)
    assert statuses == [RESUME, RESUME]
    stopped = [[line for line in text.splitlines() if line.startswith("asked to stop")] for text in errors]
    assert len(stopped[0]) == 1
    assert stopped[0] == stopped[1]
    assert finish(start(tmp_path)) == ([0], [""])
    for got, expected in zip(history(tmp_path), uninterrupted, strict=True):
        assert_close(got, expected)


def test_an_update_that_ruins_the_parameters_is_not_saved(tmp_path):
    ruined = settings(devices=1, total_steps=1, **{"optimizer.learning_rate": 1e30})
    status, _, stderr = runs.command(TRAIN, f"--workdir={tmp_path}", *runs.flags(ruined))
    assert status == 1
    assert re.fullmatch(
        r"error: step 1: the norm of params/\S+ is NaN or infinite[^\n]* no good checkpoint; .*\n", stderr
    )
    assert not list(tmp_path.glob("checkpoints/*"))


def test_evaluate_repeats_the_final_evaluation(finished, uninterrupted):
    command("experiments.evaluate", finished)
    assert json.loads((finished / "evaluation.json").read_text()) == uninterrupted[1][-1]
    assert all((finished / name).stat().st_size > 0 for name in ("curves.png", "retrieval.png"))


def test_a_run_cannot_end_before_the_step_it_has_reached(finished, uninterrupted):
    before = (finished / "config.json").read_text()
    with pytest.raises(ValueError, match=f"expected total_steps >= {STEPS}, .* got {EVERY}; train longer"):
        train(settings(devices=1, total_steps=EVERY), finished)
    assert (finished / "config.json").read_text() == before
    assert history(finished) == uninterrupted


def parts(config, **others):
    """Stands in for `infcl_jax.run.base.Run`."""
    return SimpleNamespace(
        config=make_config(config),
        mesh=data_mesh(),
        unit="images",
        utilization=lambda rate: None,
        next_batch=next,
        **others,
    )


class Recorder:
    """Stands in for everything around the loop, and notes what happens."""

    def __init__(self, nan_at=None):
        self.events, self.metrics, self.nan_at, self.last = [], [], nan_at, None
        self.interrupted = False

    def step(self, state, batch):
        self.dispatched = state + 1
        finite = np.asarray(state + 1 != self.nan_at)
        scalars = dict.fromkeys(("loss", "logit_scale", "grad_norm"), np.float32(state + 1))
        return state + 1, {**scalars, "finite": {"the loss": finite}}

    failed_saves = 0

    def check_finite(self, step, state):
        self.checked = step

    def save(self, step, state, data):
        assert step == state == self.checked
        self.events.append(f"save {step}")

    def record(self, step, results):
        self.events.append(f"results {step}")

    def wait(self):
        self.events.append("wait")

    def take_complete(self):
        return None

    def write(self, step, metrics):
        self.metrics.append(metrics)
        self.events.append(f"{'record' if 'loss' in metrics else 'record evaluation'} {step}")

    def suite(self, variables):
        self.events.append("evaluate")
        if self.interrupted:
            raise Interrupted("between two batches")
        return {"zero_shot/top1": 0.5}

    def save_config(self, workdir, config):
        self.events.append("save settings")

    def noticed(self, step):
        return step == self.last

    def interruption(self, step):
        return Interrupted(f"saved step {step}")

    def run(self, start, stop_at=None, workdir=Path(), callback=None, **guards):
        """The events of a run of six steps, after `start`."""
        self.last = stop_at
        every = {"total_steps": 6, "checkpoint_every": 2, "eval_every": 3, "log_every": 2}
        run = parts(runs.config(**every), step=self.step, suite=self.suite)
        with DataWait() as wait:
            guards = {"callbacks": callback or Callback()} | guards
            batches = Batches(run, Data(), wait, LostWorkers(workdir, Outputs()))
            train_loop = TrainLoop(run, workdir, start, batches, self, self, self, **guards)
            assert train_loop.fit(State(start)) == {"zero_shot/top1": 0.5}
        return self.events


class Data:
    """The same batch in every step, slowly decoded, without bad records."""

    parallelism = Parallelism(num_workers=2, num_threads=8, prefetch_batches=2, cores=8)

    def __init__(self):
        self.bad_records = BadRecords(SimpleNamespace(name="photos", split="train"), limit=9)
        self.packer = PADDED

    def __next__(self):
        return runs.batch(8)

    def stats(self):
        return {"seconds/read": 1.0, "seconds/decode": 20.0}


class State(int):
    """The number of steps taken, as a state."""

    evaluated_variables = None

    def __add__(self, other):
        return State(int(self) + other)


@pytest.fixture
def recorder(monkeypatch):
    recorder = Recorder()
    monkeypatch.setattr(loop, "save_config", recorder.save_config)
    return recorder


def test_bad_records_of_all_processes_are_recorded(recorder, monkeypatch):
    """Another process reads record 7, which is known from the first checkpoint on."""
    monkeypatch.setattr(batches, "union", lambda indices: [*indices, 7])
    recorder.run(0)
    assert [line["data/bad_records/photos"] for line in recorder.metrics if "loss" in line] == [1, 1, 1]


@pytest.mark.parametrize(("start", "nan_at", "saved"), [(0, 1, False), (0, 2, True), (4, 5, False), (4, 6, True)])
def test_settings_are_saved_after_the_first_good_step(recorder, start, nan_at, saved):
    recorder.nan_at = nan_at
    with pytest.raises(FloatingPointError, match=f"step {nan_at}: the loss"):
        recorder.run(start)
    assert recorder.events == ["save settings"] * saved


def test_nothing_is_saved_or_evaluated_before_it_is_known_to_be_finite(recorder):
    events = ["save settings", "record 2", "save 2", "evaluate", "results 3", "record evaluation 3"]
    final = ["record 4", "save 4", "record 6", "save 6", "evaluate", "results 6", "record evaluation 6"]
    assert recorder.run(0) == [*events, *final]
    recorder.events, recorder.nan_at = [], 4
    with pytest.raises(FloatingPointError, match="step 4: the loss"):
        recorder.run(0)
    assert recorder.events == events


def test_callbacks_run_while_the_devices_compute_the_next_step(recorder):
    """Except where the run waits for the step: steps 2, 4 and 6 are saved, 3 and 6 evaluated."""
    ahead = {}

    class Ahead(Callback):
        def on_step(self, step, metrics):
            ahead[step] = recorder.dispatched - step

    recorder.run(0, callback=Ahead())
    assert ahead == {1: 1, 2: 0, 3: 0, 4: 0, 5: 1, 6: 0}


def test_a_skipped_step_is_counted_and_the_run_goes_on(recorder, tmp_path):
    recorder.nan_at = 3
    recorder.run(0, safeguards=Safeguards("skip", limit=2, workdir=tmp_path))
    assert [line["skipped_steps"] for line in recorder.metrics if "loss" in line] == [0, 1, 1]


@pytest.mark.parametrize(
    ("waited", "total", "offload", "fraction", "advised"),
    [
        (1.2, 10.0, "none", 0.12, True),
        (0.4, 10.0, "host", 0.04, False),
        (0.5, 0.9, "none", 0.5 / 0.9, False),  # a short run
        (0.0, 0.0, "none", None, False),
        (1.2, 10.0, "replay", None, False),
    ],
)
def test_a_wait_for_data_is_returned_and_explained_once(capsys, waited, total, offload, fraction, advised):
    config = runs.config(**{"grad_cache.chunk_size": 16, "grad_cache.offload": offload})
    waiting = Batches(parts(config), Data(), SimpleNamespace(take=lambda steps: (waited, total)), None)
    expected = {} if fraction is None else {"data/wait_fraction": fraction}
    assert [waiting.waits(steps) for steps in (1, 2)] == [expected] * 2
    line = "waiting for data: 12 % of the time, decode-bound; try num_workers=8\n"
    assert capsys.readouterr().out == line * advised


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_stop_saves_instead_of_evaluating(recorder, interrupted):
    """The stop comes in the step, or while it is evaluated."""
    recorder.interrupted = interrupted
    with pytest.raises(Interrupted, match="saved step 3"):
        recorder.run(0, stop_at=None if interrupted else 3)
    assert recorder.events == ["save settings", "record 2", "save 2", *["evaluate"] * interrupted, "save 3", "wait"]


@pytest.mark.parametrize("recorded", [False, True])
def test_a_resumed_run_makes_up_for_the_evaluation(recorder, tmp_path, recorded):
    lines = ['{"step": 3, "loss": 1.0}\n', '{"step": 3, "zero_shot/top1": 0.5}\n']
    (tmp_path / METRICS_FILE).write_text("".join(lines[: 1 + recorded]))
    recorder.run(3, workdir=tmp_path)
    assert recorder.events[:2] == (["save settings", "record 4"] if recorded else ["evaluate", "results 3"])
