"""OpenCLIP's model configurations: parameter counts, names, refusals."""

import dataclasses
import functools
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from infcl_jax.models import BertConfig, ResNet, build_model, create_model, model_config, model_names
from infcl_jax.models.open_clip_config import CONFIG_FILE, read_open_clip_config

ENTRIES = json.loads((Path(__file__).parents[1] / "golden/open_clip_parameter_counts.json").read_text())
REFUSED_BY = {
    "multimodal_cfg": ("coca",),
    "vision_cfg.timm_model_name": ("EVA", "MobileCLIP", "PE-", "ViTamin", "convnext", "swin", "vit_"),
    "text_cfg.hf_model_name": ("mt5", "nllb"),
}
REFUSED = {
    name: field for field, prefixes in REFUSED_BY.items() for name in ENTRIES for p in prefixes if name.startswith(p)
}
BUILT = [name for name in ENTRIES if name not in REFUSED]
CONFIG = ENTRIES["ViT-B-32"]["config"]


def changed(**changes):
    """OpenCLIP's ViT-B-32 with other fields; those of towers have a prefix."""
    config = json.loads(json.dumps(CONFIG))
    for key, value in changes.items():
        tower, _, field = key.partition("__")
        if field:
            config[f"{tower}_cfg"][field] = value
        else:
            config[key] = value
    return config


@functools.cache
def tower_size(module, example):
    """Number of parameters of a tower; that of blocks is linear in their number."""

    def size(module):
        shapes = jax.eval_shape(module.init, jax.random.key(0), jnp.zeros(example.shape, example.dtype))
        return sum(leaf.size for leaf in jax.tree.leaves(shapes["params"]))

    if isinstance(module, ResNet):
        return size(module)
    one, two = (size(module.clone(config=dataclasses.replace(module.config, layers=n))) for n in (1, 2))
    return one + (module.config.layers - 1) * (two - one)


def parameter_counts(config):
    """Parameters of the image tower, of the text tower and of all."""
    model = build_model(read_open_clip_config(config))
    size = model.visual.image_size
    image = tower_size(model.visual, jax.ShapeDtypeStruct((1, size, size, 3), jnp.float32))
    text = tower_size(model.text, jax.ShapeDtypeStruct((1, model.text.context_length), jnp.int32))
    return [image, text, image + text + (1 if model.init_logit_bias is None else 2)]


SOME = ["ViT-B-32", "ViT-L-14-CLIPA", "RN50", "ViT-B-16-SigLIP", "roberta-ViT-B-32"]


@pytest.mark.parametrize("names", [SOME, pytest.param(BUILT, marks=pytest.mark.full)], ids=["some", "all"])
def test_parameter_counts_are_openclips(names):
    counts = {name: parameter_counts(ENTRIES[name]["config"]) for name in names}
    assert counts == {name: ENTRIES[name]["counts"] for name in names}


def test_most_of_openclips_models_can_be_built():
    assert len(BUILT) == 85 and len(REFUSED) == 60


def test_the_others_are_refused_by_a_field():
    for name, field in REFUSED.items():
        tower, _, key = field.rpartition(".")
        config = ENTRIES[name]["config"]
        value = (config[tower] if tower else config)[key]
        with pytest.raises(ValueError, match=f"expected .*{field}|{field}: expected") as error:
            read_open_clip_config(config)
        assert repr(value) in str(error.value) and "\n" not in str(error.value), name


def test_names_are_openclips():
    for name in set(BUILT) & set(model_names()):
        config, named = read_open_clip_config(ENTRIES[name]["config"]), model_config(name)
        if "SigLIP" in name:  # preprocessing and scale of its weights, which OpenCLIP's model configs lack
            assert (named.image_mean, named.image_std, named.resize_mode) == ((0.5,) * 3, (0.5,) * 3, "squash")
            assert named.init_logit_scale == math.log(10)
            same = ("image_mean", "image_std", "resize_mode", "init_logit_scale")
            config = dataclasses.replace(config, **{field: getattr(named, field) for field in same})
        assert named == config, name


def test_every_built_config_of_openclip_has_a_name():
    assert set(BUILT) - {"bert-pooler-ViT-B-32"} == set(model_names()) - {"tiny", "tiny-shapes", "bert-ViT-B-32"}


