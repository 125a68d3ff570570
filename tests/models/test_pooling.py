"""MAP pooling: the formula, its gradient, and that the order of tokens does not matter."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from infcl_jax.models.transformer_config import TransformerConfig
from infcl_jax.models.vit import MapPool

B, T, HEADS, WIDTH = 3, 5, 2, 16
CONFIG = TransformerConfig(width=WIDTH, layers=1, heads=HEADS, norm_epsilon=1e-6)


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


@functools.cache
def parameters():
    shapes = jax.eval_shape(MapPool(CONFIG).init, jax.random.key(0), normal(0, B, T, WIDTH))["params"]
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda s: jnp.asarray(0.3 * rng.standard_normal(s.shape, np.float32)), shapes)


def pool(params, tokens):
    return MapPool(CONFIG).apply({"params": params}, tokens)


def plain_pool(params, tokens):
    """timm's order: project, attend, project, then the residual sum with an MLP of the LayerNorm."""

    def dense(x, layer):
        return x @ layer["kernel"] + layer["bias"]

    def heads(x):
        return x.reshape(*x.shape[:-1], HEADS, WIDTH // HEADS)

    kernels, biases = (jnp.split(params["attn"]["in_proj"][name], 3, axis=-1) for name in ("kernel", "bias"))
    query = heads(params["probe"] @ kernels[0] + biases[0])
    key, value = (heads(tokens @ kernel + bias) for kernel, bias in zip(kernels[1:], biases[1:], strict=True))
    weights = jax.nn.softmax(jnp.einsum("hd,bthd->bht", query, key) / (WIDTH // HEADS) ** 0.5)
    x = dense(jnp.einsum("bht,bthd->bhd", weights, value).reshape(-1, WIDTH), params["attn"]["out_proj"])
    y = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-6)
    hidden = dense(y * params["ln"]["scale"] + params["ln"]["bias"], params["mlp"]["c_fc"])
    return x + dense(jax.nn.gelu(hidden, approximate=False), params["mlp"]["c_proj"])


def test_values_and_gradients_are_those_of_the_formula():
    tokens, weight = normal(0, B, T, WIDTH), normal(2, B, WIDTH)

    def value_and_gradients(function):
        y, pull = jax.vjp(function, parameters(), tokens)
        return y, *pull(weight)

    with jax.numpy_rank_promotion("allow"):
        want = value_and_gradients(plain_pool)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-5), value_and_gradients(pool), want)


def test_the_order_of_tokens_does_not_matter():
    tokens = normal(0, B, T, WIDTH)
    np.testing.assert_allclose(pool(parameters(), tokens), pool(parameters(), tokens[:, ::-1]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("token", range(T))
def test_every_token_matters(token):
    tokens = normal(0, B, T, WIDTH)
    assert not np.allclose(pool(parameters(), tokens), pool(parameters(), tokens.at[:, token].add(1.0)), atol=1e-3)
