"""Report of runs, on made work directories."""

import base64
import hashlib
import json
import math
import os
import re
import time
from html.parser import HTMLParser

import numpy as np
import pytest
import runs

from experiments import command_line
from infcl_jax.evaluation import plot_retrieval_grid
from infcl_jax.evaluation.results import Confusion, ExamplePrediction, TaskResult
from infcl_jax.evaluation.writers import EXAMPLES_FILE, write_examples
from infcl_jax.report import read_run, read_runs, report_runs, write_report
from infcl_jax.report.charts import thin
from infcl_jax.runtime.environment import ENVIRONMENT_FILE
from infcl_jax.runtime.run_console import LOG_FILE
from infcl_jax.runtime.workdir import LOCK_FILE
from infcl_jax.training import METRICS_FILE

HOSTILE = '<script>alert("1")</script>'
GIB = 2**30
TRAINING = {"loss": 4.0, "examples_per_second": 1000.0, "data/wait_fraction": 0.01}


def make_run(folder, steps=20, config=None, training=None, results=None):
    """Write a run with a line of metrics every other step, which starts at time 0, and an evaluation at the end."""
    folder.mkdir(parents=True)
    settings = {"batch_size": 64, "total_steps": 20, "loss": "clip", "optimizer": {"name": "adamw"}} | (config or {})
    (folder / "config.json").write_text(json.dumps(settings))
    lines = [{"step": step, "time": 360.0 * step} | (training or TRAINING) for step in range(2, steps + 1, 2)]
    lines.append({"step": steps, "time": 360.0 * steps} | (results or {"zero_shot/top1": 0.5}))
    (folder / METRICS_FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


class Page(HTMLParser):
    """Rows of tables by their heading, charts by title and x axis, marked cells and tags of a page."""

    def __init__(self, path):
        super().__init__()
        self.text, self.charts, self.rows, self.best, self.tags = path.read_text(), {}, {}, [], []
        self._row, self._in, self._best = None, None, False
        self.feed(self.text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self._in = tag
        self.tags.append((tag, attrs))
        if tag == "tr":
            self._row = []
        elif tag in ("td", "th"):
            self._row.append("")
            self._best = "best" in attrs.get("class", "")
        elif tag == "svg":
            chart = json.loads(attrs["data-chart"])
            self.charts[attrs["aria-label"], chart["label"]] = chart

    def handle_endtag(self, tag):
        if tag == "tr":
            self.rows.setdefault(self._row[0], self._row[1:])
            self._row = None

    def handle_data(self, data):
        if self._in in ("td", "th") and self._row is not None:
            self._row[-1] += data
            if self._best:
                self.best.append(data)


def page_of(tmp_path, *workdirs, **options):
    write_report(tmp_path / "report.html", read_runs(workdirs), **options)
    return Page(tmp_path / "report.html")


def test_files_beside_runs_are_skipped(tmp_path, capsys):
    folder, file = make_run(tmp_path / "runs" / "a"), tmp_path / "runs" / "notes.txt"
    file.write_text("lr was too high")
    report_runs([str(folder), str(file)], str(tmp_path / "report.html"))
    assert f"skipped, not folders of runs: {file}" in capsys.readouterr().out
    with pytest.raises(FileNotFoundError, match=r"expected the work directory of a run, got .*notes\.txt"):
        report_runs([str(file)], str(tmp_path / "report.html"))


def test_runs_are_compared_on_the_same_axes(tmp_path):
    small = make_run(
        tmp_path / "small", results={"zero_shot/top1": 0.25, "validation/loss": 1.0, "validation/batch_loss": 1.0}
    )
    other = {"zero_shot/top1": 0.5, "validation/loss": 2.0, "validation/batch_loss": 2.0, "retrieval/mean_r1": 0.1}
    large = make_run(tmp_path / "large", steps=10, config={"batch_size": 128}, results=other)
    page = page_of(tmp_path, small, large)
    by_step, by_examples, by_minutes = (
        [chart for (_, label), chart in page.charts.items() if label.startswith(name)]
        for name in ("step", "examples seen", "minutes")
    )
    assert {tuple(chart["x"]) for chart in by_step} == {(0, 20)}
    assert {tuple(chart["x"]) for chart in by_examples} == {(0, 1280)}
    assert {tuple(chart["x"]) for chart in by_minutes} == {(0, 108)}
    loss = page.charts["Training loss, nats", "examples seen"]
    assert [line[0] for line in loss["lines"]] == [[128, 4], [256, 4]]
    (checked,) = [attrs["value"] for tag, attrs in page.tags if tag == "input" and "checked" in attrs]
    assert checked == "examples"  # since the batch sizes differ
    assert page.rows["zero-shot/top1"] == ["25.00 %", "50.00 %"] and page.rows["retrieval/mean r1"] == ["-", "10.00 %"]
    assert page.best == ["50.00 %", "1.0000 nats"]  # the lowest loss; no single value, no loss of other batches
    assert page.rows["batch_size"] == ["64", "128"] and "optimizer.name" not in page.text.split("All settings")[0]
    assert "chance of 64 pairs" in page.text and "chance of 128 pairs" in page.text


def test_metrics_of_any_name_have_a_curve(tmp_path):
    training = TRAINING | {"mine": 2.0, "data/bad_records/a": 0, "seconds": 1.0}
    page = page_of(tmp_path, make_run(tmp_path / "run", training=training), make_run(tmp_path / "other"))
    titles = {title for title, _ in page.charts}
    assert titles == {"Training loss, nats", "Throughput, examples/s", "Time waiting for data, %", "mine"}
    assert len(page.charts["mine", "step"]["lines"]) == 1


def test_speed_and_memory_stand_against_the_plan(tmp_path):
    speed = {"examples_per_second": 100.0, "mfu": 0.4, "data/wait_fraction": 0.25, "memory/peak_bytes": 30 * GIB}
    folder = make_run(tmp_path / "run", training={"loss": 1.0} | speed)
    plan = {"components": {"parameters": 8 * GIB}, "peak": 32 * GIB, "limit": 100 * GIB}
    starts = [{"step": step, "devices": "8 x H200", "memory_plan": plan} for step in (0, 7)]
    (folder / ENVIRONMENT_FILE).write_text(json.dumps(starts))
    page = page_of(tmp_path, folder)
    expected = {
        "Throughput, examples/s": "100",
        "Model FLOPs utilization (MFU), %": "40",
        "Time waiting for data, %": "25",
        "Peak memory of a device, GiB": "30",
        "parameters": "8,192.0",
        "planned peak": "32,768.0",
        "measured peak": "30,720.0",
        "measured / planned": "0.94",
        "limit": "102,400.0",
        "devices": "8 x H200",
        "starts": "2",
    }
    assert {name: page.rows[name] for name in expected} == {name: [value] for name, value in expected.items()}
    for text in ("waits for data 25 % of the time", "uses 30 % of the memory limit", "resumed from step 7"):
        assert text in page.text


def replace(old, new):
    return lambda path: path.write_text(path.read_text().replace(old, new, 1))


DAMAGES = {
    "truncated": (lambda path: path.write_bytes(path.read_bytes()[:-9]), "line 11 is damaged", 10),
    "overwritten": (replace('{"step": 6', "\0"), "line 3 is damaged", 9),
    "other values": (replace('"step": 6, "time": 2160.0', '"step": "six", "time": []'), "line 3 is damaged", 9),
    "nan": (replace("4.0", '"NaN"'), "loss is not finite at step 2", 10),
    "empty": (lambda path: path.write_text(""), "", 0),
    "missing": (lambda path: path.unlink(), "no metrics.jsonl", 0),
} | {
    name: (lambda path, name=name, text=text: path.with_name(name).write_text(text), f"{name} is damaged", 10)
    for name, text in [
        ("config.json", "{"),
        ("environment.json", "{}"),
        ("examples.json", "[1]"),
        ("evaluation.json", '"1"'),
        ("retrieval.png", "png"),
    ]
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_run_is_shown_with_a_warning(tmp_path, damage):
    act, warning, losses = DAMAGES[damage]
    act(make_run(tmp_path / "run") / METRICS_FILE)
    run = read_run(tmp_path / "run", "run")
    assert len(run.series.get("loss", ())) == losses
    assert not warning or any(warning in text for text in run.warnings)
    page = page_of(tmp_path, tmp_path / "run", make_run(tmp_path / "whole"))
    assert warning in page.text and page.rows["State"][1] == "finished"
    assert len(page.charts["Training loss, nats", "step"]["lines"]) == 1 + (losses > 0)


def test_an_empty_folder_is_a_run_without_metrics(tmp_path):
    (tmp_path / "new").mkdir()
    page = page_of(tmp_path, tmp_path / "new")
    assert page.rows["State"] == ["no metrics"] and page.charts == {}
    assert "no metrics.jsonl: the run has not logged a step" in page.text


def test_entries_of_other_programs_are_left_out(tmp_path):
    folder = make_run(tmp_path / "run", config={"total_steps": None, "batch_size": "64", "model": ["a"]})
    (folder / ENVIRONMENT_FILE).write_text(json.dumps([1, {"step": 0, "memory_plan": [2]}]))
    (folder / EXAMPLES_FILE).write_text(json.dumps({"a": 1, "b": {"examples": [{"image": 2}], "confusions": 3}}))
    (folder / "evaluation.json").write_text(json.dumps({"step": "last", "top1": 0.75}))
    page = page_of(tmp_path, folder)
    assert page.rows["Step"] == ["20"] and page.rows["zero-shot/top1"] == ["50.00 %"]


def test_a_resumed_run_has_its_last_values(tmp_path):
    folder = make_run(tmp_path / "run", steps=8)
    with (folder / METRICS_FILE).open("a") as file:
        file.write('{"step": 4, "time": 1.0, "loss": 9.5}\n')
    assert [(p.step, p.value) for p in read_run(folder, "run").series["loss"]] == [(2, 4), (4, 9.5), (6, 4), (8, 4)]


def test_the_lock_says_whether_a_run_goes_on(tmp_path):
    folder = make_run(tmp_path / "run", steps=8)
    assert read_run(folder, "run").state(now=360.0 * 8 + 7200) == "stopped 2 h 0 min ago"
    lock = folder / LOCK_FILE
    lock.write_text("{}")
    assert read_run(folder, "run").state() == "running"
    os.utime(lock, (1, 1))  # killed
    assert read_run(folder, "run").state(now=360.0 * 8 + 30) == "stopped 30 s ago"


def test_warnings_and_advice_of_the_log_are_shown(tmp_path):
    folder = make_run(tmp_path / "run")
    shown = ("warning: step 9 took 4.0 s", "waiting for data: 30 % of the time", "OSError: full", "KeyboardInterrupt: ")
    hidden = ("step 5/20  loss 2.0  data wait 3 %", "compiling ...")
    (folder / LOG_FILE).write_text("".join(f"2026-11-24 03:36:15+0000  {line}\n" for line in (*shown, *hidden)))
    assert [line[26:] for line in read_run(folder, "run").messages] == list(shown)
    assert all(line in page_of(tmp_path, folder).text for line in shown)


@pytest.mark.parametrize("line", ["Interrupt" * 2**20, "process 1: " + "a" * 2**23])
def test_long_lines_of_the_log_take_linear_time_and_are_cut(tmp_path, line):
    folder, date, last = make_run(tmp_path / "run"), "2026-11-24 03:36:15+0000  ", "error: " + "é" * 2000
    (folder / LOG_FILE).write_text(f"{date}{line}\n{date}{last}\n")
    start = time.monotonic()
    (message,) = read_run(folder, "run").messages
    assert f"{date}{last}".startswith(message.rstrip("\ufffd")) and len(message) < 2000
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("name", [METRICS_FILE, LOG_FILE, ENVIRONMENT_FILE, "config.json", "evaluation.json"])
def test_a_file_larger_than_memory_is_left_out(tmp_path, name):
    folder = make_run(tmp_path / "run")
    (folder / name).touch()
    os.truncate(folder / name, 2**40)
    record = read_run(folder, "run")
    assert record.messages == () and (name == LOG_FILE or f"{name} is unreadable" in " ".join(record.warnings))


def test_texts_are_escaped_and_nothing_is_loaded(tmp_path):
    folder = make_run(tmp_path / f"a {HOSTILE.replace('/', '')}", config={"dataset": HOSTILE})
    image = np.zeros((8, 8, 3), np.uint8)
    examples = tuple(ExamplePrediction(image, ("cat",), (HOSTILE, "dog"), (0.5, 0.25), good) for good in (True, False))
    result = TaskResult(
        name=HOSTILE,
        kind="zero_shot",
        metrics={"top1": 0.5},
        main_metric="top1",
        images=2,
        examples=examples,
        confusions=(Confusion("cat", HOSTILE, 7),),
    )
    write_examples(folder / EXAMPLES_FILE, [result])
    plot_retrieval_grid(["a"], [image], np.ones((1, 1)), folder / "retrieval.png")
    page = page_of(tmp_path, folder)
    scripts = re.findall("<script>(.*?)</script>", page.text, flags=re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(scripts[0].encode()).digest()).decode()
    assert len(scripts) == 1 and "default-src 'none'; img-src data:" in page.text
    assert f"script-src 'sha256-{digest}'" in page.text  # no other script runs
    sources = [attrs[name] for _, attrs in page.tags for name in ("src", "href") if name in attrs]
    assert [source.split(";")[0] for source in sources] == ["data:image/png", "data:image/jpeg"]  # one mistake
    assert page.rows["cat"] == [HOSTILE, "7"]


def test_the_page_is_followed_until_the_run_has_finished(tmp_path, monkeypatch, capsys):
    folder, output = make_run(tmp_path / "run", steps=6), tmp_path / "pages" / "report.html"
    pages = []

    def sleep(seconds):
        pages.append(output.read_text())
        if len(pages) == 2:
            (folder / METRICS_FILE).write_text('{"step": 20, "time": 1, "loss": 1.0}\n')

    monkeypatch.setattr(time, "sleep", sleep)
    report_runs([folder], output, watch=True)
    assert all("location.reload(), 10000" in page and "6 of 20" in page for page in pages) and len(pages) == 2
    assert "location.reload" not in (last := output.read_text()) and "20 of 20" in last
    assert list(output.parent.iterdir()) == [output]


@pytest.mark.parametrize(
    ("workdirs", "error"), [([], "expected work directories, got none"), (["none"], "none, which is no folder")]
)
def test_mistakes_are_named(tmp_path, workdirs, error):
    with pytest.raises(command_line.USER_ERRORS, match=error):
        report_runs([tmp_path / name for name in workdirs], tmp_path / "report.html")


def test_the_command_needs_no_devices(tmp_path):
    folder, output = make_run(tmp_path / "run"), tmp_path / "report.html"
    process = runs.start("experiments.report", str(folder), f"--output={output}", JAX_PLATFORMS="no_such_device")
    (finished,) = runs.finish(process)
    assert finished == (0, f"report: {output}\n", "")
    assert Page(output).rows["State"] == ["finished"]


def test_thinning_keeps_extremes_and_gaps():
    y = np.sin(np.arange(1000.0)).tolist()
    y[700:720] = [math.nan] * 20
    y[500] = 99.0
    buckets = thin(range(1000), y, 100)
    assert len(buckets) == 100 and buckets[-1][0] == 999
    assert max(b[3] for b in buckets if math.isfinite(b[3])) == 99.0
    assert sum(math.isnan(b[1]) for b in buckets) == 2
    assert thin([1, 2], [3.0, 4.0]) == [(1, 3.0, 3.0, 3.0), (2, 4.0, 4.0, 4.0)]