FIELDS = {
    "vision__ls_init_value": (0.1, {"vision.layer_scale": 0.1}),
    "vision__patch_dropout": (0.5, {"vision.patch_dropout": 0.5}),
    "vision__no_ln_pre": (True, {"vision.ln_pre": False}),
    "vision__pos_embed_type": ("sin_cos_2d", {"vision.pos_embed": "sin_cos_2d"}),
    "vision__final_ln_after_pool": (True, {"vision.final_ln_after_pool": True}),
    "vision__pool_type": ("avg", {"vision.pool": "avg"}),
    "vision__act_kwargs": ({"approximate": "tanh"}, {"vision.activation": "gelu_tanh"}),
    "vision__norm_kwargs": ({"eps": 1e-6}, {"vision.norm_epsilon": 1e-6}),
    "vision__image_size": ([256, 256], {"vision.image_size": 256}),
    "vision__head_width": (96, {"vision.heads": 8}),
    "vision__block_type": ("custom", {}),
    "text__mlp_ratio": (2.0, {"text.mlp_ratio": 2.0}),
    "text__ls_init_value": (0.1, {"text.layer_scale": 0.1}),
    "text__no_causal_mask": (True, {"text.causal": False}),
    "text__pool_type": ("first", {"text.pool": "first"}),
    "text__proj_type": ("none", {"text.projection": "none"}),
    "text__proj_bias": (True, {"text.projection_bias": True}),
    "text__pad_id": (1, {}),  # only used with fields that are not supported
    "text__tokenizer_kwargs": ({"clean": "lower"}, {}),
    "init_logit_scale": (1.0, {"init_logit_scale": 1.0}),
    "init_logit_bias": (-10, {"init_logit_bias": -10.0}),
    "quick_gelu": (True, {"activation": "quick_gelu"}),
    "custom_text": (True, {}),
}


@pytest.mark.parametrize("field", FIELDS)
def test_fields(field):
    value, overrides = FIELDS[field]
    assert read_open_clip_config(changed(**{field: value})) == model_config("ViT-B-32", **overrides)


@pytest.mark.parametrize("value", [0, 1, None])
@pytest.mark.parametrize("field", ["quick_gelu", "vision__no_ln_pre", "text__proj_bias"])
def test_flags_are_true_or_false_or_1_or_0(field, value):
    config = read_open_clip_config(changed(**{field: value}))
    assert config == read_open_clip_config(changed(**{field: bool(value)}))


def test_the_end_token():
    config = changed(text__pool_type="eos", text__eos_id=7)
    assert read_open_clip_config(config) == model_config("ViT-B-32", **{"text.end_token": 7})


@pytest.mark.parametrize(
    ("pool", "projection", "want"),
    [
        ("mean_pooler", "mlp", ("mean", "mlp")),
        ("cls_pooler", "linear", ("pooler", "linear")),
        ("cls_last_hidden_state_pooler", "linear", ("cls", "linear")),
    ],
)
def test_bert_towers(pool, projection, want):
    config = changed(text__hf_model_name="google-bert/bert-base-uncased", text__hf_pooler_type=pool)
    config["text_cfg"]["hf_proj_type"] = projection
    text = read_open_clip_config(config).text
    assert isinstance(text, BertConfig) and (text.pool, text.projection) == want
    assert (text.vocab_size, text.norm_epsilon, text.context_length) == (30522, 1e-12, 77)


@pytest.mark.parametrize(
    ("projection", "bias", "want"),
    [("none", None, ("none", False)), ("linear", True, ("linear", True)), (None, None, ("linear", True))],
)
def test_projections_of_timm_towers(projection, bias, want):
    config = json.loads(json.dumps(ENTRIES["ViT-B-16-SigLIP"]["config"]))
    config["vision_cfg"] |= {"timm_proj": projection, "timm_proj_bias": bias}
    vision = read_open_clip_config(config).vision
    assert (vision.projection, vision.projection_bias) == want


def test_a_folder_has_the_preprocessing(tmp_path):
    preprocess = {"mean": [0.5, 0.5, 0.5], "std": [0.2, 0.3, 0.4], "interpolation": "bilinear", "resize_mode": "squash"}
    (tmp_path / CONFIG_FILE).write_text(json.dumps({"model_cfg": CONFIG, "preprocess_cfg": preprocess}))
    want = model_config(
        "ViT-B-32",
        image_mean=(0.5, 0.5, 0.5),
        image_std=(0.2, 0.3, 0.4),
        interpolation="bilinear",
        resize_mode="squash",
        embed_dim=16,
    )
    assert model_config(str(tmp_path), embed_dim=16) == model_config(str(tmp_path / CONFIG_FILE), embed_dim=16) == want


