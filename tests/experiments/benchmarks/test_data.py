"""The data benchmark: its files, records and OpenCLIP's pipeline beside it."""

import io
import itertools
import json
import sys

import numpy as np
import pytest
import runs
from PIL import Image

from experiments.benchmarks import data as benchmark_data
from experiments.benchmarks import open_clip_data, photographs
from experiments.benchmarks.data import RECORDS_FILE, Readers
from infcl_jax.data import load_source
from infcl_jax.data.decode import decode_example
from infcl_jax.data.parallelism import STAGES
from infcl_jax.runtime.mesh import data_mesh

PAIRS = photographs.samples(20, (24, 16))


@pytest.mark.parametrize("kind", photographs.KINDS)
def test_each_kind_of_dataset_holds_the_samples(tmp_path, kind):
    source = load_source(photographs.write(kind, tmp_path / kind, PAIRS, shards=3), "train", tmp_path / kind)
    examples = [source[index] for index in range(len(source))]
    assert sorted((e["image"], e["caption"]) for e in examples) == sorted(PAIRS)
    assert decode_example(source, 0)["image"].shape == (16, 24, 3)


def test_photographs_have_the_size_of_those_of_a_camera():
    (image, caption), *_ = photographs.samples(1)
    assert Image.open(io.BytesIO(image)).size == (640, 480) and caption
    assert 55_000 < len(image) < 75_000


@pytest.fixture
def config(tmp_path):
    dataset = photographs.write("tar", tmp_path / "tar", PAIRS, shards=2)
    return runs.config(dataset=dataset, batch_size=16)


def python(folder, script):
    """Write a shell script in place of OpenCLIP's Python."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_a_case_is_measured_and_recorded(tmp_path, capsys, config):
    figures = {"images_per_second": 7.5, "first_batch_s": 0.25}
    open_clip = python(tmp_path, f"echo '{json.dumps(figures)}'")
    records = benchmark_data.measure(config, "tar", Readers("threads", 1), data_mesh(), 0.0, tmp_path, open_clip)
    assert [json.loads(line) for line in (tmp_path / RECORDS_FILE).read_text().splitlines()] == records
    ours, theirs = records
    assert (ours["pipeline"], ours["readers"], ours["kind"]) == ("infcl_jax", "threads:1", "tar")
    names = ("images_per_second", "first_batch_s", *(f"{stage}_us" for stage in STAGES[:3]))
    assert all(ours[name] > 0 for name in names) and ours["limiting_stage"] in STAGES
    assert (theirs["pipeline"], theirs["readers"]) == ("OpenCLIP", "workers:1")
    assert {name: theirs[name] for name in figures} == figures and theirs["decode_us"] is None
    assert [line.split()[:3] for line in capsys.readouterr().out.splitlines()] == [
        ["infcl_jax", "tar", "threads:1"],
        ["OpenCLIP", "tar", "workers:1"],
    ]


@pytest.mark.parametrize(("script", "said"), [("echo 'error: expected X' >&2; exit 1", "error: expected X"), ("", "")])
def test_without_open_clip_the_reason_is_printed(tmp_path, capsys, config, script, said):
    open_clip = script and python(tmp_path, script)
    records = benchmark_data.measure(config, "tar", Readers("auto"), data_mesh(), 0.0, tmp_path, open_clip)
    assert len(records) == 1
    row, *others = capsys.readouterr().out.splitlines()
    assert row.startswith("infcl_jax") and others == ([f"OpenCLIP's pipeline is left out: {said}"] if script else [])


def test_command(tmp_path):
    arguments = ["--images=40", "--kinds=folder", "--readers=threads:1", "--seconds=0", f"--output={tmp_path}"]
    settings = runs.flags(runs.config(cpu_devices=1))
    finished = runs.command("experiments.benchmarks.data", *settings, *arguments)
    assert finished.returncode == 0, finished.stderr
    (record,) = map(json.loads, (tmp_path / RECORDS_FILE).read_text().splitlines())
    assert record["kind"] == "folder" and record["images_per_second"] > 0


@pytest.mark.parametrize("text", ["", "threads", "threads:0", "workers:x", "auto:1", "cores:2"])
def test_wrong_readers_are_refused(text):
    with pytest.raises(ValueError, match=f"expected --readers such as auto, .* got '{text}'"):
        Readers.parse(text)


@pytest.mark.parametrize(("workers", "seconds", "timed"), [(1, 0.0, 1), (4, 0.0, 4), (4, 4.5, 8)])
def test_open_clip_is_timed_over_whole_turns_of_its_workers(monkeypatch, workers, seconds, timed):
    times = itertools.count()
    monkeypatch.setattr("time.perf_counter", lambda: float(next(times)))
    loader = [(np.zeros(16), None)] * (1 + 2 * workers + timed)
    figures = open_clip_data.measure(loader, workers, seconds)
    assert figures == {"images_per_second": 16.0, "first_batch_s": 1.0}


def test_open_clip_is_missing_here(monkeypatch):
    monkeypatch.setitem(sys.modules, "open_clip", None)
    with pytest.raises(ImportError, match=r"expected OpenCLIP's pipeline, got: .*pip install open_clip_torch"):
        open_clip_data.open_data("a.tar", 16, 1, 224)
