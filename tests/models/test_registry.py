"""Named configurations: sizes, overrides, errors."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest

from infcl_jax.models import build_model, create_model, model_config, model_names


def parameter_count(model):
    size, length = model.visual.image_size, model.text.context_length
    image, text = jnp.zeros((1, size, size, 3), jnp.uint8), jnp.zeros((1, length), jnp.int32)
    shapes = jax.eval_shape(model.init, jax.random.key(0), image, text)
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))


@pytest.mark.parametrize(
    ("name", "count"), [("ViT-B/32", 151_277_313), ("ViT-B/16", 149_620_737), ("ViT-L/14", 427_616_513)]
)
def test_sizes_are_openclips(name, count):
    assert parameter_count(create_model(name)) == count


@pytest.mark.parametrize("name", model_names())
def test_every_name_builds_a_model_of_its_configuration(name):
    config, model = model_config(name), create_model(name)
    assert model == build_model(config)
    assert hash(model) == hash(build_model(config))
    assert model.visual.config.width == config.vision.width
    assert not getattr(model.visual.config, "causal", False)
    assert model.text.config.layers == config.text.layers and model.text.config.causal == getattr(
        config.text, "causal", False
    )


@pytest.mark.parametrize("name", ["ViT-S/16", "ViT-B/32", "ViT-B/16", "ViT-L/14"])
def test_real_models_have_heads_of_64_channels(name):
    config = model_config(name)
    assert config.vision.width == 64 * config.vision.heads
    assert config.text.width == 64 * config.text.heads


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


def test_overrides_do_not_change_the_named_configuration():
    model_config("tiny", embed_dim=8, **{"vision.layers": 7})
    assert model_config("tiny") == model_config("tiny", **{"vision.layers": 2, "embed_dim": 64})


def test_patch_size_changes_the_number_of_positions():
    base = parameter_count(create_model("tiny"))
    changed = parameter_count(create_model("tiny", **{"vision.image_size": 64}))
    assert changed - base == (64 - 16) * 64


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
        ("tiny", {"text.width": 63}, "text: expected width to be a multiple of heads"),
        (
            "tiny",
            {"vision.patch_size": 64},
            "expected vision.image_size to be at least vision.patch_size, got 32 and 64",
        ),
        ("tiny", {"vision.pool": "max"}, r"expected vision.pool to be one of \('tok', 'avg', 'map'\), got 'max'"),
        ("tiny", {"vision.patch_dropout": -0.1}, "vision.patch_dropout"),
        ("tiny", {"text.vocab_size": 0}, "expected text.vocab_size to be a positive integer"),
        ("tiny", {"text.end_token": 259}, r"expected text.end_token in \[0, 259\) .* or None, got 259"),
        ("tiny", {"text.attention": "cudnn"}, "text: expected dtype 'bfloat16' or 'float16'"),
        ("tiny", {"embed_dim": "64"}, "expected embed_dim to be a positive integer, got '64'"),
        ("tiny", {"feature_dtype": "int8"}, "expected feature_dtype to be one of"),
        ("tiny", {"image_std": (1.0, 0.0, 1.0)}, "expected image_std to be three numbers"),
        ("tiny", {"image_mean": (1.0,)}, "expected image_mean to be three numbers"),
        ("tiny", {"text.vocab_size": 10**13}, "expected text.vocab_size to be at most 16777216, got .*=10000000000000"),
        ("tiny", {"embed_dim": 2**24 + 1}, "expected embed_dim to be at most 16777216"),
        ("tiny", {"vision.layers": 10**8}, "expected vision.layers to be at most 256, got vision.layers=100000000"),
        ("RN50", {"vision.layers": (3, 4, 257, 3)}, "expected vision.layers to be at most 256"),
        ("tiny", {"vision.mlp_ratio": math.inf}, "expected vision.mlp_ratio to be at most 16777216"),
        ("tiny", {"vision.image_size": 2**14 + 8}, "expected vision.image_size to be at most 16384"),
        ("tiny", {"vision.image_size": 2**14}, "expected position embeddings of at most 33554432 elements"),
        ("RN50", {"vision.image_size": 2**14}, "expected position embeddings of at most 33554432 elements"),
        ("bert-ViT-B-32", {"text.token_types": 2**40}, "expected text.token_types to be at most 16777216"),
    ],
)
def test_bad_names_and_overrides(name, overrides, message):
    with pytest.raises(ValueError, match=message):
        create_model(name, **overrides)
