"""Models of OpenCLIP and transformers: features, gradients and the way back, against golden files."""

import importlib
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open

from infcl_jax.models import BertConfig, config_of, load_pretrained, read_open_clip_config, save_pretrained
from infcl_jax.models.convert import convert, open_source
from infcl_jax.models.convert.open_clip import weight_map
from infcl_jax.models.convert.tensor_files import read_tensors, write_tensors
from infcl_jax.models.convert.weight_map import flat_shapes
from infcl_jax.models.names import BERT_CONFIGS, TIMM_SIZES
from infcl_jax.training import OptimizerConfig
from infcl_jax.training.optimizers import decay_factors

pytestmark = pytest.mark.runs

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = sorted(
    path.stem for pattern in ("open_clip_*", "hugging_face_*") for path in GOLDEN.glob(f"{pattern}.safetensors")
)
FILES = {
    "open_clip": ("open_clip_config.json", "open_clip_model.safetensors"),
    "hf": ("config.json", "model.safetensors"),
}


def golden(case):
    """Tensors of a golden file by group, and its configuration."""
    path = GOLDEN / f"{case}.safetensors"
    groups = {}
    for name, array in read_tensors(path).items():
        group, _, name = name.partition("/")
        groups.setdefault(group, {})[name] = array
    with safe_open(str(path), "numpy") as file:
        metadata = file.metadata()
    return groups, json.loads(metadata["config"])


def write_folder(folder, case, changes=None):
    """Write the model of a golden file as its library does, with other tensors where given."""
    groups, config = golden(case)
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


@pytest.fixture(scope="module", autouse=True)
def small_towers():
    """Names of the small towers of timm and transformers in the golden files."""
    bert = BertConfig(width=16, layers=2, heads=2, mlp_ratio=2.0, vocab_size=64, context_length=12, max_positions=20)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TIMM_SIZES, "tiny", (16, 2, 2, 2.0))
        patch.setitem(BERT_CONFIGS, "bert-tiny", bert)
        yield


@pytest.fixture(scope="module", params=CASES)
def converted(request, tmp_path_factory):
    names = golden(request.param)[0]["weights"]
    counters = {name: np.array(7, np.int64) for name in names if name.endswith("num_batches_tracked")}
    folder = write_folder(tmp_path_factory.mktemp("golden"), request.param, counters)
    return request.param, folder, *load_pretrained(folder, compare_features=False)


def test_features_and_all_gradients_equal_the_librarys(converted, tmp_path):
    case, _, model, variables = converted
    groups, _ = golden(case)
    gradients, output = value_and_gradients(model, variables, groups["inputs"])
    for name, expected in groups["features"].items():
        np.testing.assert_allclose(getattr(output, name), expected, atol=1e-5)
    folder = write_folder(tmp_path, case, groups["gradients"])  # their layout is that of the weights
    _, expected = load_pretrained(folder, compare_features=False)
    scale = max(np.abs(array).max() for array in groups["gradients"].values())
    for (path, got), want in zip(
        jax.tree_util.tree_leaves_with_path(gradients), jax.tree.leaves(expected["params"]), strict=True
    ):
        np.testing.assert_allclose(got, want, atol=1e-5 * scale, err_msg=jax.tree_util.keystr(path))


def test_the_export_holds_the_same_tensors(converted, tmp_path):
    case, folder, model, variables = converted
    format = "open_clip" if case.startswith("open_clip") else "hf"
    checked = save_pretrained(tmp_path, model, variables, format, compare_features=False)
    before, after = (read_tensors(path / FILES[format][1]) for path in (folder, tmp_path))
    assert before.keys() == after.keys()
    for name, array in before.items():
        assert array.dtype == after[name].dtype and array.tobytes() == after[name].tobytes(), name
    assert f" tensors match {len(jax.tree.leaves(variables))} parameters" in checked
    assert checked.endswith("converted back they are equal")


