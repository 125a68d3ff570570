"""Loss of data workers. `tests/run/test_train.py` has runs and scripts."""

import contextlib
import gc
import itertools
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import types
import uuid
from pathlib import Path
from types import SimpleNamespace

import grain
import numpy as np
import pytest

from infcl_jax.data import workers
from infcl_jax.data.iterator import TrainIterator
from infcl_jax.data.reader import BAD_RECORDS, as_array
from infcl_jax.data.workers import WorkerFunction, WorkerLost, WorkersCannotStart, check_guard

FLAG = "_inheriting"  # of a process that imports the script
LAST = 12  # chunk at which a worker ends


class Numbers:
    """Samples that are not read."""

    name, split = "numbers", "train"

    def __len__(self):
        return 10**4


def ends(by):
    """Return the function that makes a chunk, or ends its process with a signal or an exception."""

    def chunk(rows):
        number = rows[0][0]
        if number == LAST:
            if isinstance(by, Exception):
                raise by
            os.kill(os.getpid(), by)
        return {"image": np.full((256, 256), number, np.uint8), BAD_RECORDS: as_array({})}

    return chunk


@pytest.mark.slow
@pytest.mark.parametrize(
    ("by", "error", "message"),
    [
        (signal.SIGKILL, WorkerLost, r"worker 1 of 2 was killed \(SIGKILL\); the host has .* probably out of memory"),
        (MemoryError(), WorkerLost, "a data worker had no memory; the host has"),
    ],
)
def test_the_end_of_a_worker_is_an_error_and_leaves_no_shared_memory(monkeypatch, by, error, message):
    name = uuid.uuid4()
    monkeypatch.setattr(uuid, "uuid4", lambda: name)
    monkeypatch.setattr("infcl_jax.data.iterator._CHUNK", 1)
    reading = {"num_workers": 2, "prefetch_batches": 1, "cores": 2}
    iterator = TrainIterator(Numbers(), ends(by), batch_size=2, seed=0, row_bytes=2**16, **reading)
    with contextlib.closing(iterator), pytest.raises(error, match=message) as caught:
        for number in itertools.count():
            assert next(iterator)["image"][0, 0] == 2 * number and number < LAST // 2
    if error is WorkerLost:
        assert caught.value.killed and number + iterator.batches_ahead(caught.value) >= LAST // 2
    del caught
    gc.collect()
    deadline = time.monotonic() + 10  # a thread of grain frees the arrays of this process
    while (left := list(Path("/dev/shm").glob(f"i{name.hex[:8]}*"))) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left


@pytest.mark.parametrize(
    ("code", "error", "killed", "message"),
    [
        (-signal.SIGBUS, WorkerLost, True, r"\(SIGBUS\); /dev/shm has .* --shm-size=.* num_workers=0"),
        (-signal.SIGSEGV, WorkerLost, True, r"one of 3 data workers was killed \(SIGSEGV\); native code"),
        (-signal.SIGRTMIN - 1, WorkerLost, True, "was killed"),
        (3, WorkerLost, False, "ended with exit status 3; its own error is above"),
        (workers._UNGUARDED, WorkersCannotStart, None, 'if __name__ == "__main__":'),
    ],
)
def test_exit_codes_are_explained(code, error, killed, message):
    of_grain = RuntimeError(f"Worker process was terminated unexpectedly with exit code {code}. Search the logs above")
    lost = workers._lost(of_grain, 3, "prefix")
    assert type(lost) is error and getattr(lost, "killed", None) == killed
    with pytest.raises(error, match=message):
        raise lost


@pytest.mark.parametrize(
    "error", [RuntimeError("of the data"), FileNotFoundError(2, "missing", "a.jpg"), OSError(28, "")]
)
def test_errors_of_the_data_are_not_losses(error):
    assert workers._lost(error, 2, "prefix") is None


def test_full_shared_memory_is_named():
    assert "/dev/shm has" in str(workers._lost(OSError(28, "No space left on device", "/prefix1a2b"), 2, "prefix"))


@pytest.mark.parametrize("name", ["SpawnProcess-1", "grain-process-prefetch-1"])
def test_a_process_that_imports_the_script_cannot_start_work(monkeypatch, name):
    process = SimpleNamespace(name=name)
    setattr(process, FLAG, True)
    monkeypatch.setattr(multiprocessing, "current_process", lambda: process)
    statuses = []

    def leave(status):
        statuses.append(status)
        raise SystemExit

    monkeypatch.setattr(os, "_exit", leave)
    worker = name.startswith("grain")
    with pytest.raises(SystemExit if worker else WorkersCannotStart):
        check_guard()
    assert statuses == [workers._UNGUARDED] * worker
    delattr(process, FLAG)
    check_guard()  # the target of a process, which the script may start


@pytest.mark.parametrize(
    ("attributes", "refused"),
    [
        ({"__file__": "<stdin>"}, True),
        ({"__file__": "/nowhere/removed.py"}, True),
        ({"__file__": __file__}, False),
        ({"__file__": "<stdin>", "__spec__": SimpleNamespace(name="package.module")}, False),  # python -m
        ({}, False),  # notebooks and python -c
    ],
)
def test_workers_need_a_script_that_they_can_import(monkeypatch, attributes, refused):
    main = types.ModuleType("__main__")
    vars(main).update(attributes)
    monkeypatch.setitem(sys.modules, "__main__", main)
    expected = pytest.raises(WorkersCannotStart, match="num_workers=0") if refused else contextlib.nullcontext()
    with expected:
        workers.worker_dataset(grain.MapDataset.range(3).to_iter_dataset(), 1)


class Add:
    def __init__(self, summands):
        self.summands = summands

    def __call__(self, number):
        return number + sum(self.summands)


def test_state_travels_in_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    function = WorkerFunction(Add(list(range(100_000))).__call__)
    pickled = [pickle.dumps(function) for _ in range(2)]
    assert len(pickled[0]) < 1000  # a pipe holds 64 KiB
    assert len(list(tmp_path.iterdir())) == 1
    assert [pickle.loads(data)(1) for data in pickled] == [function(1)] * 2
    del function
    assert not list(tmp_path.iterdir())
