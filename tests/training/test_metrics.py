"""The metrics file after crashes, its JSON, TensorBoard, and the rates on the console."""

import json
import math
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from infcl_jax.training.metrics import MetricWriter, ProgressPrinter, read_metrics


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


def test_only_the_lead_touches_the_folder(tmp_path):
    write_steps(tmp_path / "run", [1, 2], lead=False, tensorboard=True)
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


def test_tensorboard_gets_the_same_scalars(tmp_path):
    write_steps(tmp_path, [1, 2, 3], tensorboard=True)
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert tensorboard_scalars(events) == [("loss", 1, 1.0), ("loss", 2, 2.0), ("loss", 3, 3.0)]


def tensorboard_scalars(path):
    """Read an event file: records of length (8 bytes), checksum (4), Event, checksum (4)."""
    from tensorboardX.proto import event_pb2

    data, scalars = path.read_bytes(), []
    while data:
        size = int.from_bytes(data[:8], "little")
        event = event_pb2.Event.FromString(data[12 : 12 + size])
        scalars += [(value.tag, event.step, value.simple_value) for value in event.summary.value]
        data = data[16 + size :]
    return scalars


def test_missing_tensorboard_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ImportError, match="pip install tensorboardX"):
        MetricWriter(tmp_path, tensorboard=True)


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def make_progress(total=100, **options):
    clock = Clock()
    lines: list[str] = []
    return ProgressPrinter(total, batch_size=64, print_line=lines.append, clock=clock, **options), clock, lines


def test_rates_leave_out_the_compile_step_and_pauses():
    progress, clock, lines = make_progress()
    clock.now += 500  # compilation
    progress.update(1, {"loss": 4.0, "logit_scale": 14.285})
    assert lines == ["step   1/100  loss 4.0000  scale 14.29"]
    assert progress.examples_per_second is None
    clock.now += 5
    progress.update(11, {"loss": jnp.asarray(3.5)})
    assert progress.examples_per_second == pytest.approx(128)
    with progress.paused():
        clock.now += 100
        with progress.paused():
            clock.now += 100
        clock.now += 100
    clock.now += 5
    progress.update(21, {"loss": 3.0})
    assert progress.examples_per_second == pytest.approx(128)
    assert lines[-1] == "step  21/100  loss 3.0000  128 examples/s  left 0:00:40"


def test_a_pause_ends_when_its_body_raises():
    progress, clock, _ = make_progress()
    progress.update(1, {})
    with pytest.raises(KeyError), progress.paused():
        clock.now += 50
        raise KeyError
    clock.now += 1
    progress.update(2, {})
    assert progress.examples_per_second == pytest.approx(64)


def test_a_resumed_run_rates_only_its_own_steps():
    progress, clock, lines = make_progress(total=20000)
    progress.update(10001, {})
    clock.now += 2
    progress.update(10002, {})
    assert lines[-1] == "step 10002/20000  32 examples/s  left 5:33:16"


def test_only_due_steps_print_and_rates_span_the_interval():
    progress, clock, lines = make_progress(total=25, every=10)
    for step in range(3, 26):
        progress.update(step, {"loss": float(step)})
        clock.now += 1
    assert [line.split("/")[0] for line in lines] == ["step  3", "step 10", "step 20", "step 25"]
    assert all("64 examples/s" in line for line in lines[1:])
    assert lines[-1].endswith("left 0:00:00")


@pytest.mark.parametrize(("fraction", "shown"), [(None, False), (0.049, False), (0.051, True), (1.0, True)])
def test_waiting_for_data_is_shown_from_five_percent_on(fraction, shown):
    progress, _, lines = make_progress()
    progress.update(1, {} if fraction is None else {"data/wait_fraction": fraction})
    assert ["waiting for data" in line for line in lines] == [shown]


def test_other_processes_measure_but_stay_silent():
    progress, clock, lines = make_progress(lead=False)
    progress.update(1, {})
    clock.now += 1
    progress.update(2, {})
    assert lines == []
    assert progress.examples_per_second == pytest.approx(64)


@pytest.mark.parametrize("options", [{"total_steps": 0}, {"batch_size": 0}, {"every": 0}])
def test_bad_intervals_are_named(options):
    with pytest.raises(ValueError, match=f"expected {next(iter(options))} >= 1"):
        ProgressPrinter(**({"total_steps": 1, "batch_size": 1} | options))
