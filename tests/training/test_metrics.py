"""The metrics file after crashes, and its JSON."""

import json
import math

import jax.numpy as jnp
import numpy as np
import pytest

from infcl_jax.training.metrics import MetricWriter, read_metrics


def refuse_constant(name):
    raise AssertionError(f"{name} is not JSON")


def strict_lines(workdir):
    text = (workdir / "metrics.jsonl").read_text()
    assert text.endswith("\n")
    return [json.loads(line, parse_constant=refuse_constant) for line in text.splitlines()]


def write_steps(workdir, steps, **options):
    with MetricWriter(workdir, **options) as writer:
        for step in steps:
            writer.write(step, {"loss": float(step)})


def test_each_line_is_on_disk_once_written(tmp_path):
    writer = MetricWriter(tmp_path / "new" / "folder")
    for step in (1, 2):
        writer.write(step, {"loss": 0.5})
        lines = strict_lines(tmp_path / "new" / "folder")
        assert [line["step"] for line in lines] == list(range(1, step + 1))
    assert set(lines[0]) == {"step", "time", "loss"}
    writer.close()


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (1.5, 1.5),
        (np.float32(0.25), 0.25),
        (jnp.asarray(2.5, jnp.bfloat16), 2.5),
        (jnp.asarray([3.0]), 3.0),
        (np.int64(2**40), 2**40),
        (True, 1),
        (math.nan, "NaN"),
        (jnp.asarray(jnp.inf), "Infinity"),
        (-np.float32("inf"), "-Infinity"),
    ],
)
def test_scalars_become_valid_json_and_come_back(tmp_path, value, written):
    with MetricWriter(tmp_path) as writer:
        writer.write(1, {"metric": value})
    (line,) = strict_lines(tmp_path)
    assert line["metric"] == written
    (read,) = read_metrics(tmp_path / "metrics.jsonl")
    np.testing.assert_equal(read["metric"], float(written))


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({"loss": np.zeros(2)}, "real scalar for metric 'loss'"),
        ({"loss": "0.5"}, "real scalar"),
        ({"loss": 1j}, "real scalar"),
        ({"loss": None}, "real scalar"),
        ({"step": 3}, "rename"),
        ({"time": 3.0}, "rename"),
    ],
)
def test_bad_metrics_are_named_and_leave_the_file_valid(tmp_path, metrics, message):
    with MetricWriter(tmp_path) as writer:
        with pytest.raises(ValueError, match=message):
            writer.write(1, {"first": 1.0} | metrics)
        writer.write(2, {"loss": 1.0})
    assert [line["step"] for line in strict_lines(tmp_path)] == [2]


@pytest.mark.parametrize(
    ("resume_step", "kept"), [(None, [0, 10, 10, 20, 30]), (20, [0, 10, 10, 20]), (0, [0]), (99, 5)]
)
def test_resuming_cuts_the_lines_after_the_restored_step(tmp_path, resume_step, kept):
    write_steps(tmp_path, [0, 10, 10, 20, 30])
    before = strict_lines(tmp_path)
    write_steps(tmp_path, [31], resume_step=resume_step)
    lines = strict_lines(tmp_path)
    kept = before if kept == 5 else [line for line in before if line["step"] in kept]
    assert lines[:-1] == kept
    assert lines[-1]["step"] == 31
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_last_line_torn_anywhere_is_tolerated(tmp_path):
    write_steps(tmp_path, [1, 2, 3])
    path = tmp_path / "metrics.jsonl"
    whole = path.read_bytes()
    last = whole.rindex(b"\n", 0, -1) + 1
    for end in range(last, len(whole)):
        path.write_bytes(whole[:end])
        # The line is whole as soon as its closing brace is there.
        complete = [1, 2, 3] if end == len(whole) - 1 else [1, 2]
        assert [line["step"] for line in read_metrics(path)] == complete
        write_steps(tmp_path, [4])
        assert [line["step"] for line in strict_lines(tmp_path)] == [*complete, 4]


def test_a_broken_line_before_the_last_is_named(tmp_path):
    write_steps(tmp_path, [1])
    path = tmp_path / "metrics.jsonl"
    for junk in (b'{"step": 2, "lo', b"\xff\x00", b"[2]", b'{"loss": 2}'):
        path.write_bytes(junk + b"\n" + b'{"step": 3}\n')
        with pytest.raises(ValueError, match="line 1"):
            MetricWriter(tmp_path)
        with pytest.raises(ValueError, match="line 1"):
            read_metrics(path)


@pytest.mark.parametrize(("size", "message"), [(2**40, "at most 1024 MiB"), (2**25, "line 1")])
def test_a_sparse_file_is_refused(tmp_path, size, message):
    path = tmp_path / "metrics.jsonl"
    with path.open("wb") as file:
        file.truncate(size)
        file.seek(0, 2)
        file.write(b"\n{}")
    with pytest.raises(ValueError, match=message):
        read_metrics(path)


def test_only_the_lead_touches_the_folder(tmp_path):
    write_steps(tmp_path / "run", [1, 2], lead=False, writers=("csv", "tensorboard"))
    assert list(tmp_path.iterdir()) == []
    write_steps(tmp_path, [1, 2, 3])
    write_steps(tmp_path, [4], lead=False, resume_step=1)
    assert [line["step"] for line in strict_lines(tmp_path)] == [1, 2, 3]


def test_writing_after_close_is_refused(tmp_path):
    writer = MetricWriter(tmp_path)
    writer.close()
    writer.close()
    with pytest.raises(ValueError, match="after close"):
        writer.write(1, {"loss": 1.0})
