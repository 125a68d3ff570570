"""Initial parameters from pretrained weights, runs and checkpoints."""

import json
import shutil

import jax
import numpy as np
import pytest
import runs
from flax.traverse_util import flatten_dict

from infcl_jax import run, train
from infcl_jax.models import BertConfig, model_config, save_pretrained
from infcl_jax.models.config import config_from_json, config_to_json
from infcl_jax.models.resnet import ResNetConfig
from infcl_jax.run.initialize import initialize
from infcl_jax.run.model import save_base_model
from infcl_jax.runtime.mesh import data_mesh
from infcl_jax.settings import keep_recorded, make_config
from infcl_jax.training import sharding

NOTHING = {"evaluation.retrieval_dataset": None, "evaluation.zero_shot_dataset": None}


@pytest.fixture(scope="module", autouse=True)
def promotion():
    """optax's Adam mixes dtypes."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def settings(**changes):
    return runs.config(**(NOTHING | {"seed": 1, "total_steps": 1} | changes))


def initialized(config, state):
    return initialize(make_config(config).init, run.read_model_config(config), state)


def flat(state):
    return {name: np.asarray(array) for name, array in flatten_dict(state.params, sep="/").items()}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A run with its checkpoint, and the same parameters in OpenCLIP's format."""
    folder = tmp_path_factory.mktemp("source")
    train(settings(seed=2), folder / "run")
    config = settings(**{"init.model": str(folder / "run")})
    state = initialized(config, run.initial_state(config, data_mesh()))
    save_pretrained(folder / "open_clip", run.read_model_config(config), state.variables, compare_features=False)
    return folder, flat(state)


@pytest.fixture(scope="module")
def fresh():
    return run.initial_state(settings(), data_mesh())


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("run", "model"),
        ("run/checkpoints/1", "image"),
        ("open_clip", "text"),
        ("open_clip/open_clip_model.safetensors", "image"),
    ],
)
def test_the_named_part_is_loaded_and_the_rest_kept(source, fresh, path, part):
    folder, expected = source
    got = flat(initialized(settings(**{f"init.{part}": str(folder / path)}), fresh))
    prefix = {"model": "", "image": "visual/", "text": "text/"}[part]
    for name, before in flat(fresh).items():
        np.testing.assert_array_equal(got[name], expected[name] if name.startswith(prefix) else before, err_msg=name)
    assert not np.array_equal(expected["visual/proj/kernel"], flat(fresh)["visual/proj/kernel"])


def test_rules_rename_and_skip(source, fresh):
    folder, expected = source
    rules = (("logit_scale", ""), (r"visual/ln_(pre|post)/(.*)", r"visual/ln_post/\2"))
    got = flat(initialized(settings(**{"init.model": str(folder / "run"), "init.rules": rules}), fresh))
    np.testing.assert_array_equal(got["logit_scale"], flat(fresh)["logit_scale"])
    for norm in ("ln_pre", "ln_post"):
        np.testing.assert_array_equal(got[f"visual/{norm}/scale"], expected["visual/ln_post/scale"])


def test_position_embeddings_are_resized_and_arrays_keep_their_sharding(source):
    folder, expected = source
    changes = {"init.model": str(folder / "run"), "parameter_sharding": "fsdp"}
    overrides = f"{runs.OVERRIDES},vision.image_size=32,text.context_length=20"
    config = settings(**changes, model_overrides=overrides)
    before = run.initial_state(config, data_mesh())
    after = initialized(config, before)
    assert after.params["visual"]["positional_embedding"].shape[0] == 17
    assert after.params["text"]["positional_embedding"].shape[0] == 20
    for old, new in zip(jax.tree.leaves(before.params), jax.tree.leaves(after.params), strict=True):
        assert (old.sharding, old.dtype, old.shape) == (new.sharding, new.dtype, new.shape)
    np.testing.assert_array_equal(flat(after)["visual/proj/kernel"], expected["visual/proj/kernel"])


