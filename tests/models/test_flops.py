"""FLOPs of the towers against XLA and the groups of parameters."""

import jax
import jax.numpy as jnp
import pytest
import runs

from infcl_jax.models import TOWERS, build_model, model_config
from infcl_jax.models.flops import forward_flops, group_flops, step_flops
from infcl_jax.planner import utilization
from infcl_jax.training import UnlockedGroups, parameter_groups
from infcl_jax.training.compiled_step import peak_flops

SHORT = {"vision.layers": 2, "text.layers": 2}
SHAPES = {
    "the smallest": ("tiny", {}),
    "two layers of ViT-B/32": ("ViT-B/32", SHORT),
    "another of everything": (
        "tiny",
        {"embed_dim": 80, "vision.patch_size": 4, "vision.patch_dropout": 0.5, "vision.pool": "avg"}
        | {"vision.mlp_ratio": 2.0, "text.context_length": 40, "text.width": 128, "text.heads": 4},
    ),
    "a tower of SigLIP": (
        "tiny",
        {"vision.pool": "map", "vision.class_token": False, "vision.projection": "none"}
        | {"text.causal": False, "text.pool": "last"},
    ),
    "BERT": ("bert-ViT-B-32", SHORT),
    "a ResNet": ("RN50", {"vision.layers": (1, 2, 1, 1), "text.layers": 1}),
}


@pytest.mark.parametrize("shape", list(SHAPES))
def test_operations_are_those_that_xla_counts(shape):
    """XLA also counts LayerNorm, softmax and activations, but not the padding of convolutions: -3 to 5 % here."""
    name, changes = SHAPES[shape]
    config, rows = model_config(name, **changes), 4
    size, context = config.vision.image_size, config.text.context_length
    pair = jax.ShapeDtypeStruct((rows, size, size, 3), jnp.uint8), jax.ShapeDtypeStruct((rows, context), jnp.int32)
    model = build_model(config)
    variables = jax.eval_shape(model.init, jax.random.key(0), *pair)
    for tower, flops in group_flops(config).items():
        assert len(flops) == len(parameter_groups(variables["params"][TOWERS[tower]]))

    def forward(variables, image, text, key):
        return model.apply(variables, image, text, train=True, rngs={"dropout": key}, mutable=["batch_stats"])

    counted = jax.jit(forward).lower(variables, *pair, jax.random.key(0)).compile().cost_analysis()["flops"]
    assert (1 if name != "RN50" else 0.97) <= counted / (rows * forward_flops(config)) < 1.06


def test_a_trained_group_takes_three_times_its_forward_pass():
    config = model_config("tiny", **runs.MODEL)
    image, text = group_flops(config)["image"], group_flops(config)["text"]
    assert step_flops(config) == 3 * forward_flops(config) == 3 * sum(image) + 3 * sum(text)
    assert step_flops(config, {"image": 0}) == sum(image) + 3 * sum(text)
    assert step_flops(config, {"image": 2}) == sum(image) + 2 * sum(image[-2:]) + 3 * sum(text)
    assert step_flops(config, {"image": 99}) == step_flops(config)
    assert step_flops(config, {"image": 0}, ["image"]) == 3 * sum(text)


def test_utilization_is_the_share_of_the_peak():
    config = model_config("tiny", **runs.MODEL)
    work = runs.workload(batch_size=64, devices=4, frozen=("image",), unlocked_groups=UnlockedGroups(image=1))
    per_pair = step_flops(config, {"image": 1}) + 6 * 64 * config.embed_dim
    assert utilization(work, "NVIDIA H200")(1e6) == pytest.approx(1e6 * per_pair / (4 * 989.4e12))
    assert utilization(work, "cpu")(1e6) is None


PEAKS = {
    "NVIDIA H100 80GB HBM3": 989.4,
    "NVIDIA H100 PCIe": 756,
    "NVIDIA H200 NVL": 835,
    "NVIDIA A10": 125,
    "NVIDIA A100-SXM4-80GB": 312,
    "NVIDIA L40S": 362,
    "NVIDIA L4": 121,
    "Tesla V100-SXM2-32GB": 125,
    "NVIDIA GeForce RTX 4090": 165.2,
    "NVIDIA GeForce RTX 4090 D": None,
    "NVIDIA A10G": None,
    "NVIDIA GeForce RTX 4090 Laptop GPU": None,
    "cpu": None,
}


@pytest.mark.parametrize(("kind", "tflops"), PEAKS.items())
def test_peaks_are_those_of_the_named_gpu(kind, tflops):
    assert peak_flops(kind) == (None if tflops is None else tflops * 1e12)
