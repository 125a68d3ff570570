"""Configurations of transformers: defaults, and refusals that name the field."""

import pytest

from infcl_jax.models import model_config
from infcl_jax.models.convert import bert, hugging_face

HUGGING_FACE = {"model_type": "clip", "text_config": None, "vision_config": None}


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_null_sections_of_transformers_are_its_defaults(kind):
    config = hugging_face.read_config(HUGGING_FACE | {"model_type": kind}, {"size": None, "resample": None}, None)
    assert config == hugging_face.read_config({"model_type": kind}, {}, None)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"vision_config": []}, r"expected vision_config to be a JSON object, got \[\]"),
        ({"projection_dim": "512"}, "expected projection_dim to be a positive integer, got '512'"),
        ({"vision_config": {"hidden_size": 10**9}}, "expected vision_config.hidden_size to be at most 16777216"),
        ({"vision_config": {"num_hidden_layers": 10**6}}, "expected vision_config.num_hidden_layers to be at most 256"),
        ({"vision_config": {"image_size": 2**14, "patch_size": 1}}, "expected position embeddings of at most 33554432"),
        ({"text_config": {"eos_token_id": [2]}}, r"expected text_config.eos_token_id to be an integer in \[0, 49408\)"),
        ({"text_config": {"hidden_act": ["gelu"]}}, "expected text_config.hidden_act to be one of"),
        ({"text_config": {"layer_norm_eps": True}}, r"layer_norm_eps to be a finite number in \[0, 1\], got .*=True"),
        ({"model_type": []}, r"expected model_type clip, siglip, .*, got \[\]"),
        (
            {"model_type": "siglip", "vision_config": {"vision_use_head": False}},
            "expected vision_config.vision_use_head",
        ),
    ],
)
def test_bad_configurations_of_transformers(config, message):
    with pytest.raises(ValueError, match=f"{message}[^\n]*$"):
        hugging_face.read_config(HUGGING_FACE | config, {}, None)


@pytest.mark.parametrize("size", [224, 224.0, [224, 224], [224], {"shortest_edge": 224}])
@pytest.mark.parametrize("crop", [True, 1, 0, None])
def test_sizes_and_flags_of_the_preprocessing(size, crop):
    config = hugging_face.read_config(HUGGING_FACE, {"size": size, "do_center_crop": crop}, None)
    assert config.resize_mode == "shortest"
    square = {"size": {"height": 224, "width": 224}, "do_center_crop": crop}
    assert hugging_face.read_config(HUGGING_FACE, square, None).resize_mode == ("shortest" if crop else "squash")


@pytest.mark.parametrize("field", ["logit_scale_init_value", "projection_dim"])
def test_null_is_the_default_of_a_field(field):
    assert hugging_face.read_config(HUGGING_FACE | {field: None}, {}, None) == hugging_face.read_config(
        HUGGING_FACE, {}, None
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"image_mean": [1, 2]},
        {"image_std": 3},
        {"resample": "3"},
        {"size": []},
        {"size": [224, 256]},
        {"size": 224.5},
        {"do_center_crop": 2, "size": {"height": 3}},
    ],
)
def test_a_bad_preprocessing_of_transformers_names_the_field(wrong):
    with pytest.raises(ValueError, match=f"^expected preprocessor_config.json.{next(iter(wrong))} to be [^\n]*$"):
        hugging_face.read_config(HUGGING_FACE, wrong, None)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "expected model_type to be one of .*, got model_type=None"),
        ({"model_type": "bert", "hidden_size": 16}, "expected vocab_size to be a positive integer, got None"),
        (
            {"model_type": "bert", "hidden_size": 16, "vocab_size": 9, "pad_token_id": "0"},
            "expected pad_token_id to be",
        ),
        ({"model_type": "bert", "hidden_act": []}, r"expected hidden_act to be one of .*, got hidden_act=\[\]"),
    ],
)
def test_bad_configurations_of_a_bert(config, message):
    with pytest.raises(ValueError, match=f"^{message}[^\n]*$"):
        bert.read_config(config, model_config("bert-ViT-B-32").text)
