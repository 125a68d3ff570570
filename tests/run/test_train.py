"""Training from Python: callbacks, the stop button, and the thread that trains."""

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import jax
import pytest
import runs

import infcl_jax
from infcl_jax.data import SOURCES, load_source
from infcl_jax.data.reader import BadRecords
from infcl_jax.data.workers import WorkerLost
from infcl_jax.run import training_data
from infcl_jax.run.batches import LOST_WORKERS_FILE, Batches
from infcl_jax.run.loop import TrainLoop
from infcl_jax.runtime.environment import ENVIRONMENT_FILE
from infcl_jax.runtime.exit_codes import RESUME, Interrupted
from infcl_jax.settings import make_config
from infcl_jax.training import WorkdirLock
from infcl_jax.training.checkpoint_folder import read_results

SETTINGS = {
    "dataset": "digits",
    "model": "tiny",
    "model_overrides": runs.OVERRIDES,
    "batch_size": 32,
    "total_steps": 6,
    "log_every": 2,
    "eval_every": 0,
    "checkpoint_every": 2,
    "optimizer": {"warmup_steps": 0},
    "evaluation.batch_size": 64,
}


@pytest.fixture(autouse=True)
def promotion():
    """The promotion of JAX's defaults, in all threads: optax raises a float to an integer power."""
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    yield
    jax.config.update("jax_numpy_dtype_promotion", "strict")


class Recorder(infcl_jax.Callback):
    """Events of a run. Presses Ctrl-C while the step after `stop` computes."""

    def __init__(self, stop=None):
        self.events, self.metrics, self.stop, self.complete = [], {}, stop, []

    def on_start(self, config, workdir, step):
        self.events.append(f"start {step}")
        assert (config.total_steps, config.optimizer.name) == (6, "adamw") and workdir.is_dir()

    def on_step(self, step, metrics):
        self.metrics[step] = metrics
        if step == self.stop:
            os.kill(os.getpid(), signal.SIGINT)

    def on_evaluation(self, step, results):
        self.events.append(f"evaluation {step}")
        self.results = results

    def on_checkpoint(self, step, path):
        self.events.append(f"checkpoint {step}")
        results = read_results(path)
        self.complete.append((path / "manifest.json").exists() and (step < 6 or "zero_shot/top1" in results))

    def on_end(self, step, results):
        self.events.append(f"end {step}")
        assert results == self.results