def test_a_path_is_a_model(tmp_path):
    (tmp_path / "small.json").write_text(json.dumps(changed(vision__layers=1)))
    assert create_model(str(tmp_path / "small.json")).visual.config.layers == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vision__attentional_pool": True}, "expected vision_cfg.attentional_pool to be False, got .*=True; other"),
        ({"vision__pool_type": "none"}, r"expected vision_cfg.pool_type to be one of \('tok', 'avg'\), got .*='none'"),
        ({"vision__act_kwargs": {"approximate": "sigmoid"}}, "vision_cfg.act_kwargs.approximate='sigmoid'"),
        ({"vision__act_kwargs": {"approximate": "tanh"}, "quick_gelu": True}, "vision_cfg.act_kwargs"),
        ({"vision__norm_kwargs": {"bias": False}}, "expected a known field, got vision_cfg.norm_kwargs.bias=False"),
        ({"vision__image_size": [224, 256]}, r"expected vision_cfg.image_size to be a number or .*=\[224, 256\]"),
        ({"text__embed_cls": True}, "text_cfg.embed_cls=True"),
        ({"text__block_type": "other"}, "text_cfg.block_type='other'"),
        ({"text__hf_model_name": "t5-base"}, "text_cfg.hf_model_name: expected one of .* got 't5-base'"),
        ({"text__hf_model_name": "roberta-base", "text__hf_pooler_type": "max_pooler"}, "hf_pooler_type='max_pooler'"),
        ({"vision_cfg": None}, "expected vision_cfg to be given, got vision_cfg=None"),
        ({"text_cfg": 3}, "expected text_cfg to be a JSON object, got 3"),
        ({"nonscalar_logit_scale": True}, "nonscalar_logit_scale=True"),
        ({"temperature": 1}, "expected a known field, got temperature=1"),
        ({"vision__width": "768"}, "expected vision_cfg.width to be a positive integer, got '768'"),
        ({"vision__pool_type": ["tok"]}, r"vision_cfg.pool_type=\['tok'\]"),
        ({"vision__width": 10**9}, "expected vision_cfg.width to be at most 16777216, got vision_cfg.width=1000000000"),
        ({"text__context_length": None}, "expected text_cfg.context_length to be a positive integer, got None"),
        ({"text__eos_id": "2", "text__pool_type": "eos"}, r"expected text_cfg.eos_id to be an integer in \[0, 49408\)"),
        ({"text__hf_model_name": ["x"]}, r"expected text_cfg.hf_model_name to be a string, got .*=\['x'\]"),
        ({"vision__layers": [1, [], 1, 1]}, r"expected vision_cfg.layers to be a positive integer, got \[\]"),
        ({"vision__image_size": [{}, {}]}, "expected vision_cfg.image_size to be a positive integer, got {}"),
        ({"vision__act_kwargs": []}, r"expected vision_cfg.act_kwargs to be a JSON object, got \[\]"),
        ({"vision__mlp_ratio": math.nan}, "expected vision_cfg.mlp_ratio to be a finite number"),
        ({"init_logit_scale": "1"}, "expected init_logit_scale to be a finite number, got init_logit_scale='1'"),
        ({"quick_gelu": 2}, "expected quick_gelu to be true or false, got quick_gelu=2"),
    ],
)
def test_bad_configs(changes, message):
    with pytest.raises(ValueError, match=message) as error:
        read_open_clip_config(changed(**changes))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"timm_pool": "avg"}, "vision_cfg.timm_pool='avg'"),
        ({"timm_proj": "mlp"}, "vision_cfg.timm_proj='mlp'"),
        ({"timm_drop_path": 0.1}, "expected vision_cfg.timm_drop_path to be 0.0, got vision_cfg.timm_drop_path=0.1"),
        ({"image_size": 256}, "expected vision_cfg.image_size to be 224, as in the timm name, got .*=256"),
    ],
)
def test_bad_timm_towers(changes, message):
    config = json.loads(json.dumps(ENTRIES["ViT-B-16-SigLIP"]["config"]))
    config["vision_cfg"] |= changes
    with pytest.raises(ValueError, match=message):
        read_open_clip_config(config)


def test_bad_files(tmp_path):
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / CONFIG_FILE).write_text(json.dumps({"model_cfg": CONFIG, "preprocess_cfg": {"mode": "L"}}))
    for name, message in [
        ("broken.json", "expected the JSON config of an OpenCLIP model, got .*broken.json"),
        ("absent.json", "No such file"),
        ("list.json", "expected a JSON object in .*list.json, got list"),
        ("", "expected preprocess_cfg.mode to be 'RGB', got preprocess_cfg.mode='L'"),
    ]:
        with pytest.raises(ValueError, match=message):
            model_config(str(tmp_path / name))
