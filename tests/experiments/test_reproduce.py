"""The command `experiments.reproduce`: its targets, their cells, tables and pictures."""

import dataclasses
import json
import math
import re
import signal
import time

import jax
import pytest
import runs

from experiments.benchmarks import step_case
from experiments.benchmarks.timing import Gemm
from experiments.reproduction import (
    SCALES,
    TARGETS,
    cells,
    measure_cells,
    measurements,
    output,
    plan,
    target_named,
    training,
)
from experiments.reproduction.measurements import MEASUREMENTS
from experiments.reproduction.recipes import digits
from experiments.reproduction.target import NOT_LEGIBLE, Entry, Paper, Target, cell
from experiments.reproduction.training import run_config
from infcl_jax.evaluation.suites import SUITES

COMMAND = "experiments.reproduce"
CHEAP = "disco-clip-table-3"
WHOLE = (CHEAP, "inf-cl-table-2")  # run at the scale tiny, not in two steps


@pytest.fixture(autouse=True)
def standard_promotion():
    with jax.numpy_dtype_promotion("standard"):  # optax's Adam mixes dtypes
        yield


@pytest.fixture(autouse=True)
def fast_compilation():
    """Compile without most optimizations, also where `-m slow` leaves them on for the whole process."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def a_target(*entries, **changes):
    return Target(
        **{
            "name": "some",
            "paper": Paper("Some", "A paper", "a GPU"),
            "title": "Table 1",
            "shows": "",
            "entries": lambda scale: list(entries),
            "unit": "ms",
        }
        | changes
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "expected --target, .* got none"),
        (("--target=inf-cl-table-9",), r"one of \d+ targets or all, got 'inf-cl-table-9'; did you mean inf-cl-table-"),
        ((f"--target={CHEAP}", "--scale=huge"), "--scale to be one of tiny, small, paper, got 'huge'"),
    ],
)
def test_wrong_flags_are_named(arguments, message):
    status, _, stderr = runs.command(COMMAND, *arguments)
    assert status == 1 and re.search(message, stderr), stderr


def test_the_list_has_every_target_of_the_papers():
    status, stdout, _ = runs.command(COMMAND, "--list")
    assert status == 0 and all(f"| `{name}` |" in stdout for name in TARGETS)
    numbers = {
        "inf-cl": (*(f"table-{i}" for i in (1, 2, 3, 4, "s1", "s2", "s3")), "figure-4", "figure-5", "figure-s2"),
        "grad-cache": ("figure-3", "figure-4", "table-1"),
        "disco-clip": tuple(f"table-{i}" for i in range(2, 8)),
        "fastclip": (*(f"table-{i}" for i in range(3, 7)), *(f"figure-{i}" for i in range(2, 6))),
    }
    assert {f"{paper}-{number}" for paper, of in numbers.items() for number in of} <= TARGETS.keys()


def run_values(one):
    """Return the names of the values of a training run, from its evaluations."""
    config = run_config(one.arguments.get("config", "base"), one.arguments.get("changes", {}))
    chosen = {
        "zero_shot": config.evaluation.zero_shot_dataset,
        "retrieval": config.evaluation.retrieval_dataset,
        "text_retrieval": config.text_retrieval.corpus or config.dataset == "corpus",
    }
    sets = [*config.evaluations, *(name for name, dataset in chosen.items() if dataset)]
    metrics = ("top1", "top20", "top100", "mean_r1", "image_to_text_r1", "text_to_image_r1")
    times = [1.0, 2.0] if one.measure == "short_run" else []
    return training._values({f"{name}/{metric}": 0.5 for name in sets for metric in metrics}, [1.0], times)


def test_imagenet_and_variants_is_the_mean_of_seven_sets():
    results = {f"{name}/top1": 0.1 * i for i, name in enumerate(("imagenet1k", *SUITES["imagenet_variants"]))}
    values = training._values(results, [1.0], [])
    assert len(results) == 7 and values["imagenet_and_variants"] == pytest.approx(30)
    results.pop("objectnet/top1")
    assert "imagenet_and_variants" not in training._values(results, [1.0], [])


@pytest.mark.parametrize("scale", SCALES)
def test_every_cell_has_valid_settings(scale):
    for target in TARGETS.values():
        entries = target.entries(scale)
        rows = [(entry.row, entry.column) for entry in entries]
        assert len(set(rows)) == len(rows), target.name
        assert target.cells(scale), target.name
        for one in target.cells(scale):
            assert one.measure in MEASUREMENTS
            json.dumps(dict(one.arguments))
            if one.measure in ("short_run", "full_run"):
                config = run_config(one.arguments.get("config", "base"), one.arguments.get("changes", {}))
                steps = config.total_steps or math.inf
                assert 0 <= config.optimizer.warmup_steps < steps, (target.name, one)
        for entry in entries:
            for one in entry.cells:
                if one.measure in ("short_run", "full_run"):
                    assert entry.value in run_values(one), (target.name, entry)


def test_a_failing_cell_is_recorded_and_the_others_go_on(monkeypatch, tmp_path):
    calls = []

    def measure(folder, *, number):
        calls.append(number)
        if number == 1 and calls.count(1) == 1:
            raise RuntimeError("no file\nfor this")
        if number == 2:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return {"ms": float(number)}

    monkeypatch.setitem(MEASUREMENTS, "count", measure)
    three = [cell("count", number=number) for number in range(3)]
    records = measure_cells(three, tmp_path)
    assert [records[one.key]["status"] for one in three] == ["ok", "failed", "out of memory"]
    assert records[three[1].key]["error"] == "RuntimeError: no file"
    target = a_target(*(Entry("a", str(i), (one,), "ms", 7.0) for i, one in enumerate(three)))
    text = output.write_output(target, "tiny", records, tmp_path / "some").read_text()
    assert "| a | 0 | failed | out of memory |" in text
    again = measure_cells(three, tmp_path)
    assert calls == [0, 1, 2, 1] and again[three[1].key]["values"] == {"ms": 1.0}


def test_a_stop_request_keeps_finished_cells(monkeypatch, tmp_path):
    def measure(folder, *, number):
        if number:
            raise KeyboardInterrupt
        return {"ms": 1.0}

    monkeypatch.setitem(MEASUREMENTS, "count", measure)
    two = [cell("count", number=number) for number in range(2)]
    with pytest.raises(KeyboardInterrupt):
        measure_cells(two, tmp_path)
    assert list(cells.read_cells(two, tmp_path)) == [two[0].key]


def test_tables_have_seeds_and_what_is_missing(tmp_path):
    two = [cell("count", seed=seed) for seed in range(2)]
    records = {
        one.key: {"status": "ok", "values": {"top1": value, "losses": [2.0, 1.0]}, "error": None, "seconds": 1.0}
        for one, value in zip(two, (80.0, 90.0), strict=True)
    }
    entries = [
        Entry("a", "x", tuple(two), "top1", 85.0),
        Entry("a", "y", (cell("other"),), "top1", NOT_LEGIBLE),
        Entry("b", "y", (), "", 3.0),
        Entry("b", "x", (two[0],), "lost"),
    ]
    target = a_target(*entries, style=".1f")
    here, paper = (text.splitlines() for text in output.tables(target, entries, records).split("\n\n"))
    assert here == [
        "| measured here | x | y |",
        "| --- | --- | --- |",
        "| a | 85.0 (80.0 to 90.0) | not run |",
        "| b | failed |  |",
    ]
    assert paper[2:] == ["| a | 85.0 | not legible in the source |", "| b |  | 3.0 |"]
    comparable = output.tables(a_target(*entries, style=".1f", comparable=True), entries, records)
    assert comparable.splitlines()[2:] == [
        "| a | 85.0 (80.0 to 90.0) / 85.0 | not run / not legible in the source |",
        "| b | failed / - | - / 3.0 |",
    ]
    for name, changed in (("figures", target), ("curves", a_target(*entries, curve="losses"))):
        output.draw(changed, entries, records, tmp_path / f"{name}.png")
        assert 0 < (tmp_path / f"{name}.png").stat().st_size < 60_000


def test_deviation_is_relative():
    assert output.deviation([2.0, 3.0], [2.0, 4.0]).tolist() == [0.0, 0.25]


@pytest.mark.parametrize("planned", [8, 992, 1000, 1040, 2000])
def test_the_largest_batch_is_searched_from_the_plan(planned):
    tried = []

    def steps(batch):
        tried.append(batch)
        return batch <= 1000

    low, high = measurements.search_batch(planned, 8, steps)
    assert low <= 1000 < high and low % 8 == high % 8 == 0 and high - low <= max(16, planned / 16)
    assert len(tried) == len(set(tried))


def test_not_even_one_chunk_runs():
    with pytest.raises(ValueError, match="expected a batch of 8 to run, got out of memory"):
        measurements.search_batch(100, 8, lambda batch: False)


def test_the_search_by_steps(monkeypatch, tmp_path):
    monkeypatch.setattr(measurements, "device_memory_limit", lambda: 2**26)
    make = measurements.make_train_step

    def limited(*arguments):
        step = make(*arguments)

        def run(state, batch):
            if len(batch["image"]) > 256:
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
            return step(state, batch)

        return run

    monkeypatch.setattr(measurements, "make_train_step", limited)
    monkeypatch.setattr(measurements, "largest_batch", lambda workload, limit: 288)
    one = cell("measured_batch", model="tiny", model_overrides=runs.OVERRIDES, chunk_size=32, devices=1)
    (record,) = measure_cells([one], tmp_path).values()
    assert record["values"] == {"batch_k": 0.25, "refused_k": 0.3125, "planned_k": 0.28125}


def test_gradient_caching_trains_alike(tmp_path):
    changes = {"total_steps": 3, "towers": runs.OVERRIDES}
    direct = digits(32, **changes)
    cached = digits(32, grad_cache__chunk_size=8, grad_cache__offload="host", **changes)
    records = measure_cells([direct, cached], tmp_path)
    losses = [records[one.key]["values"]["losses"] for one in (direct, cached)]
    assert len(losses[0]) == 3 and output.deviation(losses[1], losses[0]).max() <= 1e-5
    assert 0 <= records[direct.key]["values"]["top1"] <= 100


def test_a_plan_has_memory_and_time_of_each_cell():
    step = cell("step_time", model="tiny", model_overrides=runs.OVERRIDES, batch=64, devices=2)
    changes = {"model": "tiny", "model_overrides": runs.OVERRIDES, "total_steps": 500}
    run = cell("full_run", config="fastclip:quickstart,loss=clip", changes=changes)
    large = cell("loss_memory", implementation="dense", batch=2**20, dim=512, devices=1)
    planner = cell("planned_batch", changes={}, devices=8, device="A100-80", implementation="xla")
    search = cell("measured_batch", model="tiny", chunk_size=8, devices=1)
    target = a_target(*(Entry("a", str(i), (c,), "") for i, c in enumerate((run, step, large, planner, search))))
    plans = plan.plan_target(target, "small", "H100-80", 1)
    assert [one.gpus for one in plans] == [1, 2, 1, 0, 1]
    assert [one.fits for one in plans] == [True, True, False, True, True]
    assert [one.steps for one in plans] == [500, None, None, None, None]
    assert plans[0].seconds == 500 * plans[0].step_seconds > 0 and plans[2].memory > 2**42
    text = plan.describe_target(target, "small", "H100-80", 1)
    assert text.count("does not fit") == 1 and "hardware of the paper: a GPU" in text


@pytest.mark.full
def test_a_killed_command_continues(tmp_path):
    arguments = (f"--target={CHEAP}", f"--results={tmp_path}")
    process = runs.start(COMMAND, *arguments)
    deadline = time.monotonic() + 200
    while not list(tmp_path.glob("tiny/cells/*.json")) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.glob("tiny/cells/*.json")}
    status, stdout, _ = runs.finish(runs.start(COMMAND, *arguments))[0]
    assert kept and status == 0 and "| measured / paper |" in stdout
    assert all(path.stat().st_mtime_ns == written for path, written in kept.items())


# CHEAP runs as a command, see test_a_killed_command_continues
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.full) for name in ("inf-cl-table-2", "inf-cl-figure-s2")],
)
def test_a_target_runs_at_tiny(name, tmp_path):
    target = target_named(name)
    records = measure_cells(target.cells("tiny"), tmp_path)
    assert [record["error"] for record in records.values()] == [None] * len(records)
    entries = target.entries("tiny")
    output.write_output(target, "tiny", records, tmp_path / name)
    values = {(e.row, e.column): output.measured(e, records)[0] for e in entries}
    if name == "inf-cl-table-2":
        for row in {entry.row for entry in entries}:
            clip, open_clip, inf_cl = (values[row, f"{method}, thousands"] for method in ("CLIP", "OpenCLIP", "Inf-CL"))
            assert clip < open_clip < inf_cl
    if name == "inf-cl-figure-s2":
        curves = [record["values"]["losses"] for record in records.values()]
        assert all(output.deviation(curve[:20], curves[0][:20]).max() <= 1e-3 for curve in curves)


def smallest(one):
    """Return a cell of the same measurement in two steps, or with few rows.

    Cells that differ in sizes or rates alone become equal, so that they are compiled and measured once.
    """
    arguments = dict(one.arguments)
    changes = dict(arguments.pop("changes", {}))
    devices = min(arguments.get("devices", 1), 2)
    if one.measure == "short_run":
        del changes["optimizer.learning_rate"]
        changes.pop("epochs", None)
        changes |= {"total_steps": 2, "batch_size": 32, "optimizer.warmup_steps": 0}
        arguments.pop("samples", None)
        arguments |= {"devices": devices} if "devices" in arguments else {}
    elif one.measure.startswith("planned"):
        changes |= {"model": "tiny"}
    else:
        rows = 2 if "retrieval" in one.measure else 8
        arguments |= {"batch": rows * devices, "devices": devices}
        arguments |= {"dim": 16} if "dim" in arguments else {}
        arguments |= {"cache": {"chunk_size": rows // 2 * devices}} if "cache" in arguments else {}
    if changes.get("model") == "tiny":
        changes["model_overrides"] = runs.OVERRIDES
    if arguments.get("model") == "tiny":
        arguments["model_overrides"] = runs.OVERRIDES
    return cell(one.measure, **arguments, **({"changes": changes} if changes else {}))


def two_steps(target):
    """Return a target whose entries are the smallest cell of each of its measurements."""
    kinds = {entry.cells[0].measure: entry for entry in target.entries("tiny") if entry.cells}
    few = [entry._replace(cells=(smallest(entry.cells[0]),)) for entry in kinds.values()]
    return dataclasses.replace(target, entries=lambda scale: few)


PAPERS = sorted({target.paper.name for target in TARGETS.values()})
TRAINED = ("GradCache", "Inf-CL")  # the other papers measure the same kinds of cells


@pytest.mark.parametrize(
    "paper", [pytest.param(p, marks=pytest.mark.slow if p in TRAINED else pytest.mark.full) for p in PAPERS]
)
def test_targets_run_two_steps(paper, monkeypatch, tmp_path):
    monkeypatch.setattr(measurements, "_REPEATS", 1)
    monkeypatch.setattr(step_case, "_STEP_SECONDS", 0.01)
    monkeypatch.setattr(measurements, "_gemm", lambda: Gemm(1024, 1.0))  # only divides figures that are not read
    targets = [two_steps(t) for t in TARGETS.values() if t.paper.name == paper and t.name not in WHOLE]
    assert targets
    for target in targets:
        records = measure_cells(target.cells("tiny"), tmp_path)
        assert [record["error"] for record in records.values()] == [None] * len(records), target.name
        values = [output.measured(entry, records) for entry in target.entries("tiny")]
        assert all(math.isfinite(value) for (value,) in values), target.name
        table = output.write_output(target, "tiny", records, tmp_path / target.name)
        assert "failed" not in table.read_text() and (table.parent / output.PICTURE_FILE).is_file()
