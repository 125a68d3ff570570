"""Hopper kernels are lowered at the shapes of models of every size."""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from gpus import ALONE, count_kernels, lowered

from infcl_jax import clip_loss
from infcl_jax.models import create_model
from infcl_jax.models.registry import model_config
from infcl_jax.models.resnet import ResNetConfig
from infcl_jax.ops.attention import pallas_mosaic_gpu as attention
from infcl_jax.ops.bias_activation import pallas_mosaic_gpu as bias_activation
from infcl_jax.ops.layer_norm import pallas_mosaic_gpu as layer_norm

BATCH = 1024
MODULES = {"attention": attention, "bias_activation": bias_activation, "layer_norm": layer_norm}
# Ops of each model with kernels.
OPS = {
    # Heads of 32 channels and widths of 64 and 96 have none.
    **{key: {"bias_activation"} for key in ("tiny", "tiny-shapes")},
    **{key: set(MODULES) for key in ("ViT-S-16", "ViT-B-32", "ViT-B-16", "ViT-L-14", "RN50")},
    "ViT-B-16-SigLIP2": set(MODULES),
    "ViT-H-14": set(MODULES),  # heads of 80 channels have none, those of the text tower do
    "ViT-SO400M-14-SigLIP": {"layer_norm"},  # heads of 72 channels, 4304 hidden units
}


@dataclasses.dataclass(frozen=True)
class Launch:
    """One call of a kernel, without its values."""

    op: str
    kernel: Callable
    operands: tuple[jax.ShapeDtypeStruct | None, ...]
    settings: tuple[tuple[str, Any], ...]


@pytest.fixture
def launches(monkeypatch):
    """Kernels that are traced."""
    traced = set()

    def record(op, kernel, *operands, **settings):
        shapes = (None if a is None else jax.ShapeDtypeStruct(a.shape, a.dtype) for a in operands)
        traced.add(Launch(op, kernel, tuple(shapes), tuple(settings.items())))
        return kernel(*operands, **settings)

    for op, module in MODULES.items():
        for direction in ("forward", "backward"):
            recorded = functools.partial(record, op, getattr(module, direction))
            monkeypatch.setattr(module, direction, recorded)
    return traced


def trace_gradients(name, dtype):
    """Trace a training step's gradients for one GPU.

    Two blocks have every shape. The last one computes one token of each sequence.
    """
    config = model_config(name)
    is_resnet = isinstance(config.vision, ResNetConfig)
    layers = {"text.layers": 2, "vision.layers": (1, 1, 1, 1) if is_resnet else 2}
    model = create_model(name, dtype=dtype, **layers)
    size, length = config.vision.image_size, config.text.context_length

    def inputs(batch):
        return jnp.zeros((batch, size, size, 3), jnp.uint8), jnp.zeros((batch, length), jnp.int32)

    def gradients():
        variables = model.init(jax.random.key(0), *inputs(1))
        with jax.sharding.use_abstract_mesh(ALONE):
            _, pull = jax.vjp(lambda variables: model.apply(variables, *inputs(BATCH)), variables)
        return pull

    with jax.numpy_dtype_promotion("standard"):  # JAX's attention in the ResNet promotes
        jax.eval_shape(gradients)


@functools.cache
def count_lowered(launch):
    settings = dict(launch.settings)
    return count_kernels(lowered(jax.jit(functools.partial(launch.kernel, **settings)), *launch.operands))


@pytest.mark.parametrize(
    ("name", "dtype"),
    # The layouts of fp16 are those of bf16. In fp32 only LayerNorm has kernels. Heads of 64, 80 and 72 channels.
    [
        *((name, "bfloat16") for name in ("tiny", "ViT-B-32", "RN50", "ViT-H-14", "ViT-SO400M-14-SigLIP")),
        *((name, "float32") for name in ("ViT-B-16", "ViT-SO400M-14-SigLIP")),
        *(
            pytest.param(name, dtype, marks=pytest.mark.full)
            for name, dtype in itertools.product(OPS, ["bfloat16", "float16", "float32"])
        ),
    ],
)
def test_kernels_lower_at_the_shapes_of_a_model(launches, name, dtype):
    trace_gradients(name, dtype)
    with_kernels = OPS[name]
    if dtype == "float32":  # the other ops run in XLA
        with_kernels = with_kernels & {"layer_norm"}
    assert {launch.op for launch in launches} == with_kernels
    for launch in launches:
        assert count_lowered(launch) == 1


SIZES = sorted({model_config(name).embed_dim for name in OPS})


@pytest.mark.parametrize(
    ("size", "dtype"),
    # Other sizes in fp16 and fp32 are in pairwise/lse/test_mosaic.py.
    [
        (768, "float16"),
        *(pytest.param(n, "bfloat16", marks=pytest.mark.full) for n in SIZES),
    ],
)
def test_loss_lowers_at_the_feature_sizes_of_the_models(size, dtype):
    features, scale = jax.ShapeDtypeStruct((4 * BATCH, size), dtype), jax.ShapeDtypeStruct((), jnp.float32)
    loss = functools.partial(clip_loss, implementation="mosaic_gpu")
    with jax.sharding.use_abstract_mesh(ALONE):
        # Sums, maxima, positives and dS; sums and dS also with a shared scale.
        assert count_kernels(lowered(jax.jit(jax.value_and_grad(loss, (0, 1, 2))), features, features, scale)) == 6
