"""Lock of a work directory: one holder at a time; locks of dead processes are taken over."""

import dataclasses
import json
import os
import subprocess
import threading
import time

import pytest

from infcl_jax.runtime import workdir
from infcl_jax.runtime.exit_codes import RESUME, Interrupted
from infcl_jax.runtime.workdir import LOCK_FILE, STALE, Holder
from infcl_jax.training import WorkdirLock

HERE = Holder.own()
ELSEWHERE = dataclasses.replace(HERE, boot="another", host="remote")


def write(workdir, holder, age=0.0):
    """Leave the lock of a process behind whose last heartbeat is `age` seconds old."""
    path = workdir / LOCK_FILE
    path.write_text(json.dumps(dataclasses.asdict(holder)))
    os.utime(path, (time.time() - age,) * 2)


def dead():
    """A process of this host that has ended."""
    process = subprocess.Popen(["true"])
    process.wait()
    return dataclasses.replace(HERE, pid=process.pid)


def test_a_second_run_is_refused_until_the_first_ends(tmp_path):
    with WorkdirLock(tmp_path):
        with pytest.raises(
            Interrupted, match=f"in use by process {os.getpid()} on host .*, heartbeat 0 s ago"
        ) as error:
            WorkdirLock(tmp_path, wait=0).__enter__()
        assert error.value.code == RESUME
    assert (tmp_path / LOCK_FILE).read_text() == ""
    with WorkdirLock(tmp_path, wait=0):
        pass


def test_a_run_waits_for_one_that_is_ending(tmp_path):
    lines, first = [], WorkdirLock(tmp_path).__enter__()

    def say(line):
        lines.append(line)
        first.__exit__(None, None, None)

    with WorkdirLock(tmp_path, say):
        assert len(lines) == 1 and lines[0].endswith("waiting up to 60 s")


@pytest.mark.parametrize(
    ("holder", "age", "flock"),
    [
        (dead(), 0.0, True),  # also after kill -9
        (HERE, 0.0, True),  # its `flock` is free: not this process, but one with its reused ID
        (dead(), 0.0, None),
        (dataclasses.replace(HERE, start=1), 0.0, None),
        (ELSEWHERE, STALE + 1, True),
    ],
)
def test_locks_of_dead_processes_are_taken_over(tmp_path, monkeypatch, holder, age, flock):
    monkeypatch.setattr(workdir, "_flock", lambda file: flock)
    write(tmp_path, holder, age)
    lines = []
    with WorkdirLock(tmp_path, lines.append, wait=0):
        assert lines == [f"workdir {tmp_path}: released the lock of {holder}, which has ended"]


@pytest.mark.parametrize(("holder", "age", "flock"), [(HERE, 2 * STALE, None), (ELSEWHERE, STALE - 30, True)])
def test_locks_of_living_processes_are_respected(tmp_path, monkeypatch, holder, age, flock):
    monkeypatch.setattr(workdir, "_flock", lambda file: flock)
    write(tmp_path, holder, age)
    with pytest.raises(Interrupted, match=f"process {holder.pid} on host {holder.host}"):
        WorkdirLock(tmp_path, wait=0).__enter__()


def test_a_truncated_lock_is_free(tmp_path):
    (tmp_path / LOCK_FILE).write_text('{"host": ')
    with WorkdirLock(tmp_path, wait=0):
        pass


def test_a_run_whose_lock_was_taken_over_ends(tmp_path, monkeypatch, capfd):
    statuses = []

    def leave(status):
        statuses.append(status)
        raise SystemExit  # ends the thread alone

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)  # that of pytest reports SystemExit
    monkeypatch.setattr(workdir, "BEAT", 0.01)
    with WorkdirLock(tmp_path) as lock:
        write(tmp_path, ELSEWHERE)
        lock._thread.join()
    assert statuses == [RESUME]
    assert f"taken over by {ELSEWHERE}; ended this run" in capfd.readouterr().err
    assert (tmp_path / LOCK_FILE).read_text()  # of the other process


def test_a_lock_that_became_a_fifo_is_left_alone(tmp_path):
    with WorkdirLock(tmp_path):
        (tmp_path / LOCK_FILE).unlink()
        os.mkfifo(tmp_path / LOCK_FILE)
    assert (tmp_path / LOCK_FILE).is_fifo()


@pytest.mark.parametrize("user", [0, 2**31 - 2])
def test_a_lock_of_another_user_is_named(tmp_path, monkeypatch, user):
    (tmp_path / LOCK_FILE).touch()
    monkeypatch.setattr(workdir, "open_writable", lambda path, *_: (_ for _ in ()).throw(PermissionError(13, "")))
    monkeypatch.setattr(type(tmp_path), "stat", lambda path, **_: os.stat_result([0, 0, 0, 0, user, 0, 0, 0, 0, 0]))
    owner = "root" if user == 0 else f"user {user}"
    with pytest.raises(PermissionError, match=rf"^cannot lock workdir .* belongs to {owner}; .*delete the file, other"):
        WorkdirLock(tmp_path).__enter__()


def test_the_heartbeat_touches_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(workdir, "BEAT", 0.01)
    with WorkdirLock(tmp_path):
        os.utime(tmp_path / LOCK_FILE, (0, 0))
        while (tmp_path / LOCK_FILE).stat().st_mtime == 0:
            pass
