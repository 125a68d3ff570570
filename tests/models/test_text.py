"""The text tower: causality, pooling at the end token, embeddings."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from towers import random_variables

from infcl_jax.models.layers import take_positions
from infcl_jax.models.text import TextTransformer, end_position
from infcl_jax.models.transformer_config import TransformerConfig

VOCAB, CONTEXT, WIDTH = 20, 10, 16
END = VOCAB - 1


def tower(dtype="float32"):
    config = TransformerConfig(width=WIDTH, layers=1, heads=2, causal=True, dtype=dtype)
    return TextTransformer(config=config, embed_dim=8, vocab_size=VOCAB, context_length=CONTEXT)


def captions(n=4, end=5, seed=0):
    """Random tokens with the end token at `end`."""
    tokens = np.random.default_rng(seed).integers(1, END, (n, CONTEXT), dtype=np.int32)
    tokens[:, end] = END
    return tokens


@functools.cache
def variables():
    return random_variables(tower(), captions())


@functools.cache
def encode():
    return jax.jit(functools.partial(tower().apply, variables()))


def test_shorter_batches_give_the_same_features():
    tokens = captions()
    np.testing.assert_allclose(encode()(tokens), encode()(tokens[:, :6]), rtol=1e-5, atol=1e-5)


def test_pool_takes_the_first_largest_id():
    tokens = np.array([[1, 9, 0], [9, 2, 9], [3, 4, 9]], np.int32)
    states = jnp.arange(9, dtype=jnp.float32).reshape(3, 3, 1)
    np.testing.assert_array_equal(take_positions(states, end_position(tokens))[:, 0], [1, 3, 8])


def test_pool_takes_the_first_end_token():
    tokens = np.array([[7, 9, 1, 1], [1, 9, 9, 9], [9, 8, 7, 6]], np.int32)  # SigLIP's end token also pads
    np.testing.assert_array_equal(end_position(tokens, end_token=1), [2, 0, 0])


def test_tokens_after_a_chosen_end_token_do_not_matter():
    module = tower().clone(end_token=3)
    tokens = np.random.default_rng(1).integers(4, VOCAB, (2, CONTEXT), dtype=np.int32)
    tokens[:, 4] = 3
    other = tokens.copy()
    other[:, 5:] = 3
    apply = jax.jit(module.apply)
    features = [apply(variables(), ids) for ids in (tokens, other)]
    np.testing.assert_array_equal(*features)
    assert not np.isclose(features[0], encode()(tokens)).all(axis=1).any()


@pytest.mark.parametrize(("pool", "position"), [("end", 5), ("first", 0), ("last", CONTEXT - 1)])
@pytest.mark.parametrize("causal", [False, True])
def test_a_tower_sees_the_positions_before_its_pool_or_all(pool, position, causal):
    module = tower().clone(pool=pool, config=dataclasses.replace(tower().config, causal=causal))
    apply, tokens = jax.jit(module.apply), captions()
    before = apply(variables(), tokens)
    for other in sorted(set(range(CONTEXT)) - {5}):  # not the end token
        changed = tokens.copy()
        changed[:, other] = tokens[:, other] % (END - 1) + 1
        is_same = np.isclose(before, apply(variables(), changed), rtol=1e-3, atol=1e-5).all()
        assert is_same == (causal and other > position), other


def test_projections():
    params = variables()["params"]
    states = jax.jit(tower().clone(projection="none", embed_dim=WIDTH).apply)(variables(), captions())
    biased = params | {"text_projection": params["text_projection"] | {"bias": jnp.arange(8.0)}}
    outputs = jax.jit(tower().clone(projection_bias=True).apply)({"params": biased}, captions())
    want = states @ params["text_projection"]["kernel"] + jnp.arange(8.0)[None]
    np.testing.assert_allclose(outputs, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("token", [VOCAB, VOCAB + 100])
def test_a_token_outside_the_vocabulary_is_loud(token):
    tokens = captions()
    tokens[0, 2] = token
    features = encode()(tokens)
    assert np.isnan(features[0]).all() and np.isfinite(features[1:]).all()


def test_embedding_gradients_sum_in_float32():
    """1024 equal captions give 1024 times the gradient of one.

    A bfloat16 sum stalls after 256 equal terms.
    """

    @jax.jit
    def gradient(tokens):
        def loss(variables):
            return jnp.sum(tower("bfloat16").apply(variables, tokens)[:, 0])

        return jax.grad(loss)(variables())["params"]

    one = captions(n=1)
    few, many = gradient(one), gradient(np.repeat(one, 1024, axis=0))
    for name in ("token_embedding", "positional_embedding"):
        want = np.asarray(few[name])
        assert np.abs(want).max() > 0
        np.testing.assert_allclose(many[name] / 1024, want, rtol=1e-2, atol=1e-2 * np.abs(want).max(), err_msg=name)


def test_initial_embeddings_have_the_papers_scales():
    params = jax.jit(tower().init)(jax.random.key(0), captions())["params"]
    assert np.std(params["token_embedding"]) == pytest.approx(0.02, rel=0.15)
    assert np.std(params["positional_embedding"]) == pytest.approx(0.01, rel=0.2)
    assert np.std(params["text_projection"]["kernel"]) == pytest.approx(WIDTH**-0.5, rel=0.25)
