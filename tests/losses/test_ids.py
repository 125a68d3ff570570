"""Losses with positives by id."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import properties
import properties_ids
import pytest

from infcl_jax import clip_loss, retrieval_loss, siglip_loss
from infcl_jax.ops.pairwise.lse import available_implementations

CHECKS = properties_ids.checks(available_implementations())
# The others have every implementation and kind of positives; rings of eight devices are in test_properties.py.
REPEATED = ("clip-xla-8-mean", "clip-xla-4-any", "clip-ring-4-any", "retrieval-xla-4-any", "siglip-xla-8")
NUMBERS = [
    *((name, 6) for name in CHECKS if name not in REPEATED),
    *(pytest.param(name, 200, marks=pytest.mark.full) for name in CHECKS),
]
value_and_grad = jax.jit(jax.value_and_grad(clip_loss, argnums=(0, 1, 2)))


@pytest.mark.parametrize(("name", "examples"), NUMBERS)
def test_matches_float64(name, examples):
    properties.run(CHECKS[name], examples)


@pytest.mark.parametrize(("multi_positive", "dtype"), [("mean", jnp.float32), ("any", jnp.bfloat16)])
def test_unique_ids_change_no_bit(multi_positive, dtype):
    """Op by op: XLA's fusions round differently in every program."""
    image, text = oracle.features("aligned", 40, 40, 9, dtype)
    ids = np.random.default_rng(0).permutation(40).astype(np.int32)
    by_id = functools.partial(clip_loss, image_ids=ids, text_ids=ids, multi_positive=multi_positive)
    for scale in (14.3, 100.0):
        with jax.disable_jit():
            want, (*features, want_scale) = jax.value_and_grad(clip_loss, argnums=(0, 1, 2))(image, text, scale)
            got, (*got_features, got_scale) = jax.value_and_grad(by_id, argnums=(0, 1, 2))(image, text, scale)
        assert got == want
        for g, w in zip(got_features, features, strict=True):
            np.testing.assert_array_equal(g, w)
        np.testing.assert_allclose(got_scale, want_scale, rtol=1e-5)


def test_duplicates_in_bf16_are_as_exact_as_their_features():
    """At scale 100, with dS rounded before the positives are subtracted, the gradient would be noise."""
    rng = np.random.default_rng(0)
    x = oracle.unit(np.repeat(oracle.unit(rng.normal(size=(48, 24))), 2, 0) + 0.02 * rng.normal(size=(96, 24)) / 5)
    y = oracle.unit(x + 0.05 * rng.normal(size=(96, 24)) / 5)
    x, y = np.asarray(jnp.bfloat16(x), np.float32), np.asarray(jnp.bfloat16(y), np.float32)
    ids, ones = np.arange(96, dtype=np.int32) // 2, np.ones(96)
    want, _ = properties_ids.expected(x, y, 100.0, (ids, ids), np.ones((96, 96), bool), (1, 0), ones, "mean", 0.0)
    _, got = value_and_grad(jnp.bfloat16(x), jnp.bfloat16(y), 100.0, image_ids=ids, text_ids=ids)
    assert oracle.relative_error(got[0], want[1]) <= 1e-2


@pytest.mark.parametrize("image_id,text_id", [(0, 1), (1, 0)])
def test_only_one_direction_may_have_weight(image_id, text_id):
    """The positive's image or its text has weight 0."""
    image, text = oracle.features("random", 4, 4, 9)
    ids, weights = np.arange(8, dtype=np.int32).reshape(2, 4), np.array([1, 0, 0, 0], np.float32)
    ids[0, image_id] = ids[1, text_id] = 9
    want, _ = properties_ids.expected(image, text, 5.0, ids, np.ones((4, 4), bool), (1, 0), weights, "mean", 0.0)
    got, gradients = value_and_grad(image, text, 5.0, image_ids=ids[0], text_ids=ids[1], weights=weights)
    assert got == pytest.approx(want[0], rel=1e-5) and want[0] > 0
    for g, w in zip(gradients, want[1:], strict=True):
        assert oracle.relative_error(g, w) <= 1e-5


