"""Packed texts of inference: features of padded ones, few shapes, agreed by processes."""

import functools
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import runs
from coordination import Service
from hypothesis import given
from hypothesis import strategies as st
from towers import random_variables

from infcl_jax.data import ByteTokenizer
from infcl_jax.evaluation import class_embeddings, encode_split
from infcl_jax.inference.features import TowerEncoder, encode_texts
from infcl_jax.inference.text_batches import agreed_batches, text_batches
from infcl_jax.models import build_model, text_pair_config
from infcl_jax.ops.packing import PackedTokens
from infcl_jax.runtime import processes
from infcl_jax.runtime.mesh import replicate

LENGTH, BATCH = 64, 32
MESH = oracle.mesh_of(1)
TOKENIZER = ByteTokenizer(LENGTH, "none")
TEXTS = {
    "one": ["a photo of a cat"],
    "few": ["a cat", "a photo of a dog", "a cat"],
    "prompts": [f"a {'big ' * (i % 4)}photo of number {i}" for i in range(100)],
    "all full": ["word " * 20 + str(i) for i in range(40)],
    "mixed": ["x" * (i * i % 70) for i in range(150)],
    "empty": [""] * 40 + ["a", ""],
}


@functools.cache
def encoder(name):
    """Encoder of texts by a model, and its variables."""
    if name == "CLIP":
        model = runs.model(**{"text.context_length": LENGTH})
        inputs, method = (runs.batch(1)["image"], runs.batch(1)["text"]), "encode_text"
    else:
        model, inputs, method = build_model(text_pair_config("bert-tiny")), (np.ones((1, 8), np.int32),) * 2, name
    return TowerEncoder(model, method), random_variables(model, *inputs)


@functools.cache
def padded(name):
    """Encoder by a model as a plain function, which gets padded texts."""
    return lambda variables, tokens: encoder(name)[0](variables, tokens)


def tower(name="CLIP"):
    return encoder(name)[0].packable_tower


@pytest.mark.parametrize("name", ["CLIP", "encode_query", "encode_passage"])
@pytest.mark.parametrize("devices", [1, 4, 8])
@pytest.mark.parametrize("texts", TEXTS.values(), ids=TEXTS)
def test_features_are_those_of_padded_texts(name, devices, texts):
    packed, variables = encoder(name)
    arguments = replicate(oracle.mesh_of(devices), variables), TOKENIZER, texts, oracle.mesh_of(devices), BATCH
    got, expected = (encode_texts(encode, *arguments) for encode in (packed, padded(name)))
    assert oracle.relative_error(got, expected) < 2e-6


