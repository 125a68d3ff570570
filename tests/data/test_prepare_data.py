import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest
import runs
import tensorflow_datasets as tfds

from infcl_jax.data import load_source, prepare

pytestmark = pytest.mark.runs


def finish(*flags):
    code, out, err = runs.command("experiments.prepare_data", *flags)
    return code, out.strip().splitlines(), err.strip().splitlines()


def children(pid):
    return [
        child for path in pathlib.Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()
    ]


def is_running(pid):
    try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"  # a container's init may leave zombies


def wait_for(condition, timeout=30.0):
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.02)


def test_digits_need_nothing(tmp_path):
    code, out, err = finish("--dataset=digits", f"--data_dir={tmp_path}")
    assert (code, out, err) == (0, ["digits: nothing to prepare, scikit-learn has it"], [])
    assert not any(tmp_path.iterdir())


class PreparedOnce(tfds.core.GeneratorBasedBuilder):
    """A dataset of the TFDS catalog, as far as `prepare` can tell."""

    VERSION = tfds.core.Version("1.0.0")
    url_infos = None

    def _info(self):
        features = tfds.features.FeaturesDict({"caption": tfds.features.Text()})
        return tfds.core.DatasetInfo(builder=self, features=features)

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples(20), "test": self._generate_examples(4)}

    def _generate_examples(self, count):
        yield from ((index, {"caption": "a"}) for index in range(count))


def test_prepares_once_in_one_line(tmp_path, capfd):
    line = prepare("prepared_once", tmp_path)
    match = re.fullmatch(r"prepared_once: (.*) in [0-9.]+ s, (.*)", line)
    assert set(match[1].split(", ")) == {"20 train", "4 test"}
    assert len(list(pathlib.Path(match[2]).glob("*.array_record*"))) == 2
    assert capfd.readouterr().out == ""
    written = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert prepare("prepared_once", tmp_path) == f"prepared_once: already prepared in {match[2]}"
    assert written == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}


@pytest.mark.parametrize("flags", [["--dataset=shapes/huge"], ["--dataset=nope"], ["--data_dir=/dev/null/x"]])
def test_mistakes_end_in_one_line(tmp_path, flags):
    code, out, err = finish(f"--data_dir={tmp_path}", *flags)
    assert code == 1 and not out
    assert len(err) == 1 and err[0].startswith("error: ")


@pytest.mark.skipif(not pathlib.Path(f"/proc/{os.getpid()}/task").is_dir(), reason="needs /proc to see child processes")
def test_killed_preparation_leaves_nothing_that_looks_complete(tmp_path):
    command = [
        sys.executable,
        "-m",
        "experiments.prepare_data",
        "--dataset=shapes/quickstart",
        f"--data_dir={tmp_path}",
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    # Worker processes and multiprocessing's resource tracker, started by any thread.
    wait_for(lambda: list(tmp_path.glob("shapes/quickstart/incomplete*")) and len(children(process.pid)) > 1)
    started = children(process.pid)
    process.send_signal(signal.SIGKILL)
    process.wait()
    with pytest.raises(FileNotFoundError, match="prepare_data"):
        load_source("shapes/quickstart", "train", tmp_path)
    wait_for(lambda: not any(is_running(pid) for pid in started))


def test_source_and_output_belong_together(tmp_path):
    code, out, err = finish("--source=digits", f"--data_dir={tmp_path}")
    message = "error: expected --source with either --output or --train_tokenizer, got --source=digits, --output=None"
    assert (code, out, err) == (1, [], [f"{message}, --train_tokenizer=None"])
    code, out, err = finish("--source=digits", f"--output={tmp_path}/tars", "--split=validation")
    assert code == 0 and out[0].startswith("digits: ") and out[0].endswith(f"{tmp_path}/tars")
    assert len(load_source(f"{tmp_path}/tars", "validation")) == len(load_source("digits", "validation"))
