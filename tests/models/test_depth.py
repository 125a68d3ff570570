"""Depth of every parameter of every kind of tower."""

import re

import jax
import jax.numpy as jnp
import pytest
from flax.traverse_util import flatten_dict

from infcl_jax.models import TOWERS, create_model
from infcl_jax.models.depth import distances_to_output

EMBEDDINGS = "(class|token|token_type|positional)_embedding"
TRANSFORMER = {
    3: f"conv1/(kernel|bias)|ln_(pre|embed)/.*|{EMBEDDINGS}",
    2: "transformer/block_00/.*",
    1: "transformer/block_01/.*|ln_(post|final)/.*",
    0: "(proj|text_projection|attn_pool|pooler)/.*",
}
STEM = "(conv|bn)[123]/.*"
BOTTLENECKS = {6: STEM, 5: "layer1_0/.*", 4: "layer2_0/.*", 3: "layer2_1/.*", 2: "layer3_0/.*", 1: "layer4_0/.*"}
STAGES = {5: STEM, 4: "layer1_.*", 3: "layer2_.*", 2: "layer3_.*", 1: "layer4_.*"}
POOL = {0: "attnpool/.*"}


def tower_names(tower, model, overrides):
    """Names of the parameters of a small model's tower."""
    sizes = {f"{kind}.layers": 2 for kind in ("vision", "text")} | {"text.vocab_size": 64}
    built = create_model(model, **(sizes | overrides))
    image = jnp.zeros((1, built.visual.image_size, built.visual.image_size, 3), jnp.uint8)
    text = jnp.zeros((1, built.text.context_length), jnp.int32)
    params = jax.eval_shape(built.init, jax.random.key(0), image, text)["params"]
    return list(flatten_dict(params[TOWERS[tower]], sep="/"))


def check(distances, patterns):
    for name, distance in distances.items():
        assert re.fullmatch(patterns[distance], name), name
    assert set(distances.values()) == set(patterns)


@pytest.mark.parametrize(
    ("tower", "model", "overrides"),
    [
        ("image", "ViT-B-32", {}),
        ("image", "ViT-B-32", {"vision.layer_scale": 0.1, "vision.patch_bias": True, "vision.projection_bias": True}),
        ("image", "ViT-L-14-CLIPA", {"vision.class_token": False, "vision.pool": "avg"}),
        (
            "image",
            "ViT-B-32",
            {"vision.pos_embed": "sin_cos_2d", "vision.pool": "avg", "vision.final_ln_after_pool": True},
        ),
        ("image", "ViT-B-16-SigLIP", {}),
        ("text", "ViT-B-32", {"text.layer_scale": 0.1}),
        ("text", "ViT-B-16-SigLIP", {}),
        ("text", "bert-ViT-B-32", {"text.pool": "pooler"}),
        ("text", "roberta-ViT-B-32", {"text.projection": "linear"}),
    ],
    ids=str,
)
def test_every_parameter_of_a_transformer_has_a_depth(tower, model, overrides):
    names = tower_names(tower, model, overrides)
    check(distances_to_output(names), TRANSFORMER)
    assert distances_to_output(names, stages=True) == distances_to_output(names)


@pytest.mark.parametrize(
    ("tower", "model"), [("image", "ViT-B-32"), ("text", "ViT-SO400M-16-SigLIP-i18n-256"), ("text", "bert-ViT-B-32")]
)
def test_towers_without_projection_end_at_their_last_layer(tower, model):
    overrides = {"embed_dim": 768, f"{'vision' if tower == 'image' else 'text'}.projection": "none"}
    overrides = {} if "i18n" in model else overrides
    distances = distances_to_output(tower_names(tower, model, overrides))
    check(distances, {distance: TRANSFORMER[distance] for distance in (3, 2, 1)})


@pytest.mark.parametrize(("stages", "patterns"), [(False, BOTTLENECKS | POOL), (True, STAGES | POOL)])
def test_every_parameter_of_a_resnet_has_a_depth(stages, patterns):
    names = tower_names("image", "RN50", {"vision.layers": (1, 2, 1, 1)})
    check(distances_to_output(names, stages=stages), patterns)


def test_distances_do_not_depend_on_lower_layers():
    names = tower_names("image", "ViT-B-32", {"vision.layers": 12})
    top = [name for name in names if re.match(r"transformer/block_(09|1.)|ln_post|proj", name)]
    whole = distances_to_output(names)
    assert distances_to_output(top) == {name: whole[name] for name in top}
    assert sorted(set(whole.values())) == list(range(14))