def of_lengths(lengths, rows=BATCH):
    """Token ids of texts of these lengths, different ones, `rows` at a time."""
    lengths, step = np.array(lengths, int).reshape(-1, 1), np.arange(LENGTH)
    tokens = np.where(step < lengths - 1, 1 + np.arange(len(lengths))[:, None] // 100 ** (step % 2) % 100, 0)
    tokens = np.where(step == lengths - 1, 258, tokens).astype(np.int32)
    return [tokens[start : start + rows] for start in range(0, len(tokens), rows)]


def texts_of(batches):
    """Token ids of the texts of batches."""
    return np.concatenate([getattr(inputs, "tokens", inputs)[is_text] for inputs, is_text in batches])


def shape(inputs):
    return jax.tree.structure(inputs), *(leaf.shape for leaf in jax.tree.leaves(inputs))


@given(st.lists(st.integers(1, LENGTH), min_size=1, max_size=300), st.sampled_from([1, 2, 8]))
def test_every_text_comes_once_in_order(lengths, devices):
    stream = of_lengths(lengths)
    batches = list(text_batches(tower(), iter(stream), BATCH, devices))
    np.testing.assert_array_equal(texts_of(batches), np.concatenate(stream))
    assert len({shape(inputs) for inputs, _ in batches}) == 1
    for inputs, _ in batches:
        packed = isinstance(inputs, PackedTokens)
        computed = devices * inputs.rows * inputs.row_length if packed else inputs.size
        assert computed <= BATCH * LENGTH


@pytest.mark.parametrize("devices", [1, 8])
def test_sets_of_texts_share_few_shapes(devices):
    """Shapes are powers of two up to a batch, packed, and a padded one."""
    shapes, rng = set(), np.random.default_rng(0)
    for seed in range(20):
        lengths = rng.integers(1, 2 + LENGTH * (seed % 5 + 1) // 5, rng.integers(BATCH // 2 + 1, 1000)).clip(max=LENGTH)
        batches = list(text_batches(tower(), iter(of_lengths(lengths)), BATCH, devices))
        shapes |= {shape(inputs) for inputs, _ in batches}
        if lengths.mean() < LENGTH / 3:
            assert all(isinstance(inputs, PackedTokens) for inputs, _ in batches)
            assert len(batches) < len(lengths) / BATCH / 2 + 2
    assert len(shapes) <= 2 + np.log2(BATCH // devices)


def test_full_texts_and_towers_that_may_attend_to_padding_stay_padded():
    siglip = runs.model(**{"text.causal": False, "text.pool": "last"})
    assert TowerEncoder(siglip, "encode_text").packable_tower is None
    assert TowerEncoder(runs.Linear(), "encode_text").packable_tower is None
    for encoder_tower, lengths in ((None, [3] * 200), (tower(), [LENGTH] * 200)):
        batches = text_batches(encoder_tower, iter(of_lengths(lengths)), BATCH, 1)
        assert all(inputs.shape == (BATCH, LENGTH) for inputs, _ in batches)


def test_texts_with_padding_inside_have_the_features_of_padded_ones():
    packed, variables = encoder("encode_query")
    tokens = np.concatenate(of_lengths(np.arange(2, 62)))
    tokens[7, 1] = 0  # padding
    arguments = variables, lambda texts: tokens[[int(text) for text in texts]], [*map(str, range(60))], MESH, BATCH
    got, expected = (encode_texts(encode, *arguments) for encode in (packed, padded("encode_query")))
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["CLIP", "encode_query"])
def test_an_unknown_id_spoils_its_own_text_alone(name):
    packed, variables = encoder(name)
    (tokens,) = of_lengths(np.arange(2, 42), rows=40)
    tokens[[7, 30], 1] = 300
    tokens[9] = 5  # has no end token
    arguments = variables, lambda texts: tokens, [*map(str, range(40))], MESH, 40
    got, expected = (encode_texts(encode, *arguments) for encode in (packed, padded(name)))
    assert np.isnan(expected).any(1).nonzero()[0].tolist() == [7, 30]
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)


@pytest.fixture
def agreed(monkeypatch):
    """Function from the token ids of each process to its batches."""

    def run(tokens, devices=1):
        own = {}
        monkeypatch.setattr(processes, "channel", lambda: own[threading.get_ident()])

        def process(channel, tokens):
            own[threading.get_ident()] = channel
            return list(agreed_batches(tower(), tokens, BATCH, devices))

        with ThreadPoolExecutor(len(tokens)) as threads:
            return list(threads.map(process, Service(len(tokens)).channels(), tokens))

    return run


@pytest.mark.parametrize(
    ("lengths", "packed"),
    [
        (([9] * 200, [20] * 130), True),
        (([9] * 200, []), True),
        (([9] * 40, [LENGTH] * 200), False),
        (([9], [9]), False),  # one batch anyway
        (([], []), False),
    ],
)
def test_processes_agree_on_number_and_shape(agreed, lengths, packed):
    tokens = [np.concatenate([np.zeros((0, LENGTH), np.int32), *of_lengths(own)]) for own in lengths]
    batches = agreed(tokens)
    assert len({len(own) for own in batches}) == 1
    assert len({shape(inputs) for own in batches for inputs, _ in own}) <= 1
    assert all(isinstance(inputs, PackedTokens) == packed for own in batches for inputs, _ in own)
    for own, expected in zip(batches, tokens, strict=True):
        np.testing.assert_array_equal(texts_of(own) if own else expected, expected)


def encode_captions(encode_text, texts, devices):
    """Features of captions, five of each image."""
    encode, variables = encoder("CLIP")
    mesh, images, tokens = oracle.mesh_of(devices), len(texts) // 5, TOKENIZER(texts)
    batch = runs.batch(images) | {"label": np.zeros(images, np.int32), "index": np.arange(images)}
    batch |= {"mask": np.ones(images, bool), "text": tokens, "text_index": np.repeat(np.arange(images), 5)}
    assert all(isinstance(inputs, PackedTokens) for inputs, _ in agreed_batches(tower(), tokens, images, devices))
    encode_image = TowerEncoder(encode.model, "encode_image")
    return encode_split(encode_image, encode_text, replicate(mesh, variables), [batch], mesh).text


@pytest.mark.parametrize("devices", [1, 8])
def test_captions_of_a_split_have_the_features_of_padded_ones(devices):
    texts = [f"{'a ' * (i % 7)}caption {i}" for i in range(160)]
    got, expected = (encode_captions(encode, texts, devices) for encode in (encoder("CLIP")[0], padded("CLIP")))
    assert oracle.relative_error(got, expected) < 2e-6


class Rounded(TowerEncoder):
    """Encoder whose features depend on the place of a text, as by rounding."""

    def __call__(self, variables, inputs):
        features = super().__call__(variables, inputs)
        return features * jnp.linspace(1, 1.1, len(features))[:, None]


def test_equal_texts_have_equal_features():
    encode, variables = encoder("CLIP")
    rounded, texts = Rounded(encode.model, "encode_text"), [f"caption {i % 70}" for i in range(160)]
    features = encode_captions(rounded, texts, 1), encode_texts(rounded, variables, TOKENIZER, texts, MESH, BATCH)
    for first, again in ((f[:70], f[70:140]) for f in features):
        np.testing.assert_array_equal(again, first)
    names = [f"kind {i % 20}" for i in range(40)]
    vectors = class_embeddings(rounded, variables, TOKENIZER, names, ["a {}", "the {}"], MESH)
    np.testing.assert_array_equal(vectors[20:], vectors[:20])
