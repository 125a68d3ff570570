"""Negatives that a guide leaves out of `clip_loss` and `retrieval_loss`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import oracle_guide
import pytest

from infcl_jax import clip_loss, retrieval_loss

TOLERANCES = {jnp.float64: 1e-12, jnp.float32: 2e-5, jnp.bfloat16: 1e-2}


def compare(loss, student, scale, dtype, want, tolerance=None):
    """Compare value and gradients of a loss of features and scale with those of the oracle."""
    tolerance = tolerance or TOLERANCES[dtype]
    args = *(jnp.asarray(a, dtype) for a in student), jnp.asarray(scale, dtype if dtype == jnp.float64 else jnp.float32)
    value, gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(*args)
    expected, expected_gradients = want([np.asarray(a, np.float64) for a in args[:2]])
    assert float(value) == pytest.approx(expected, rel=tolerance, abs=tolerance)
    for got, wanted in zip(gradients, expected_gradients, strict=True):
        assert oracle.absolute_error(got, wanted) <= tolerance * max(1e-3, np.linalg.norm(wanted))


@pytest.mark.parametrize(
    ("devices", "implementation", "dtype", "kind", "margin", "strategy", "by_id", "masked"),
    [
        (1, "ring", jnp.float64, "random", 0.0, "absolute", False, False),
        (1, "xla", jnp.float32, "duplicates", 0.125, "absolute", False, True),
        (4, "xla", jnp.float64, "duplicates", 0.25, "relative", True, True),
        (8, "ring", jnp.float32, "equal", -0.125, "relative", False, False),
        (1, "xla", jnp.bfloat16, "random", 0.0, "absolute", True, False),
        (1, "local", jnp.float64, "duplicates", 0.125, "absolute", True, False),
        (4, "dense", jnp.float64, "duplicates", 0.0, "relative", False, True),
        (4, "local", jnp.float64, "random", 0.25, "absolute", False, False),
        (4, "disco", jnp.float64, "duplicates", 0.125, "absolute", True, True),
        (4, "ring", jnp.float64, "random", 100.0, "absolute", False, False),
    ],
)
def test_clip_matches_oracle(devices, implementation, dtype, kind, margin, strategy, by_id, masked):
    with jax.enable_x64(dtype == jnp.float64):
        student, guide, mask = oracle_guide.make(kind=kind, masked=masked)
        ids = np.random.default_rng(1).integers(0, 15, len(mask)).astype(np.int32) if by_id else None
        loss = functools.partial(
            clip_loss,
            mesh=oracle.mesh_of(devices) if devices > 1 else None,
            mask=mask if masked else None,
            image_ids=ids,
            text_ids=ids,
            guide=tuple(jnp.asarray(a, jnp.bfloat16) for a in guide),  # exact: multiples of 1/8
            margin=margin,
            margin_strategy=strategy,
            implementation=implementation,
        )
        compare(loss, student, 20.0, dtype, lambda s: oracle_guide.clip(s, guide, 20.0, margin, strategy, mask, ids))


@pytest.mark.parametrize(("devices", "margin"), [(1, 0.25), (4, 0.0)])
def test_retrieval_matches_oracle(devices, margin):
    """Each query's passages are adjacent: its positive, and two hard negatives."""
    student, guide, _ = oracle_guide.make(b=24, extra=48)
    labels = 3 * np.arange(24)
    order = np.argsort(np.concatenate([labels, *(labels + i for i in (1, 2))]), kind="stable")
    (x, y), (gx, gy) = ((a, b[order]) for a, b in (student, guide))
    loss = functools.partial(
        retrieval_loss,
        labels=labels.astype(np.int32),
        mesh=oracle.mesh_of(devices) if devices > 1 else None,
        guide=(jnp.float32(gx), jnp.float32(gy)),
        margin=margin,
    )
    compare(loss, (x, y), 20.0, jnp.float32, lambda s: oracle_guide.retrieval(s, (gx, gy), 20.0, labels, margin))


def test_duplicates_of_the_own_pair_stay():
    oracle_guide.check_duplicates("xla")


def test_the_guide_gets_no_gradient():
    student, guide, _ = jax.tree.map(np.float32, oracle_guide.make())
    gradient = jax.grad(lambda *guide: clip_loss(*student, 20.0, guide=guide), argnums=(0, 1))(*guide)
    assert not any(np.any(g) for g in gradient)


def test_memory_does_not_grow_with_the_pairs():
    features, scale = jax.ShapeDtypeStruct((16384, 16), jnp.float32), jax.ShapeDtypeStruct((), jnp.float32)
    loss = jax.value_and_grad(lambda x, y, s, *guide: clip_loss(x, y, s, guide=guide, implementation="xla"))
    memory = jax.jit(loss).lower(features, features, scale, features, features).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 16384**2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"guide": None, "margin": 0.1}, "expected a guide"),
        ({"margin": float("nan")}, "finite"),
        ({"margin_strategy": "share"}, "margin_strategy"),
        ({"guide": (np.ones((3, 2)), np.ones((4, 2)))}, "guide features of 4 rows"),
        ({"label_smoothing": 0.1}, "label_smoothing"),
    ],
)
def test_errors_say_what_was_expected(options, message):
    features = np.eye(4, dtype=np.float32)
    with pytest.raises(ValueError, match=message):
        clip_loss(features, features, 1.0, **{"guide": (features, features)} | options)


def test_retrieval_by_id_needs_a_passage_for_each_query():
    x, y = np.eye(4, dtype=np.float32)[:2], np.eye(4, dtype=np.float32)
    ids = {"query_ids": np.arange(2, dtype=np.int32), "passage_ids": np.arange(4, dtype=np.int32)}
    with pytest.raises(ValueError, match="row i to belong to column i"):
        retrieval_loss(x, y, 1.0, guide=(x, y), **ids)
