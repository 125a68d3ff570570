"""Tiled log-sum-exp of a small network's pair scores, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from towers import assert_equal

from infcl_jax import pairwise_scores_lse


def scores(params, x, y):
    return jnp.tanh((x @ params["x"])[:, None] + (y @ params["y"])[None]) @ params["out"]


def pair_case(dtype):
    rng = np.random.default_rng(0)
    params = {"x": rng.normal(size=(8, 16)), "y": rng.normal(size=(8, 16)), "out": 10 * rng.normal(size=16)}
    values = params, rng.normal(size=(37, 8)), rng.normal(size=(50, 8))
    return jax.tree.map(lambda a: jnp.asarray(a.astype(np.float32), dtype), values)


def pair_gradients(pairs, dtype, labels):
    """Gradients over network and both sides of a loss that weights every result differently."""
    row, col, positive = (jnp.asarray(w, dtype) for w in np.random.default_rng(1).normal(size=(3, 50)))

    def loss(params, x, y):
        found = pairs(params, x, y, labels)
        return (row[:37] * found[0]).sum() + (col * found[1]).sum() + (positive[:37] * found[2]).sum()

    return jax.tree.map(np.asarray, jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(*pair_case(dtype)))


def dense_pairs(params, x, y, labels):
    s = scores(params, x, y)
    labels = np.arange(len(x)) if labels is None else labels
    return jax.nn.logsumexp(s, axis=1), jax.nn.logsumexp(s, axis=0), s[np.arange(len(x)), labels]


@pytest.mark.parametrize(
    ("tile", "labels"), [((8, 16), np.random.default_rng(2).permutation(50)[:37].astype(np.int32)), (37, None)]
)
def test_pair_scores_against_float64(tile, labels):
    def tiled(params, x, y, labels):
        return pairwise_scores_lse(scores, params, x, y, tile=tile, labels=labels)

    with jax.enable_x64(True):
        expected = pair_gradients(dense_pairs, jnp.float64, labels)
    assert_equal(pair_gradients(tiled, jnp.float32, labels), expected)


def test_pair_scores_leave_out_what_is_minus_infinity():
    def masked(params, x, y):
        return jnp.where((y[:, 0] > 0)[None, :], scores(params, x, y), -jnp.inf)

    params, x, y = pair_case(jnp.float32)
    y = y.at[:37, 0].set(abs(y[:37, 0])).at[37:, 0].set(-1.0)

    def loss(pairs):
        return jax.value_and_grad(lambda params: (lambda s: (s.row - s.positive).mean())(pairs(params)))(params)

    got = loss(lambda params: pairwise_scores_lse(masked, params, x, y, tile=16))
    assert_equal(got, loss(lambda params: pairwise_scores_lse(scores, params, x, y[:37], tile=16)))


def test_pair_scores_hold_one_tile():
    def temporary(b):
        params, x, y = jax.eval_shape(lambda: pair_case(jnp.float32))
        x, y = (jax.ShapeDtypeStruct((b, *a.shape[1:]), a.dtype) for a in (x, y))
        loss = jax.grad(lambda *args: pairwise_scores_lse(scores, *args, tile=64).row.sum(), argnums=(0, 1, 2))
        return jax.jit(loss).lower(params, x, y).compile().memory_analysis().temp_size_in_bytes

    assert temporary(2048) < 2 * temporary(512) < 512 * 512 * 16 * 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tile": 0}, "one or two positive integers, got 0"),
        ({"tile": (1, 2, 3)}, "one or two positive integers"),
        ({"x": np.zeros((3, 8), np.int32)}, "x and y to be floating, got int32"),
        ({"x": np.zeros((60, 8), np.float32)}, "60 and 50 rows"),
        ({"labels": np.full(37, 50, np.int32)}, r"labels in \[0, 50\)"),
        ({"score_fn": lambda p, x, y: x[:, 0]}, r"floating scores \[16, 16\] for a tile, got float32\[16\]"),
    ],
)
def test_pairs_that_do_not_fit(changes, message):
    params, x, y = pair_case(jnp.float32)
    arguments = {"score_fn": scores, "params": params, "x": x, "y": y, "tile": 16} | changes
    with pytest.raises(ValueError, match=message):
        pairwise_scores_lse(**arguments)