def test_a_resnet_in_half_precision_keeps_it_with_running_statistics_in_float32(tmp_path):
    dtype = "float16"
    write_folder(tmp_path, "open_clip_resnet")
    model, cast = load_pretrained(tmp_path, param_dtype=dtype, compare_features=False)
    save_pretrained(tmp_path / "saved", model, cast, compare_features=False)
    _, kept = load_pretrained(tmp_path / "saved", compare_features=False)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(kept["params"]["visual"])} == {dtype}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(kept["batch_stats"])} == {"float32"}
    jax.tree.map(np.testing.assert_array_equal, kept, cast)


def test_the_parameters_that_decay_are_those_of_openclips_trainer(converted):
    """Compares with the rule of `open_clip_train.main` on the names and shapes of its tensors."""
    case, _, model, variables = converted
    if not case.startswith("open_clip"):
        return
    tensors, factors = golden(case)[0]["weights"], flat_shapes(decay_factors(OptimizerConfig(), variables["params"]))
    names = {entry.path: entry.names for entry in weight_map(config_of(model), flat_shapes(variables), tensors).entries}
    for path, factor in factors.items():
        for name in names[f"params/{path}"]:
            excluded = tensors[name].ndim < 2 or any(part in name for part in ("bn", "ln", "bias", "logit_scale"))
            assert factor == (not excluded), path
    matrices = decay_factors(OptimizerConfig(weight_decay_rules=()), variables["params"])
    changed = {path for path, factor in flat_shapes(matrices).items() if factor != factors[path]}
    assert changed == ({"visual/attn_pool/probe"} if "siglip" in case else set())


@pytest.mark.parametrize(("prefix", "norm"), [("", ("weight", "bias")), ("bert.", ("gamma", "beta"))])
def test_a_bert_of_transformers_is_the_text_tower_of_a_model(tmp_path, prefix, norm):
    groups, config = golden("open_clip_bert")
    _, expected = load_pretrained(write_folder(tmp_path, "open_clip_bert"), compare_features=False)
    renamed = {f"LayerNorm.{name}": f"LayerNorm.{new}" for name, new in zip(("weight", "bias"), norm, strict=True)}
    tensors = {"cls.predictions.bias": np.zeros(64, np.float32)}
    stem = "text.transformer."
    for name, array in groups["weights"].items():
        if name.startswith(stem):
            module, _, leaf = name.removeprefix(stem).rpartition("LayerNorm.")
            tensors[prefix + (module + renamed[f"LayerNorm.{leaf}"] if module else leaf)] = array
    write_tensors(tmp_path / "model.safetensors", tensors)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    sizes |= {"vocab_size": 64, "max_position_embeddings": 20, "type_vocab_size": 2}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", **sizes}))
    (tmp_path / "open_clip_config.json").unlink()
    _, variables, checked = convert(open_source(tmp_path), default=read_open_clip_config(config))
    assert checked.endswith("unused: cls.predictions.bias; converted back they are equal")
    tower = {name: leaf for name, leaf in expected["params"]["text"].items() if name != "text_projection"}
    jax.tree.map(np.testing.assert_array_equal, variables, {"params": {"text": tower}})
    with pytest.raises(ValueError, match="expected a model with two towers, got a bert alone"):
        load_pretrained(tmp_path)


def test_the_library_loads_the_export_and_gives_the_same_features(converted, tmp_path, monkeypatch):
    """Needs PyTorch, which the project's environment does not have."""
    case, _, model, variables = converted
    pytest.importorskip("torch")
    for library in ("open_clip", "transformers", "timm"):
        pytest.importorskip(library)
    monkeypatch.syspath_prepend(GOLDEN)
    models = importlib.import_module("make_open_clip_models")  # registers the small tower of timm
    if "bert" in case:
        monkeypatch.setattr(models.transformers.AutoConfig, "from_pretrained", models.bert_tiny)
    format = "open_clip" if case.startswith("open_clip") else "hf"
    checked = save_pretrained(tmp_path, model, variables, format)
    assert float(re.search(r"features differ from .* by at most (\S+)$", checked)[1]) <= 1e-5
