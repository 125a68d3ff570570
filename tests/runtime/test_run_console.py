"""Lines of a run in a terminal, a notebook, a plain log and `run.log`."""

import itertools
import logging
import re
import sys
import threading
from types import SimpleNamespace

import pytest

from infcl_jax.runtime import console, run_console
from infcl_jax.runtime.console import LiveLine, NotebookLine
from infcl_jax.runtime.outputs import print_line
from infcl_jax.training import LOG_FILE, Outputs, RunConsole

STAMP = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[+-]\d{4}  ", re.MULTILINE)
TIME = re.compile(r"\d\d:\d\d:\d\d  ")


def screen(output):
    """Lines of a terminal after an output with carriage returns and erased lines."""
    rows = [""]
    for text in re.split(r"(\n|\r\x1b\[K)", output):
        if text == "\n":
            rows.append("")
        elif text == "\r\x1b[K":
            rows[-1] = ""
        else:
            rows[-1] += text
    return [TIME.sub("", row) for row in rows]


def run(workdir, live=None, lead=True):
    """A short run with two due steps and a warning, which fails."""
    with pytest.raises(KeyError), RunConsole(lead=lead, live=live, clock=lambda: 0.0) as console:
        print_line("before the log is open")
        console.open_log(workdir, Outputs())
        with console.busy("compiling the step", announced=True):
            pass
        for step in (1, 2, 3):
            console.progress([f"step {step}", "loss 4.0", "x" * 200], due=step != 2)
        print_line("a table:", "  1  2")
        with console.busy("evaluation"):
            logging.getLogger("infcl_jax.part").warning("17 of %d", 50)
        console.progress(["step 4"], due=True)
        raise KeyError("end")


LOG = [
    *("before the log is open", "compiling the step ...", "compiling the step ... 0 s"),
    *(f"step {step}  loss 4.0  {'x' * 200}" for step in (1, 3)),
    *("a table:", "  1  2", "warning: 17 of 50", "step 4", "KeyError: 'end'"),
]


@pytest.mark.parametrize("live", [None, LiveLine()])
def test_the_log_has_the_same_lines_with_and_without_a_terminal(tmp_path, live, capsys):
    run(tmp_path, live)
    run(tmp_path, live)  # appended
    text = (tmp_path / LOG_FILE).read_text()
    assert len(STAMP.findall(text)) == 2 * len(LOG)  # the table has one, as has the line of the process
    lines = [STAMP.sub("", line) for line in text.splitlines()]
    half = len(lines) // 2
    for part in (lines[:half], lines[half:]):
        assert re.fullmatch(r"started on \S+, process \d+", part[0])
        assert [line.removeprefix(" " * 26) for line in part[1:]] == LOG


def test_a_plain_log_has_the_due_lines(tmp_path, capsys):
    run(tmp_path)
    printed = [TIME.sub("", line) for line in capsys.readouterr().out.splitlines()]
    assert [line.removeprefix(" " * 10) for line in printed] == LOG[:7] + LOG[8:9]  # warnings and errors go to stderr


