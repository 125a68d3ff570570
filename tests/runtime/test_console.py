"""Every channel to a terminal, log or page escapes names of strangers."""

import logging
import os
import re
import sys
import threading
import warnings
from unittest import mock

import pytest

from experiments import command, command_line
from infcl_jax.evaluation import format_table
from infcl_jax.evaluation.html_page import add_examples, add_table, new_page, write_html
from infcl_jax.planner import OutOfMemory
from infcl_jax.runtime import printable
from infcl_jax.runtime.console import LiveLine, NotebookLine
from infcl_jax.runtime.exit_codes import Interrupted
from infcl_jax.runtime.outputs import print_line
from infcl_jax.runtime.preemption import Preemption
from infcl_jax.training import LOG_FILE, Outputs, RunConsole

HOSTILE = "\x1b]0;owned\x07\r\nerror: forged \u202e\x9b\u2028"
CLEAR = "\r\x1b[K"  # of the live line


def stdout(tmp_path, capfd):
    print_line(HOSTILE)
    return capfd.readouterr().out


def run_console(tmp_path, capfd):
    with RunConsole():
        print_line(HOSTILE)
    return capfd.readouterr().out


def run_log(tmp_path, capfd):
    with RunConsole() as run:
        run.open_log(tmp_path, Outputs())
        run.progress([HOSTILE], due=True)
        logging.getLogger("infcl_jax.data").warning("%s", HOSTILE)
    text = (tmp_path / LOG_FILE).read_text()
    assert text.count("\n") == 3
    return text.split("\n", 2)[2]


def live_line(tmp_path, capfd):
    with RunConsole(live=LiveLine()) as run:
        with run.busy(HOSTILE):
            pass
        run.progress([HOSTILE], due=True)
    return capfd.readouterr().out.replace(CLEAR, "")


def notebook_line(tmp_path, capfd):
    return NotebookLine(print).fit([HOSTILE, HOSTILE]) + "\n"


def python_logging(tmp_path, capfd):
    handler = logging.StreamHandler(sys.stderr)
    logging.getLogger().addHandler(handler)
    try:
        logging.getLogger("infcl_jax.data").warning("%s", HOSTILE)
    finally:
        logging.getLogger().removeHandler(handler)
    return capfd.readouterr().err


def python_warning(tmp_path, capfd):
    printable.escape_warnings()
    return warnings.formatwarning(HOSTILE, UserWarning, "file.py", 1, "")


def one_line(tmp_path, capfd):
    return command_line.one_line(ValueError(HOSTILE)) + "\n"


def out_of_memory(tmp_path, capfd):
    return command._message(OutOfMemory(HOSTILE.replace("\n", ""))) + "\n"


def interrupted(tmp_path, capfd):
    def interrupt():
        raise Interrupted(HOSTILE)

    with pytest.raises(Interrupted), mock.patch("signal.signal"), mock.patch.object(threading, "Timer"):
        command._resumable(interrupt)
    return capfd.readouterr().err


def preemption(tmp_path, capfd):
    with mock.patch.object(os, "_exit"):
        Preemption(workdir=tmp_path)._leave(HOSTILE)
    return capfd.readouterr().err


def table(tmp_path, capfd):
    return format_table({HOSTILE: 1.0}) + "\n"


def page(tmp_path, capfd):
    root, body = new_page("page")
    add_table(body, (HOSTILE,), [(HOSTILE, HOSTILE)], "table")
    texts = {"image": HOSTILE, "expected": [HOSTILE], "predicted": [HOSTILE]}
    add_examples(body, [texts | {"similarity": [1.0], "correct": True}])
    write_html(tmp_path / "page.html", root)
    return (tmp_path / "page.html").read_text().split("<body>")[1].replace("\n", "") + "\n"


CHANNELS = (
    *(stdout, run_console, run_log, live_line, notebook_line, python_logging, python_warning, one_line),
    *(out_of_memory, interrupted, preemption, table, page),
)


@pytest.mark.parametrize("channel", CHANNELS)
def test_no_name_moves_the_cursor_or_forges_a_line(channel, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    text = channel(tmp_path, capfd)
    assert "owned" in text and "error: forged" in text
    assert text.endswith("\n") and text.count("\n") == 1, text
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u202e]", text), repr(text)
