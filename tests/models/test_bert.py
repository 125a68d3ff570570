"""The BERT tower: the formula, padding, pools, projections, RoBERTa's positions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from towers import random_variables

from infcl_jax.models import Bert, BertConfig, model_config
from infcl_jax.models.transformer_config import TransformerConfig

B, T, HEADS, WIDTH, VOCAB, PAD = 3, 7, 2, 16, 20, 0
LENGTHS = (7, 4, 1)


def tower(remat=None, dropout=0.0, **changes):
    config = TransformerConfig(width=WIDTH, layers=2, heads=HEADS, norm_epsilon=1e-12, remat=remat, dropout=dropout)
    shape = {"embed_dim": 6, "vocab_size": VOCAB, "context_length": T, "max_positions": 12}
    return Bert(**({"config": config} | shape | changes))


def texts(pad=PAD, seed=0):
    tokens = np.random.default_rng(seed).integers(2, VOCAB, (B, T), dtype=np.int32)
    return jnp.asarray(np.where(np.arange(T) < np.asarray(LENGTHS)[:, None], tokens, pad).astype(np.int32))


@functools.cache
def parameters(**changes):
    return random_variables(tower(**changes), texts(), scale=0.3)["params"]


def encode(tokens, **changes):
    return tower(**changes).apply({"params": parameters(**changes)}, tokens)


def plain_bert(params, tokens):
    """Sums of three embeddings, post-LayerNorm blocks, mean over the tokens before the padding, MLP projection."""

    def dense(x, layer):
        return x @ layer["kernel"] + layer.get("bias", 0.0)

    def norm(x, layer):
        return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True)) * layer["scale"] + layer["bias"]

    is_token = tokens != PAD
    x = params["token_embedding"][tokens] + params["positional_embedding"][:T] + params["token_type_embedding"][0]
    x = norm(x, params["ln_embed"])
    for block in params["transformer"].values():
        qkv = jnp.split(dense(x, block["attn"]["in_proj"]), 3, axis=-1)
        query, key, value = (a.reshape(B, T, HEADS, WIDTH // HEADS) for a in qkv)
        scores = jnp.einsum("bthd,bshd->bhts", query, key) / (WIDTH // HEADS) ** 0.5
        weights = jax.nn.softmax(jnp.where(is_token[:, None, None], scores, -jnp.inf))
        attended = jnp.einsum("bhts,bshd->bthd", weights, value).reshape(B, T, WIDTH)
        x = norm(x + dense(attended, block["attn"]["out_proj"]), block["ln_1"])
        hidden = jax.nn.gelu(dense(x, block["mlp"]["c_fc"]), approximate=False)
        x = norm(x + dense(hidden, block["mlp"]["c_proj"]), block["ln_2"])
    pooled = jnp.stack([row[:length].mean(0) for row, length in zip(x, LENGTHS, strict=True)])
    projection = params["text_projection"]
    return dense(jax.nn.gelu(dense(pooled, projection["fc1"]), approximate=False), projection["fc2"])


@pytest.mark.parametrize("remat", [None, "full", "dots"])
def test_values_and_gradients_are_those_of_the_formula(remat):
    params, weight = parameters(), jnp.asarray(np.random.default_rng(2).standard_normal((B, 6), np.float32))

    def value_and_gradients(function):
        y, pull = jax.vjp(function, params)
        return y, *pull(weight)

    with jax.numpy_rank_promotion("allow"):
        want = jax.jit(lambda: value_and_gradients(lambda params: plain_bert(params, texts())))()
    outputs = jax.jit(lambda: value_and_gradients(lambda p: tower(remat).apply({"params": p}, texts())))()
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=5e-4, atol=5e-5), outputs, want)


@pytest.mark.parametrize("pool", ["cls", "pooler", "mean"])
def test_padding_does_not_matter(pool):
    short, full = texts()[1:, :4], texts()[1:]
    np.testing.assert_allclose(encode(short, pool=pool), encode(full, pool=pool), rtol=1e-5, atol=1e-5)


def test_the_pooler_is_a_dense_layer_with_tanh_on_the_first_states():
    params = parameters(pool="pooler", projection="none", embed_dim=WIDTH)
    states = tower(pool="cls", projection="none", embed_dim=WIDTH).apply({"params": params}, texts())
    want = jnp.tanh(states @ params["pooler"]["kernel"] + params["pooler"]["bias"][None])
    outputs = encode(texts(), pool="pooler", projection="none", embed_dim=WIDTH)
    np.testing.assert_allclose(outputs, want, rtol=1e-5, atol=1e-5)


def test_a_linear_projection_is_one_matrix():
    states = encode(texts(), projection="none", embed_dim=WIDTH)
    params = parameters(projection="none", embed_dim=WIDTH)
    kernel = jnp.ones((WIDTH, 6))
    outputs = tower(projection="linear").apply({"params": params | {"text_projection": {"kernel": kernel}}}, texts())
    np.testing.assert_allclose(outputs, states @ kernel, rtol=1e-5, atol=1e-5)


def test_roberta_counts_positions_from_an_offset():
    params = parameters()
    rolled = params | {"positional_embedding": jnp.roll(params["positional_embedding"], 2, axis=0)}
    shifted = tower(position_offset=2, pad_id=1).apply({"params": rolled}, texts(pad=1))
    np.testing.assert_allclose(shifted, encode(texts()), rtol=1e-5, atol=1e-6)


def test_a_text_of_padding_alone_is_finite():
    assert np.isfinite(encode(jnp.full((1, T), PAD, jnp.int32))).all()


def test_dropout_is_seeded_and_only_in_training():
    module, variables = tower(dropout=0.5), {"params": parameters()}
    train = jax.jit(lambda seed: module.apply(variables, texts(), train=True, rngs={"dropout": jax.random.key(seed)}))
    np.testing.assert_array_equal(train(0), train(0))
    assert not np.allclose(train(0), train(1), atol=1e-3)
    np.testing.assert_array_equal(module.apply(variables, texts()), encode(texts()))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"text.context_length": 513}, "expected text.context_length of at most 512 positions, got 513"),
        ({"text.pool": "max"}, r"expected text.pool to be one of \('cls', 'pooler', 'mean'\), got 'max'"),
        (
            {"text.projection": "none"},
            "text.width to be embed_dim with text.projection 'none', got 768 and 512",
        ),
        ({"text.attention": "cudnn"}, r"expected text.attention to be one of \(None, 'xla'\), got 'cudnn'"),
        ({"text.layer_scale": 0.1}, "expected no text.layer_scale"),
        ({"text.pad_id": 30522}, r"expected text.pad_id in \[0, 30522\) .*, got 30522"),
    ],
)
def test_bad_configs(overrides, message):
    with pytest.raises(ValueError, match=message):
        model_config("bert-ViT-B-32", **overrides)


def test_the_defaults_are_those_of_bert_base():
    assert model_config("bert-ViT-B-32").text == BertConfig(width=768, layers=12, heads=12, activation="gelu")
