"""The command `experiments.export`: what its folders load and its one-line errors."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs
from jax import export as jax_export
from safetensors.flax import load_file

from infcl_jax import export, train
from infcl_jax.models import load_pretrained
from infcl_jax.training import restore_variables

NOTHING = {"evaluation.retrieval_dataset": None, "evaluation.zero_shot_dataset": None}


@pytest.fixture(scope="module", autouse=True)
def promotion():
    """optax's Adam mixes dtypes."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    train(runs.config(**NOTHING, total_steps=1, export=True), folder)
    return folder


def features(model, variables):
    batch = runs.batch(3)
    output = jax.jit(model.apply)(jax.tree.map(jnp.asarray, variables), batch["image"], batch["text"])
    return {"image": output.image, "text": output.text}


@pytest.mark.parametrize("format", ["open_clip", "hf"])
def test_an_export_loads_again_with_the_same_features(workdir, tmp_path, format, capsys):
    assert export(workdir, tmp_path / "a", format).endswith("converted back they are equal")
    assert re.search(r"exported step 1 of .*: \d+ tensors match \d+ parameters", capsys.readouterr().out)
    assert (tmp_path / "a/tokenizer").is_dir()
    own = features(runs.model(), checkpoint(workdir))
    for tower, array in features(*load_pretrained(tmp_path / "a", compare_features=False)).items():
        np.testing.assert_array_equal(array, own[tower])


def test_a_finished_run_leaves_its_weights(workdir):
    own = features(runs.model(), checkpoint(workdir))
    for tower, array in features(*load_pretrained(workdir / "exported", compare_features=False)).items():
        np.testing.assert_array_equal(array, own[tower])
    assert (workdir / "exported/tokenizer").is_dir()


def checkpoint(workdir):
    """Variables of the latest checkpoint."""
    batch = runs.batch(1)
    return restore_variables(workdir, jax.eval_shape(runs.model().init, jax.random.key(0), *batch.values()))[1]


def test_stablehlo_runs_without_the_model(workdir, tmp_path):
    pytest.importorskip("flatbuffers")
    checked = export(workdir, tmp_path / "exported", "stablehlo")
    assert float(re.search(r"features differ from the model in jax \S+ by at most (\S+)$", checked)[1]) <= 1e-6
    expected, batch = features(runs.model(), checkpoint(workdir)), runs.batch(3)
    for tower in ("image", "text"):
        program = jax_export.deserialize(bytearray((tmp_path / f"exported/{tower}.stablehlo").read_bytes()))
        weights = load_file(tmp_path / f"exported/{tower}.safetensors")
        np.testing.assert_allclose(program.call(weights, batch[tower]), expected[tower], atol=1e-6)
        assert set(program.platforms) >= {"cpu", "cuda", "tpu"}
    assert "uint8 images [b, 16, 16, 3]" in (tmp_path / "exported/README.md").read_text()


MISTAKES = {
    "no output": ((), "expected --output"),
    "no run": (("--output=x", "--workdir=/nowhere"), "no run in /nowhere"),
    "unknown format": (("--output=x", "--format=onnx"), "--format=onnx.*open_clip"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_one_line(workdir, case):
    arguments, message = MISTAKES[case]
    status, _, stderr = runs.command("experiments.export", f"--workdir={workdir}", *arguments)
    assert status == 1
    assert re.fullmatch(rf"error: [^\n]*{message}[^\n]*\n", stderr), stderr


def test_the_command_exports(workdir, tmp_path):
    arguments = (f"--workdir={workdir}", f"--output={tmp_path}", "--format=hf")
    status, stdout, stderr = runs.command("experiments.export", *arguments)
    assert (status, stderr) == (0, "")
    assert stdout.startswith(f"exported step 1 of {workdir}: {tmp_path} (hf): ")
    assert (tmp_path / "preprocessor_config.json").is_file()
