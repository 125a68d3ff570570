"""Models of OpenCLIP and transformers: features, gradients and the way back, against golden files."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open

from infcl_jax.models import load_pretrained, save_pretrained
from infcl_jax.models.convert.tensor_files import read_tensors, write_tensors

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = sorted(
    path.stem for pattern in ("open_clip_*", "hugging_face_*") for path in GOLDEN.glob(f"{pattern}.safetensors")
)
FILES = {
    "open_clip": ("open_clip_config.json", "open_clip_model.safetensors"),
    "hf": ("config.json", "model.safetensors"),
}


def golden(case):
    """Tensors of a golden file by group, its configuration and the overrides of its sizes."""
    path = GOLDEN / f"{case}.safetensors"
    groups = {}
    for name, array in read_tensors(path).items():
        group, _, name = name.partition("/")
        groups.setdefault(group, {})[name] = array
    with safe_open(str(path), "numpy") as file:
        metadata = file.metadata()
    return groups, json.loads(metadata["config"]), json.loads(metadata.get("overrides", "{}"))


def write_folder(folder, case, changes=None):
    """Write the model of a golden file as its library does, with other tensors where given."""
    groups, config, _ = golden(case)
    config_file, weight_file = FILES["open_clip" if case.startswith("open_clip") else "hf"]
    (folder / config_file).write_text(json.dumps({"model_cfg": config} if case.startswith("open_clip") else config))
    write_tensors(folder / weight_file, groups["weights"] | (changes or {}))
    return folder


def value_and_gradients(model, variables, inputs):
    """Features, and gradients of the objective in `record` of the golden files' scripts."""

    def objective(params):
        output = model.apply(variables | {"params": params}, inputs["image"].transpose(0, 2, 3, 1), inputs["text"])
        logits = output.logit_scale * (output.image @ output.text.T)
        if output.logit_bias is not None:
            logits += output.logit_bias
        return (inputs["coefficients"] * logits).sum(), output

    params = jax.tree.map(jnp.asarray, variables["params"])
    return jax.jit(jax.grad(objective, has_aux=True))(params)


@pytest.fixture(scope="module", params=CASES)
def converted(request, tmp_path_factory):
    folder = write_folder(tmp_path_factory.mktemp("golden"), request.param)
    return request.param, folder, *load_pretrained(folder, compare_features=False, **golden(request.param)[2])


def test_features_and_all_gradients_equal_the_librarys(converted, tmp_path):
    case, _, model, variables = converted
    groups, _, overrides = golden(case)
    gradients, output = value_and_gradients(model, variables, groups["inputs"])
    for name, expected in groups["features"].items():
        np.testing.assert_allclose(getattr(output, name), expected, atol=1e-5)
    zeros = {name: np.zeros_like(array) for name, array in groups["weights"].items()}
    folder = write_folder(tmp_path, case, zeros | groups["gradients"])  # their layout is that of the weights
    _, expected = load_pretrained(folder, compare_features=False, **overrides)
    scale = max(np.abs(array).max() for array in groups["gradients"].values())
    for (path, got), want in zip(
        jax.tree_util.tree_leaves_with_path(gradients), jax.tree.leaves(expected["params"]), strict=True
    ):
        np.testing.assert_allclose(got, want, atol=1e-5 * scale, err_msg=jax.tree_util.keystr(path))


def test_the_export_holds_the_same_tensors(converted, tmp_path):
    case, folder, model, variables = converted
    format = "open_clip" if case.startswith("open_clip") else "hf"
    certificate = save_pretrained(tmp_path, model, variables, format, compare_features=False)
    before, after = (read_tensors(path / FILES[format][1]) for path in (folder, tmp_path))
    assert before.keys() == after.keys()
    for name, array in before.items():
        assert array.dtype == after[name].dtype and array.tobytes() == after[name].tobytes(), name
    assert certificate.reexport_equal
    assert json.loads((tmp_path / "certificate.json").read_text())["parameters"] == len(jax.tree.leaves(variables))
