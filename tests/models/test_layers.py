"""Gradients written by hand against those that JAX derives from the formulas."""

import functools
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from infcl_jax.models import layers
from infcl_jax.models.transformer_config import TransformerConfig
from infcl_jax.ops import linear
from infcl_jax.ops.bias_activation.api import Activation, activate
from infcl_jax.ops.layer_norm import api

SHAPES = {"x": (5, 7, 12), "kernel": (12, 6), "scale": (12,), "bias": (12,), "short": (6,)}


def plain_norm(x, scale, bias, epsilon=api.LAYER_NORM_EPSILON):
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / jnp.sqrt(variance + epsilon) * scale + bias


LAYERS = {
    "gelu": (lambda *a: activate(*a, "gelu"), lambda x, b: jax.nn.gelu(x + b, approximate=False), ("x", "bias")),
    "gelu_tanh": (lambda *a: activate(*a, "gelu_tanh"), lambda x, b: jax.nn.gelu(x + b), ("x", "bias")),
    "quick_gelu": (
        lambda *a: activate(*a, "quick_gelu"),
        lambda x, b: (x + b) * jax.nn.sigmoid(1.702 * (x + b)),
        ("x", "bias"),
    ),
    "layer norm": (lambda *a: api.normalize(*a, a[0].dtype), plain_norm, ("x", "scale", "bias")),
    "layer norm with another epsilon": (
        lambda *a: api.normalize(*a, a[0].dtype, None, 0.5),
        functools.partial(plain_norm, epsilon=0.5),
        ("x", "scale", "bias"),
    ),
    "affine": (
        lambda x, *arrays: jnp.subtract(*linear.affine(x, arrays[:2], arrays[2:])),
        lambda x, one, other, first, second: x @ (one - other) + first - second,
        ("x", "kernel", "kernel", "short", "short"),
    ),
    "a sum with a bias": (
        lambda x, b: linear.route_gradient(x + lax.stop_gradient(api.broadcast_vector(b, x)).astype(x.dtype), b),
        jnp.add,
        ("x", "bias"),
    ),
    "a contraction": (
        lambda x, k: linear.contract("btw,wh->bht", x, k),
        lambda x, k: jnp.swapaxes(x @ k, 1, 2),
        ("x", "kernel"),
    ),
    "affine without bias": (lambda x, w: linear.affine(x, (w,), (None,))[0], jnp.matmul, ("x", "kernel")),
}


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 3e-2)])
@pytest.mark.parametrize("name", LAYERS)
def test_values_and_gradients_are_those_of_the_formula(name, dtype, tolerance):
    layer, formula, names = LAYERS[name]
    rng = np.random.default_rng(0)
    x, *others = (jnp.asarray(2 * rng.standard_normal(SHAPES[n]), jnp.float32) for n in names)
    x = x.astype(dtype)
    with jax.numpy_rank_promotion("allow"):
        want, pull = jax.vjp(formula, x.astype(jnp.float32), *others)
        weight = jnp.asarray(rng.standard_normal(want.shape), jnp.float32)
        expected = want, *pull(weight)
    got, pull = jax.vjp(layer, x, *others)
    outputs = got, *pull(weight.astype(got.dtype))
    assert [a.dtype for a in outputs] == [x.dtype, x.dtype, *(a.dtype for a in others)]
    for ours, theirs in zip(outputs, expected, strict=True):
        scale = float(jnp.abs(theirs).max())
        np.testing.assert_allclose(ours.astype(jnp.float32), theirs, rtol=0, atol=tolerance * scale)


def test_quick_gelu_is_close_to_gelu():
    x = jnp.linspace(-5, 5, 101)
    outputs = activate(x, jnp.zeros(x.shape), "quick_gelu")
    np.testing.assert_allclose(outputs, jax.nn.gelu(x, approximate=False), atol=0.021)
    assert not np.allclose(outputs, jax.nn.gelu(x, approximate=False), atol=0.01)


@pytest.mark.parametrize("activation", get_args(Activation))
def test_a_dense_layer_can_be_activated(activation):
    x = jnp.asarray(np.random.default_rng(0).standard_normal((4, 12)), jnp.float32)
    dense = layers.Dense(TransformerConfig(width=12, layers=1, heads=1), 6, 1.0)
    variables = jax.tree.map(lambda a: a + 0.5, dense.init(jax.random.key(0), 12, method="weights"))
    kernel, bias = variables["params"]["kernel"], variables["params"]["bias"]
    outputs = dense.apply(variables, x, activation, method="activated")
    np.testing.assert_allclose(outputs, activate(x @ kernel, bias, activation), rtol=1e-5)


def drop(index, rate=0.3, seed=0, width=257, dtype=jnp.float32, impl=None):
    ones, rngs = jnp.ones((len(index), width), dtype), {"dropout": jax.random.key(seed, impl=impl)}
    return layers.TokenDropout(rate).apply({}, ones, jnp.asarray(index), True, rngs=rngs)


@pytest.mark.parametrize(("rate", "dtype"), [(0.1, "float32"), (0.3, "bfloat16")])
def test_dropout_keeps_its_rate_the_mean_and_the_dtype(rate, dtype):
    y = drop(np.arange(1000), rate, dtype=dtype)
    assert y.dtype == dtype
    kept = np.asarray(y != 0)
    deviation = (rate * (1 - rate) / kept.size) ** 0.5
    assert abs(kept.mean() - (1 - rate)) < 4 * deviation + 2**-16
    np.testing.assert_allclose(y.astype(jnp.float32)[kept], 1 / (1 - rate), rtol=float(jnp.finfo(dtype).eps) + 2**-15)
    assert np.isfinite(drop(np.arange(9), 1 - 1e-6, dtype=dtype)).all()


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_dropout_depends_on_the_index_of_a_token_and_the_key(impl):
    order = np.random.default_rng(0).permutation(50)
    first, second = (drop(np.arange(50), seed=seed, impl=impl) for seed in range(2))
    np.testing.assert_array_equal(drop(order, impl=impl), first[order])
    masks = np.concatenate([first, second])
    assert len(np.unique(masks, axis=0)) == 100


@pytest.mark.parametrize(("rate", "train"), [(0.0, True), (0.3, False)])
def test_no_dropout_needs_no_rng(rate, train):
    x = jnp.ones((2, 3))
    assert layers.TokenDropout(rate).apply({}, x, jnp.arange(2), train) is x
