"""Work directories: no planted link is followed, damaged configurations are named, and one process holds the lock."""

import dataclasses
import json
import os
import subprocess
import threading
import time
from pathlib import Path

import pytest
from PIL import Image

from infcl_jax.evaluation.html_page import new_page, write_html
from infcl_jax.evaluation.plots import _save
from infcl_jax.evaluation.writers import append_csv, write_examples, write_json
from infcl_jax.runtime import workdir
from infcl_jax.runtime.exit_codes import RESUME, Interrupted
from infcl_jax.runtime.file_io import replace_text
from infcl_jax.runtime.workdir import LOCK_FILE, STALE, Holder
from infcl_jax.training import (
    LOG_FILE,
    MetricWriter,
    Outputs,
    RunConsole,
    WorkdirLock,
    load_config,
    prepare_workdir,
    save_config,
)
from infcl_jax.training.nonfinite import SKIPPED_FILE, Safeguards


def log(folder):
    with RunConsole() as console:
        console.open_log(folder, Outputs())


def lock(folder):
    with WorkdirLock(folder):
        pass


def metrics(folder):
    with MetricWriter(folder, writers=("csv",)) as writer:
        writer.write(1, {"loss": 1.0})


class Picture:
    """Figure of one pixel."""

    def savefig(self, path, **options):
        Image.new("RGB", (1, 1)).save(path, "PNG")


# Name of the file, and its writer.
WRITERS = {
    LOCK_FILE: lock,
    LOG_FILE: log,
    "metrics.jsonl": metrics,
    "metrics.csv": metrics,
    SKIPPED_FILE: lambda folder: Safeguards("skip", workdir=folder).close(),
    "config.json": lambda folder: save_config(folder, {}),
    "results.csv": lambda folder: append_csv(folder / "results.csv", [], {"model": "tiny"}),
    "results.json": lambda folder: write_json(folder / "results.json", [], {}),
    "examples.json": lambda folder: write_examples(folder / "examples.json", []),
    "report.html": lambda folder: write_html(folder / "report.html", new_page("page")[0]),
    "curves.png": lambda folder: _save(Picture(), folder / "curves.png"),
    "train.conversion.json": lambda folder: replace_text(folder / "train.conversion.json", "[]"),
    ".writable-0": prepare_workdir,
}


@pytest.mark.parametrize("form", ["{}", "{}.tmp"])
@pytest.mark.parametrize("name", WRITERS)
def test_no_write_follows_a_planted_link(name, form, tmp_path, capsys):
    folder, outside = tmp_path / "run", tmp_path / "outside"
    folder.mkdir()
    content = b"model\n" if name == "results.csv" else b"[]"  # of the same header; of the same settings
    outside.write_bytes(content)
    os.utime(outside, (1, 1))
    link = folder / form.format(name)
    link.symlink_to(outside)
    refused = ""
    try:
        WRITERS[name](folder)
    except (OSError, ValueError) as error:
        refused = str(error)
    assert (outside.read_bytes(), outside.stat().st_mtime) == (content, 1)
    if link.is_symlink() and form == "{}" and name != ".writable-0":  # not replaced
        lines = (refused or capsys.readouterr().out).splitlines()
        assert len([line for line in lines if str(link) in line]) == 1, lines


@pytest.mark.parametrize("content", [b"[]", b"{", b"\xff", b"[" * 10**5, None])
def test_a_damaged_configuration_is_named(content, tmp_path):
    path = Path(tmp_path, "config.json")
    os.mkfifo(path) if content is None else path.write_bytes(content)
    with pytest.raises(
        ValueError, match=rf"^expected the configuration of a run in {tmp_path}: expected .*config.json"
    ):
        load_config(tmp_path)


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
