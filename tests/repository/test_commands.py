"""Every command once, one after another on the same data and run."""

import captioned
import pytest
import runs

FLAGS = runs.flags(runs.config(dataset="{tmp}/photos", batch_size=8, total_steps=2, cpu_devices=2))
COMMANDS = {  # in this order, each with a file that it writes
    "prepare_data": (["--source={tmp}/photos", "--output={tmp}/tars"], "tars"),
    "plan": (["--device=H100", *FLAGS], ""),
    "verify": ([*FLAGS, "--config.batch_size=4"], ""),
    "train": (["--workdir={tmp}/run", *FLAGS], "run/checkpoints/2"),
    "evaluate": (["--workdir={tmp}/run"], "run/evaluation.json"),
    "embed": (["--model={tmp}/run", "--source={tmp}/photos", "--output={tmp}/a.safetensors"], "a.safetensors"),
    "export": (["--workdir={tmp}/run", "--output={tmp}/exported"], "exported"),
    "report": (["{tmp}/run", "--output={tmp}/page.html"], "page.html"),
    "reproduce": (["--list"], ""),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("smoke")
    captioned.write_folder(folder / "photos", captioned.samples(16))
    return folder


@pytest.mark.parametrize("name", [pytest.param(c, marks=pytest.mark.runs) if c == "verify" else c for c in COMMANDS])
def test_the_command_succeeds(name, folder):
    arguments, output = COMMANDS[name]
    status, stdout, stderr = runs.command(f"experiments.{name}", *(a.format(tmp=folder) for a in arguments))
    assert status == 0, stderr
    assert stdout or stderr
    assert (folder / output).exists()


def test_no_command_is_missing():
    modules = {path.stem for path in (runs.ROOT / "experiments").glob("*.py") if "if __name__ ==" in path.read_text()}
    assert modules == set(COMMANDS)
