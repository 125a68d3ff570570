"""Writes to a work directory follow no planted link; damaged configurations are named."""

import os
from pathlib import Path

import pytest
from PIL import Image

from infcl_jax.evaluation.html_page import new_page, write_html
from infcl_jax.evaluation.plots import _save
from infcl_jax.evaluation.writers import append_csv, write_examples, write_json
from infcl_jax.runtime.file_io import replace_text
from infcl_jax.runtime.workdir import LOCK_FILE, WorkdirLock
from infcl_jax.training import LOG_FILE, MetricWriter, Outputs, RunConsole, load_config, prepare_workdir, save_config
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