def test_moving_averages_start_at_the_loaded_parameters(source, monkeypatch):
    monkeypatch.setattr(sharding, "MIN_SIZE", 16)  # shards small arrays too
    changes = {"init.image": str(source[0] / "open_clip"), "ema_decay": 0.9, "parameter_sharding": "fsdp"}
    config = settings(frozen=("image",), **changes, **{"unlocked_groups.image": 1})
    before = run.initial_state(config, data_mesh())
    after = initialized(config, before)
    assert runs.equal_bits(after.ema, after.averaged)
    np.testing.assert_array_equal(after.ema["params"]["visual"]["proj"]["kernel"], source[1]["visual/proj/kernel"])
    for old, new in zip(jax.tree.leaves(before.ema), jax.tree.leaves(after.ema), strict=True):
        assert (old.sharding, old.dtype) == (new.sharding, new.dtype)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"init.model": "nowhere"}, "expected a pretrained model, got 'nowhere', which does not exist"),
        ({"model_overrides": f"{runs.OVERRIDES},activation=gelu"}, "vision.activation='quick_gelu', as in .* 'gelu'"),
        ({"model_overrides": f"{runs.OVERRIDES},image_std=(1,1,1)"}, "image_std=.*, as in"),
        ({"init.rules": (("visual/nothing", ""),)}, "init.rules to match a parameter, got 'visual/nothing'"),
        ({"init.rules": (("visual/proj/kernel", "visual/x"),)}, "expected params/visual/x in .* skip it in init.rules"),
        ({"init.rules": (("visual/proj/kernel", "logit_scale"),)}, r"visual/proj/kernel \[16, 16\], got \[\]"),
        ({"init.rules": (("(", ""),)}, "pairs of a regular expression and a name"),
    ],
)
def test_a_mistake_is_named(source, fresh, changes, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        initialized(settings(**({"init.model": str(source[0] / "run")} | changes)), fresh)


def alone(path, **changes):
    """Settings of a run whose model is that of its weights."""
    return settings(model=None, model_overrides="", **{"init.model": str(path)}, **changes)


def test_lit_trains_from_weights_alone_and_a_resumed_run_does_not_need_them(source, tmp_path, capsys):
    folder, expected = source
    weights = shutil.copytree(folder / "open_clip", tmp_path / "weights")
    config = alone(weights, frozen=("image",))
    train(config, tmp_path / "run")
    assert f"initialized from {weights}: {len(expected)} of {len(expected)} tensors" in capsys.readouterr().out
    shutil.rmtree(weights)
    moved = (tmp_path / "run").rename(tmp_path / "moved")
    config.update(total_steps=2)
    train(config, moved)
    saved = run.saved_config(moved)
    assert saved.total_steps == 2 and run.read_model_config(saved) == run.read_model_config(settings())
    config.init.update(model=str(moved))
    trained = flat(initialized(config, run.initial_state(config, data_mesh())))
    for name, array in expected.items():
        assert np.array_equal(trained[name], array) == (name.startswith("visual/")), name


@pytest.mark.parametrize("path", ["run", "run/checkpoints/1", "open_clip"])
def test_weights_alone_name_the_model_and_the_tokenizer(source, path):
    config = alone(source[0] / path)
    assert run.read_model_config(config) == run.read_model_config(settings())
    assert run.text_tokenizer(config).kind == "bytes"
    longer = alone(source[0] / path, text_cleaning="lower")
    longer.model_overrides = "text.context_length=20"
    assert run.read_model_config(longer).text.context_length == 20
    assert (tokenizer := run.text_tokenizer(longer)).context_length == 20 and tokenizer.clean == "lower"


def test_weights_without_a_configuration_need_a_model(source, tmp_path):
    shutil.copy(source[0] / "open_clip" / "open_clip_model.safetensors", tmp_path)
    with pytest.raises(ValueError, match=r"^expected open_clip_config.json or config.json beside .*; name its model$"):
        run.read_model_config(alone(tmp_path / "open_clip_model.safetensors"))


def test_a_run_keeps_the_model_of_its_weights_without_them(source, tmp_path):
    expected = run.read_model_config(alone(source[0] / "open_clip"))
    before, after = tmp_path / "before", tmp_path / "after"
    before.mkdir()
    save_base_model(alone(source[0] / "open_clip"), before)
    config = alone("moved/away")
    (before / "config.json").write_text(config.to_json_best_effort())
    before.rename(after)
    saved = run.saved_config(after)
    assert run.read_model_config(saved) == expected
    assert keep_recorded(saved, make_config(config)).model == saved.model


def test_a_run_of_the_former_default_model_keeps_it(tmp_path):
    (tmp_path / "config.json").write_text(settings(model="tiny-shapes").to_json_best_effort())
    assert keep_recorded(run.saved_config(tmp_path), make_config(settings(model=None))).model == "tiny-shapes"
    assert run.read_model_config(settings(model=None, model_overrides="")) == model_config("tiny-shapes")


@pytest.mark.parametrize("kind", [ResNetConfig, BertConfig])
def test_every_tower_survives_json(kind):
    name = "RN50" if kind is ResNetConfig else "bert-ViT-B-32"
    config = model_config(name)
    assert kind in {type(config.vision), type(config.text)}
    assert config_from_json(json.loads(json.dumps(config_to_json(config)))) == config
    with pytest.raises(ValueError, match=r"^expected the fields of a model of this version, got .*'future'"):
        config_from_json(config_to_json(config) | {"future": 1})