@pytest.mark.parametrize("multi_positive", ["mean", "any"])
def test_two_columns_are_one_id(multi_positive):
    image, text = oracle.features("random", 12, 12, 9)
    wide = np.array([5, 5 + 2**32, 5, 9], np.int64)[np.arange(12) % 4]
    loss = functools.partial(clip_loss, image, text, 10.0, multi_positive=multi_positive)
    halves = wide.view(np.int32).reshape(-1, 2)
    numbers = np.unique(wide, return_inverse=True)[1].astype(np.int32)
    assert loss(image_ids=halves, text_ids=halves) == loss(image_ids=numbers, text_ids=numbers)
    with pytest.raises(
        ValueError, match=r"image_ids to be int32 of shape \(12,\) .* got int64\[12\]; .*view\(np.int32\)"
    ):
        loss(image_ids=wide, text_ids=wide)


@pytest.mark.parametrize("loss", [clip_loss, siglip_loss, retrieval_loss])
def test_bad_ids_are_one_line_errors(loss):
    image, text = oracle.features("random", 8, 8, 9)
    first, second = ("query_ids", "passage_ids") if loss is retrieval_loss else ("image_ids", "text_ids")
    args, ids = (image, text, 1.0, *[0.0] * (loss is siglip_loss)), np.arange(8, dtype=np.int32)
    for given, message in (
        ({first: ids}, f"expected {first} and {second}, got only {first}"),
        ({first: ids, second: ids[:7]}, f"expected {second} to be int32 of shape"),
        ({first: ids, second: ids.astype(np.float32)}, f"expected {second} to be int32"),
        ({first: ids, second: np.stack([ids, ids], 1)}, "of the same width"),
    ):
        with pytest.raises(ValueError, match=message):
            loss(*args, **given, mesh=oracle.mesh_of(4))
    if loss is retrieval_loss:
        with pytest.raises(ValueError, match="leave the labels out"):
            loss(*args, query_ids=ids, passage_ids=ids, labels=ids)
    if loss is clip_loss:
        for options in ({"label_smoothing": 1.0}, {"multi_positive": "all"}, {"weights": ids[:7]}):
            with pytest.raises(ValueError, match=f"expected {next(iter(options))}"):
                loss(*args, **options)


@pytest.mark.parametrize("masked", [False, True])
def test_label_smoothing_without_ids(masked):
    image, text = oracle.features("random", 20, 20, 9)
    mask = np.arange(20) < (13 if masked else 20)
    rows, ids = image[mask], np.arange(mask.sum(), dtype=np.int32)
    kept = np.ones((len(ids), len(ids)), bool)
    want, _ = properties_ids.expected(rows, text[mask], 20.0, (ids, ids), kept, (1, 0), np.ones(len(ids)), "mean", 0.2)
    loss = functools.partial(clip_loss, mask=mask if masked else None, label_smoothing=0.2, mesh=oracle.mesh_of(4))
    got, gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(image, text, 20.0)
    assert got == pytest.approx(want[0], rel=1e-5)
    for g, w in zip((gradients[0][mask], gradients[1][mask], gradients[2]), want[1:], strict=True):
        assert oracle.relative_error(g, w) <= 1e-5


@pytest.mark.parametrize("name", ["clip", "siglip", "retrieval"])
def test_no_array_has_the_size_of_all_pairs_of_a_device(name):
    b, devices, dim = 4096, 4, 16
    features, ids = jnp.zeros((b, dim), jnp.bfloat16), jnp.zeros((b, 2), jnp.int32)
    mesh = oracle.mesh_of(devices)
    loss = {
        "clip": lambda x, y, s: clip_loss(x, y, s, mesh=mesh, image_ids=ids, text_ids=ids, label_smoothing=0.1),
        "siglip": lambda x, y, s: siglip_loss(x, y, s, -s, mesh=mesh, image_ids=ids, text_ids=ids),
        "retrieval": lambda x, y, s: retrieval_loss(x, y, s, mesh=mesh, query_ids=ids, passage_ids=ids),
    }[name]
    text = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2))).lower(features, features, jnp.float32(9)).as_text()
    sizes = [math.prod(map(int, dims.split("x"))) for dims in re.findall(r"tensor<(\d+(?:x\d+)*)x[a-z]", text)]
    assert max(sizes) == 512 * b // devices  # one strip of rows and the columns of a block


@pytest.mark.parametrize("implementation", available_implementations())
def test_every_implementation_accepts_ids(implementation):
    image, text = oracle.features("random", 8, 8, 9)
    ids = np.arange(8, dtype=np.int32)
    loss = functools.partial(clip_loss, image, text, 1.0, image_ids=ids, text_ids=ids)
    assert loss(implementation=implementation) == pytest.approx(float(loss()), rel=1e-6)
