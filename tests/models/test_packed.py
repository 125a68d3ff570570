"""Packed texts: the features and gradients of padded ones, for any tower that ignores padding, devices and chunks."""

import functools
import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import runs
from jax.sharding import NamedSharding, PartitionSpec
from towers import random_variables

from experiments.benchmarks.step_pairs import draw_lengths
from infcl_jax.data.packing import Packing
from infcl_jax.models import Bert, TextTransformer, create_model
from infcl_jax.models.transformer_config import TransformerConfig
from infcl_jax.ops.packing import PackedTokens

B, T, ROW, VOCAB = 16, 12, 24, 30
RAGGED = np.random.default_rng(0).integers(1, T + 1, B)
LENGTHS = {
    "ragged": RAGGED,
    "all full": np.full(B, T),
    "all empty": np.ones(B, int),
    "one long": np.where(np.arange(B) == 3, T, 1),
    "full rows": np.tile([T, T // 2, T // 2], B)[:B],
}
TOWERS = {
    "CLIP": functools.partial(TextTransformer, context_length=T, end_token=VOCAB - 1),
    "CLIP by the largest id": functools.partial(TextTransformer, context_length=T),
    **{f"BERT {pool}": functools.partial(Bert, context_length=T, pool=pool) for pool in ("cls", "pooler", "mean")},
}


def tower(name, **changes):
    causal = name.startswith("CLIP")
    config = TransformerConfig(**({"width": 16, "layers": 2, "heads": 2, "causal": causal} | changes))
    return TOWERS[name](config, embed_dim=6, vocab_size=VOCAB)


def texts(lengths):
    """Texts that end with the largest id, after which CLIP's tokenizer pads with zeros."""
    tokens = np.random.default_rng(1).integers(2, VOCAB - 1, (B, T)).astype(np.int32)
    step = np.arange(T)
    tokens[step == lengths[:, None] - 1] = VOCAB - 1
    return np.where(step < lengths[:, None], tokens, 0).astype(np.int32)


@functools.cache
def value_and_gradients(name, devices, **changes):
    """Features of a tower, and the gradients of a weighted sum of them, as a compiled function of the texts."""
    model, mesh = tower(name, **changes), oracle.mesh_of(devices)
    params = random_variables(model, texts(RAGGED), scale=0.3)["params"]
    weight = np.random.default_rng(2).standard_normal((B, 6)).astype(np.float32)

    def weighted(params, tokens):
        rngs = {"dropout": jax.random.key(3)}
        features = model.apply({"params": params}, tokens, train=True, rngs=rngs)
        return jnp.sum(features * weight), features

    @jax.jit
    def run(tokens):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            (_, features), gradients = jax.value_and_grad(weighted, has_aux=True)(params, tokens)
        return features, gradients

    return lambda tokens: jax.device_get(run(jax.device_put(tokens, NamedSharding(mesh, PartitionSpec("data")))))


def assert_close(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert oracle.relative_error(a, b) < 2e-6


@pytest.mark.parametrize(
    ("name", "devices", "changes"),
    [
        ("CLIP", 1, {}),
        pytest.param("CLIP", 4, {"remat": "dots"}, marks=pytest.mark.slow),
        ("BERT mean", 8, {}),
        ("BERT cls", 1, {"remat": "full"}),
        pytest.param("CLIP by the largest id", 1, {}, marks=pytest.mark.full),
        pytest.param("BERT pooler", 1, {}, marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_features_and_gradients_are_those_of_padded_texts(name, devices, changes, lengths):
    tokens, block = texts(lengths), B // devices
    packed = Packing(ROW, rows=block, shard=block).pack(tokens, tower(name).lengths(tokens), block)
    run = value_and_gradients(name, devices, **changes)
    assert_close(run(packed), run(tokens))


@pytest.mark.parametrize(
    ("name", "devices", "remat"),
    [
        ("CLIP", 1, "dots"),
        ("CLIP", 8, None),
        pytest.param("CLIP", 4, "full", marks=pytest.mark.slow),
        ("BERT mean", 4, None),
        ("BERT cls", 8, "full"),
    ],
)
def test_dropout_is_that_of_padded_texts_on_one_device(name, devices, remat):
    tokens, block = texts(RAGGED), B // devices
    packed = Packing(ROW, rows=block, shard=block).pack(tokens, RAGGED, block)
    want = value_and_gradients(name, 1, dropout=0.3)(tokens)
    assert_close(value_and_gradients(name, devices, dropout=0.3, remat=remat)(packed), want)


def test_equal_texts_have_different_masks():
    tokens = np.repeat(texts(RAGGED)[:1], B, axis=0)
    packed = Packing(ROW, rows=B, shard=B).pack(tokens, np.full(B, RAGGED[0]), B)
    features, _ = value_and_gradients("CLIP", 1, dropout=0.3)(packed)
    assert len(np.unique(features, axis=0)) == B


@pytest.mark.slow
def test_in_float64_packed_texts_are_padded_ones():
    path = os.pathsep.join(str(Path(__file__).parents[1] / folder) for folder in (".", "models"))
    environ = {"PYTHONPATH": path, "JAX_NUMPY_DTYPE_PROMOTION": "standard"}
    finished = runs.finish(runs.start("tests.models.packed_float64", "1", "8", **environ))[0]
    assert finished.returncode == 0, finished.stderr
    errors = json.loads(finished.stdout)
    assert len(errors) == 2 * len(TOWERS)
    assert max(error for by_texts in errors.values() for error in by_texts.values()) < 1e-12


@pytest.mark.parametrize(("planned", "used"), [(1, 4), (4, 1), (8, 4)])
@pytest.mark.parametrize("row_length", [T, ROW])
def test_with_a_plan_for_other_shards_features_are_nan_or_right(planned, used, row_length):
    block, run = B // planned, value_and_gradients("CLIP", used)
    packed = Packing(row_length, rows=block, shard=block).pack(texts(RAGGED), RAGGED, block)
    features, right = run(packed)[0], run(texts(RAGGED))[0]
    wrong = np.isnan(features).all(1)
    assert wrong.any()
    np.testing.assert_allclose(features[~wrong], right[~wrong], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", TOWERS)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_a_tower_counts_the_tokens_before_the_padding(name, lengths):
    np.testing.assert_array_equal(tower(name).lengths(texts(lengths)), lengths)


def test_a_text_of_bert_with_padding_inside_is_not_packed():
    tokens = texts(RAGGED)
    tokens[3, :4] = 5, 0, 6, 7
    tokens[5] = 0
    lengths = tower("BERT mean").lengths(tokens)
    assert lengths[3] == 0 and lengths[5] == 1
    assert Packing(ROW, rows=B, shard=B).pack(tokens, lengths, B) is None


def test_a_text_without_end_token_has_the_feature_of_its_first_token():
    tokens = np.full((B, T), 5, np.int32)
    counted = tower("CLIP").lengths(tokens)
    assert counted.tolist() == [1] * B
    packed = Packing(ROW, rows=1, shard=B).pack(tokens, counted, B)
    run = value_and_gradients("CLIP", 1)
    assert_close(run(packed), run(tokens))


def test_web_captions_take_three_tenths_of_the_flops():
    """Counts the FLOPs of the lowered text tower of ViT-B/32 and its gradients, 4,096 captions."""
    model, b = create_model("ViT-B/32").text, 4096
    packing = Packing.of(draw_lengths("laion", 20_000, model.context_length), b)
    tokens, vector = jax.ShapeDtypeStruct((b, model.context_length), jnp.int32), jax.ShapeDtypeStruct((b,), jnp.int32)
    packed = PackedTokens(tokens, vector, vector, vector, packing.row_length, packing.rows, packing.shard)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)
    gradients = jax.jit(jax.grad(lambda params, tokens: model.apply(params, tokens).sum()))
    flops = [gradients.lower(params, texts).cost_analysis()["flops"] for texts in (packed, tokens)]
    assert flops[0] / flops[1] < 0.31


def test_a_tower_that_attends_to_padding_refuses_packed_texts():
    packed = Packing(ROW, rows=B, shard=B).pack(texts(RAGGED), RAGGED, B)
    with pytest.raises(ValueError, match="expected padded texts, since this tower attends to padding, got packed ones"):
        tower("CLIP", causal=False).init(jax.random.key(0), packed)
