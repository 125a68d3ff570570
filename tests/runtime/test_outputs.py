"""Files through a full, removed or read-only disk: nothing raised, nothing lost."""

import errno
import json
import os

import pytest

from infcl_jax.runtime import outputs
from infcl_jax.runtime.outputs import AppendFile, Outputs
from infcl_jax.training import MetricWriter, read_metrics
from tests.faults import disks

REASONS = {
    "full": "the disk is full",
    "read_only": "the file system is read-only",
    "permission": "permission denied",
}


@pytest.fixture
def said():
    return []


@pytest.mark.parametrize("name", disks.FAULTS)
def test_metrics_survive_a_fault_of_the_disk(tmp_path, said, name):
    with MetricWriter(tmp_path, writers=("tensorboard",), outputs=Outputs(said.append)) as writer:
        writer.write(1, {"loss": 1.0})
        with disks.fault(name, tmp_path):
            writer.write(2, {"loss": 2.0})
            writer.write(3, {"loss": 3.0})
        writer.write(4, {"loss": 4.0})
    lost = name == "removed"  # with the file that was removed
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4][lost:]
    warnings = [line for line in said if line.startswith(f"warning: cannot write {tmp_path / 'metrics.jsonl'}")]
    assert [REASONS[name] in line for line in warnings] == ([] if lost else [True])
    assert not lost or [line for line in said if "metrics.jsonl was removed" in line]


def test_a_run_trains_through_a_read_only_disk(tmp_path):
    steps, warnings = disks.train_through("read_only", tmp_path, writers=("tensorboard",), **{"optimizer.name": "lion"})
    assert steps == [1, 2, 3, 4, 5, 6]
    assert len(warnings) == 3 and all("read-only" in line for line in warnings)  # metrics.jsonl, TensorBoard, run.log
    log = (tmp_path / "run.log").read_text()
    assert all(f"step {step}/6" in log for step in steps)
    assert (tmp_path / "curves.png").stat().st_size > 0


def test_what_is_written_of_a_record_is_cut_off(tmp_path, monkeypatch, said):
    write, room = os.write, 12  # bytes of the disk

    def nearly_full(descriptor, data):
        left = room - os.fstat(descriptor).st_size
        if left < len(data):
            write(descriptor, data[:left])
            raise OSError(errno.ENOSPC, "")
        return write(descriptor, data)

    file = AppendFile(tmp_path / "lines", Outputs(said.append))
    monkeypatch.setattr(outputs.os, "write", nearly_full)
    for number in range(3):
        file.write(b"record %d\n" % number)
        assert (tmp_path / "lines").read_bytes() == b"record 0\n"
    room = 100
    file.close()
    assert (tmp_path / "lines").read_bytes() == b"record 0\nrecord 1\nrecord 2\n"
    assert len(said) == 2 and "written after 2 failed" in said[1]


def test_memory_of_waiting_records_is_bounded(tmp_path, monkeypatch, said):
    monkeypatch.setattr(outputs, "_WAITING_BYTES", 20)
    file = AppendFile(tmp_path / "folder" / "lines", Outputs(said.append))
    with disks.fault("read_only", tmp_path):
        for number in range(9):
            file.write(b"%d23456789\n" % number)
    file.close()
    assert (tmp_path / "folder" / "lines").read_bytes() == b"723456789\n823456789\n"
    assert "dropped the 7 oldest records" in said[-1]


def test_failed_writes_are_repeated_and_summed_up(tmp_path, said):
    files, path = Outputs(said.append), tmp_path / "config.json"
    with disks.fault("permission", tmp_path):
        for _ in range(3):
            assert not files.attempt(path, lambda: path.write_text(json.dumps({})))
        assert files.summary() == f"not written: {path} (permission denied)"
        assert len(said) == 1
    files.retry()
    assert path.read_text() == "{}" and files.summary() == ""


def test_an_unwritable_stdout_is_no_error(monkeypatch):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stdout", full)
        outputs.print_line("step 1")
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())  # so that closing can flush