@pytest.fixture
def handler():
    """Handler of SIGINT that a notebook has, which the run leaves as it was."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield signal.default_int_handler
    signal.signal(signal.SIGINT, previous)


def test_a_stopped_run_goes_on_with_the_same_call_in_any_thread(tmp_path, handler, capsys):
    settings = SETTINGS | {"evaluation": {"zero_shot_dataset": "digits", "zero_shot_split": "zero_shot"}}
    first, second, results = Recorder(stop=2), Recorder(), []
    with pytest.raises(KeyboardInterrupt, match="saved step 3; the same call continues from there"):
        infcl_jax.train(settings, tmp_path, [first])
    assert signal.getsignal(signal.SIGINT) is handler
    assert first.events == ["start 0", "checkpoint 2", "checkpoint 3"]
    thread = threading.Thread(target=lambda: results.append(infcl_jax.train(settings, tmp_path, (second,))))
    thread.start()
    thread.join()
    steps = ["start 3", "checkpoint 4", "evaluation 6", "checkpoint 6", "end 6"]
    assert second.events == steps and results == [second.results]
    assert all(first.complete + second.complete)
    metrics = first.metrics | second.metrics
    assert list(metrics) == [1, 2, 3, 4, 5, 6]
    assert all(type(value) in (int, float) for line in metrics.values() for value in line.values())
    norms = {"grad_norm", "grad_norm/image", "grad_norm/text"}
    assert metrics[5].keys() == {"loss", "logit_scale", *norms} and "learning_rate" in metrics[6]
    assert [start["step"] for start in json.loads((tmp_path / ENVIRONMENT_FILE).read_text())] == [0, 3]


def test_another_run_in_the_workdir_is_named(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(WorkdirLock.__init__, "__kwdefaults__", {"wait": 0})
    workdir = tmp_path / "red\x1b[31m"
    workdir.mkdir()
    with WorkdirLock(workdir), pytest.raises(Interrupted) as caught:
        infcl_jax.train(SETTINGS, workdir)
    assert caught.value.code == RESUME and "red\\x1b[31m is in use by process" in capsys.readouterr().err


@pytest.mark.parametrize("error", [RuntimeError("two\nlines"), OSError(28, "No space left"), TypeError("x")])
def test_a_save_that_fails_too_does_not_hide_the_first_failure(error, capsys):
    data = SimpleNamespace(bad_records=BadRecords(SimpleNamespace(name="photos", split="train"), limit=9))
    checkpoints = SimpleNamespace(save=lambda *_: (_ for _ in ()).throw(error))
    loop = TrainLoop(None, None, 0, Batches(None, data, None, None), checkpoints, None, None)
    with pytest.raises(KeyError, match="first") as caught, loop.keeping(3, None):
        raise KeyError("first")
    assert caught.value.__notes__ == [
        "failed after step 3, which is not saved; the same command continues from the last checkpoint"
    ]
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"step 3 is not saved: {type(error).__name__}: ")


@pytest.mark.parametrize(
    ("callbacks", "message"),
    [
        (Recorder(), r"a list of callbacks, got <.*; write callbacks=\[\.\.\.\]"),
        ([Recorder], "callbacks that are objects of infcl_jax.Callback, got <class"),
    ],
)
def test_callbacks_are_checked_first(callbacks, message):
    with pytest.raises(ValueError, match=f"^expected {message}"):
        infcl_jax.train(SETTINGS, "nowhere", callbacks)


class Deadly:
    """Digits of which one kills the worker that reads it."""

    name = "deadly"

    def __init__(self, split, deadly=None):
        self.split, self.digits, self.deadly = split, load_source("digits", split), deadly

    def __len__(self):
        return len(self.digits)

    def __getitem__(self, index):
        if index == self.deadly and multiprocessing.parent_process() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.digits[index]


def test_a_killed_worker_interrupts_the_run_once_at_the_same_step(monkeypatch, tmp_path, capsys):
    settings = SETTINGS | {"dataset": "deadly", "num_workers": 1, "evaluations": (), "evaluation.retrieval_dataset": ""}
    with contextlib.closing(training_data(make_config(settings | {"num_workers": 0}), Deadly("train"))) as data:
        deadly = data.batch_indices(3)[0]
    monkeypatch.setitem(SOURCES, "deadly", lambda split: Deadly(split, deadly))
    with pytest.raises(Interrupted) as caught:
        infcl_jax.train(settings, tmp_path)
    (line,) = capsys.readouterr().err.splitlines()
    assert caught.value.code == RESUME and line == str(caught.value)
    assert "data worker 1 of 1 was killed (SIGKILL); the host has" in line and "; lost at step" in line
    with pytest.raises(WorkerLost, match="again, so another start would lose it too"):
        infcl_jax.train(settings, tmp_path)
    assert (tmp_path / LOST_WORKERS_FILE).exists()
    infcl_jax.train(settings | {"num_workers": 0}, tmp_path)
    assert not (tmp_path / LOST_WORKERS_FILE).exists()


@pytest.mark.parametrize(
    ("by_path", "message"),
    [(True, 'expected a script with `if __name__ == "__main__":`'), (False, "got <stdin>; save")],
)
def test_a_script_that_workers_cannot_import_ends_with_one_line(tmp_path, by_path, message):
    settings = SETTINGS | {"num_workers": 1, "cpu_devices": 1}
    script = tmp_path / "script.py"
    script.write_text(f"import infcl_jax\ninfcl_jax.train({settings}, {str(tmp_path / 'run')!r})\n")
    with script.open() as file:
        arguments = [sys.executable, str(script)] if by_path else [sys.executable, "-"]
        environment = os.environ | {"PYTHONPATH": str(runs.ROOT)}
        end = subprocess.run(arguments, stdin=file, capture_output=True, text=True, timeout=240, env=environment)
    (line,) = end.stderr.splitlines()
    assert end.returncode == 1 and message in line and line.endswith("num_workers=0")


@pytest.mark.parametrize("keep_best", ["zero_shot/top2", "top1"])
def test_a_metric_that_is_not_measured_is_named_before_the_first_step(tmp_path, keep_best):
    settings = SETTINGS | {"keep_best": keep_best, "evaluation.zero_shot_dataset": "digits"}
    settings["evaluation.zero_shot_split"] = "zero_shot"
    with pytest.raises(ValueError, match=f"^expected keep_best to be one of .*zero_shot/top1.*, got '{keep_best}'$"):
        infcl_jax.train(settings, tmp_path)
    assert not (tmp_path / "checkpoints").exists()
