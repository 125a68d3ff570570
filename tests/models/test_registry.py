"""Named configurations: sizes, overrides, errors."""

import dataclasses
import math

import jax.numpy as jnp
import pytest

from infcl_jax.models import build_model, create_model, model_config, model_names


@pytest.mark.parametrize("name", model_names()[::8])
def test_a_name_builds_a_model_of_its_configuration(name):
    config, model = model_config(name), create_model(name)
    assert (model, hash(model)) == (build_model(config), hash(build_model(config)))
    assert (model.visual.config.width, model.text.config.layers) == (config.vision.width, config.text.layers)
    assert model.text.config.causal == getattr(config.text, "causal", False)


def test_overrides_reach_the_modules():
    model = create_model(
        "tiny",
        **{
            "vision.width": 96,
            "vision.heads": 3,
            "vision.patch_dropout": 0.25,
            "vision.remat": "dots",
            "vision.pool": "avg",
            "text.layers": 1,
            "text.dropout": 0.1,
            "text.vocab_size": 300,
            "text.end_token": 7,
            "activation": "quick_gelu",
            "dtype": jnp.bfloat16,
            "embed_dim": 48,
            "image_mean": [0.5, 0.5, 0.5],
            "init_logit_bias": -10.0,
        },
    )
    vision, text = model.visual, model.text
    assert (vision.config.width, vision.config.heads, vision.config.remat) == (96, 3, "dots")
    assert (vision.patch_dropout, vision.pool, vision.embed_dim) == (0.25, "avg", 48)
    assert (text.config.layers, text.config.dropout, text.vocab_size, text.embed_dim) == (1, 0.1, 300, 48)
    assert text.end_token == 7
    assert {vision.config.activation, text.config.activation} == {"quick_gelu"}
    assert {vision.config.dtype, text.config.dtype, model.feature_dtype} == {"bfloat16"}
    assert (model.image_mean, model.init_logit_bias) == ((0.5, 0.5, 0.5), -10.0)


def test_every_tower_field_reaches_its_transformer():
    changes = {"mlp_ratio": 2.0, "dropout": 0.2, "remat": "full", "attention": "cudnn"}
    for tower, module in [("vision", "visual"), ("text", "text")]:
        model = create_model("tiny", dtype="bfloat16", **{f"{tower}.{k}": v for k, v in changes.items()})
        built = dataclasses.asdict(getattr(model, module).config)
        assert {key: built[key] for key in changes} == changes


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        (
            "ViT-B/17",
            {},
            r"expected model to be one of \('tiny', 'tiny-shapes', 'ViT-S-16', .* got 'ViT-B/17'; did you mean",
        ),
        (
            "tiny",
            {"vision.witdh": 64},
            r"among embed_dim, vision.* got 'vision.witdh'; did you mean 'vision.width'\?",
        ),
        ("tiny", {"vision": None}, "expected model overrides among .* got 'vision'"),
        ("tiny", {"zzz": 1}, "expected model overrides among .* got 'zzz'$"),
        ("tiny", {"vision.heads": 5}, "vision: expected width to be a multiple of heads, got width 64 and heads 5"),
        (
            "tiny",
            {"vision.patch_size": 64},
            "expected vision.image_size to be at least vision.patch_size, got 32 and 64",
        ),
        ("tiny", {"vision.pool": "max"}, r"expected vision.pool to be one of \('tok', 'avg', 'map'\), got 'max'"),
        ("tiny", {"vision.patch_dropout": -0.1}, "vision.patch_dropout"),
        ("tiny", {"text.end_token": 259}, r"expected text.end_token in \[0, 259\) .* or None, got 259"),
        ("tiny", {"text.attention": "cudnn"}, "text: expected dtype 'bfloat16' or 'float16'"),
        ("tiny", {"embed_dim": "64"}, "expected embed_dim to be a positive integer, got '64'"),
        ("tiny", {"feature_dtype": "int8"}, "expected feature_dtype to be one of"),
        ("tiny", {"image_std": (1.0, 0.0, 1.0)}, "expected image_std to be three numbers"),
        ("tiny", {"text.vocab_size": 10**13}, "expected text.vocab_size to be at most 16777216, got .*=10000000000000"),
        ("tiny", {"vision.layers": 10**8}, "expected vision.layers to be at most 256, got vision.layers=100000000"),
        ("RN50", {"vision.layers": (3, 4, 257, 3)}, "expected vision.layers to be at most 256"),
        ("tiny", {"vision.mlp_ratio": math.inf}, "expected vision.mlp_ratio to be at most 16777216"),
        ("tiny", {"vision.image_size": 2**14 + 8}, "expected vision.image_size to be at most 16384"),
        ("tiny", {"vision.image_size": 2**14}, "expected position embeddings of at most 33554432 elements"),
        ("RN50", {"vision.image_size": 2**14}, "expected position embeddings of at most 33554432 elements"),
    ],
)
def test_bad_names_and_overrides(name, overrides, message):
    with pytest.raises(ValueError, match=message):
        create_model(name, **overrides)