def test_the_last_line_of_a_terminal_is_live(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    run(tmp_path, LiveLine())
    output = capsys.readouterr().out
    assert "step 2" not in output  # too soon after step 1
    kept = ["step 3  loss 4.0", "evaluation ... 0 s", "step 4", ""]  # above a pause, a warning and the end
    assert screen(output) == [*LOG[:1], LOG[2], "a table:", " " * 12 + "1  2", *kept]


def test_a_notebook_replaces_one_output_between_lines(tmp_path, capsys):
    outputs = []

    def display(content, *, raw, display_id):
        outputs.append([content["text/plain"]])
        return SimpleNamespace(update=lambda content, raw: outputs[-1].append(content["text/plain"]))

    run(tmp_path, NotebookLine(display))
    shown = [[TIME.sub("", text).strip("x ") for text in output if text] for output in outputs]
    assert shown == [
        ["compiling the step ...", *["compiling the step ... 0 s"] * 2],
        ["step 1  loss 4.0", "step 3  loss 4.0"],
        ["evaluation ... 0 s"],
        ["step 4"],
    ]
    assert "step" not in capsys.readouterr().out.replace("compiling the step", "")


def test_other_processes_print_their_lines_alone(tmp_path, capsys):
    run(tmp_path, LiveLine(), lead=False)
    assert [TIME.sub("", line) for line in capsys.readouterr().out.splitlines()] == [
        "before the log is open",
        *LOG[5:6],
        " " * 12 + "1  2",
    ]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("terminal", "term", "kernel", "kind"),
    [
        (False, "xterm", None, None),
        (True, "dumb", None, None),
        (True, "xterm", None, LiveLine),
        (False, "xterm", object(), NotebookLine),
    ],
)
def test_the_live_line_is_that_of_the_place(monkeypatch, terminal, term, kernel, kind):
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(isatty=lambda: terminal))
    monkeypatch.setenv("TERM", term)
    ipython = SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=kernel))
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=print))
    line = console.live_line()
    assert type(line) is (kind or type(None))


def test_the_seconds_of_a_long_compilation_tick(monkeypatch):
    ticked, done, seconds = [], threading.Event(), itertools.count()

    class Line(LiveLine):
        def replace(self, text):
            ticked.append(TIME.sub("", text))
            if len(ticked) == 3:
                done.set()

    monkeypatch.setattr(run_console, "_TICK_SECONDS", 0.001)
    with RunConsole(live=Line(), clock=lambda: 10 * next(seconds)) as console, console.busy("compiling"):
        assert done.wait(30)
    shown = [int(text.removeprefix("compiling ... ").removesuffix(" s")) for text in ticked[:3]]
    assert shown == sorted(set(shown)) and shown[0] > 0 and ticked[-1] == ""


def test_a_long_start_has_a_line_at_doubled_times(tmp_path, capsys):
    now = [0.0]
    with RunConsole(clock=lambda: now[0]) as console:
        console.open_log(tmp_path, Outputs())
        console.doing("reading the dataset")
        for now[0] in range(45):
            console.tick()
        with console.busy("evaluation"):
            now[0] += 9
            console.tick()  # too soon
        console.doing(None)
        now[0] += 1000
        console.tick()
    lines = [f"reading the dataset ... {seconds} s so far" for seconds in (10, 20, 40)]
    assert [TIME.sub("", line) for line in capsys.readouterr().out.splitlines()] == lines
    assert [STAMP.sub("", line) for line in (tmp_path / LOG_FILE).read_text().splitlines()[1:]] == lines


@pytest.mark.parametrize("lead", [True, False])
def test_a_body_that_takes_long_is_described_at_doubled_times(lead, capsys):
    now = [0.0]
    console = RunConsole(lead=lead, clock=lambda: now[0])

    def wait(seconds):
        for _ in range(seconds):
            now[0] += 1.0
            console.tick()

    with pytest.raises(KeyError), console.reminder(30.0, lambda seconds: f"{seconds:.0f} s: batch 7 in 0003.tar"):
        wait(250)
        raise KeyError
    with console.reminder(30.0, lambda seconds: "again"):
        wait(29)
    wait(500)  # nothing waits
    lines = [TIME.sub("", line) for line in capsys.readouterr().out.splitlines()]
    assert lines == [f"{seconds} s: batch 7 in 0003.tar" for seconds in (30, 60, 120, 240)]


def test_a_removed_log_is_created_again_with_one_warning(tmp_path, capsys):
    with RunConsole(lead=True) as console:
        console.open_log(tmp_path, Outputs())
        console.print("before")
        (tmp_path / LOG_FILE).unlink()
        console.print("after")
    lines = STAMP.sub("", (tmp_path / LOG_FILE).read_text()).splitlines()
    assert lines == ["after", f"warning: {tmp_path / LOG_FILE} was removed; it is created again, without old records"]
