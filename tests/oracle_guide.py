"""Contrastive losses with a guide in float64, and inputs whose similarities in the guide are exact in every dtype."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle

from infcl_jax import clip_loss, retrieval_loss

TOLERANCES = {jnp.float32: 2e-5, jnp.bfloat16: 1e-2}


def make(b=40, extra=0, dim=16, guide_dim=12, kind="random", masked=False, seed=0):
    """Student and guide features of `b` rows and `b + extra` columns, and a mask of the rows."""
    rng = np.random.default_rng(seed)
    student = [oracle.unit(rng.normal(size=(n, dim))) for n in (b, b + extra)]
    x = rng.integers(-3, 4, size=(b, guide_dim)) / 8
    y = np.concatenate([x, rng.integers(-3, 4, size=(extra, guide_dim)) / 8])
    if kind != "equal":  # else every own pair is the most similar one of its row
        y[:b] += rng.integers(-1, 2, size=x.shape) / 8
    if kind == "duplicates":
        x[b // 2 :], y[b // 2 : b] = x[: b - b // 2], y[: b - b // 2]
    mask = rng.random(b) < 0.8 if masked else np.ones(b, bool)
    return student, (x, y), mask


def side(s, t, positive, own, valid, margin, strategy):
    """Mean loss of the rows with a positive, and the gradient of their sum over the logits `s`."""
    own = t[np.arange(len(t)), own]
    thresholds = own - margin * (np.abs(own) if strategy == "relative" else 1)
    kept = valid & (positive | (t <= thresholds[:, None]))
    z = np.where(kept, s, -np.inf)
    rows = positive.any(1)
    p, target = np.zeros_like(s), positive / np.maximum(positive.sum(1), 1)[:, None]
    lse = oracle.log_sum_exp(z[rows], 1)
    p[rows] = np.exp(z[rows] - lse[:, None])
    loss = lse - (np.where(positive, s, 0)[rows] * target[rows]).sum(1)
    return loss.sum() / max(1, rows.sum()), np.where(rows[:, None], p - target, 0) / max(1, rows.sum())


def clip(student, guide, scale, margin=0.0, strategy="absolute", mask=None, ids=None):
    """`clip_loss` with a guide, and its gradients over image features, text features and scale."""
    (x, y), (gx, gy) = ([np.asarray(a, np.float64) for a in pair] for pair in (student, guide))
    b = len(x)
    valid = np.ones((b, b), bool) if mask is None else mask[:, None] & mask[None, :]
    positive = valid & (np.eye(b, dtype=bool) if ids is None else ids[:, None] == ids[None, :])
    s, t, own = x @ y.T, gx @ gy.T, np.arange(b)
    row, d_row = side(scale * s, t, positive, own, valid, margin, strategy)
    column, d_column = side(scale * s.T, t.T, positive.T, own, valid.T, margin, strategy)
    d = (d_row + d_column.T) / 2
    return (row + column) / 2, (scale * d @ y, scale * d.T @ x, (d * s).sum())


def retrieval(student, guide, scale, labels, margin=0.0, strategy="absolute"):
    """`retrieval_loss` with a guide, and its gradients over queries, passages and scale."""
    (x, y), (gx, gy) = ([np.asarray(a, np.float64) for a in pair] for pair in (student, guide))
    s, positive = x @ y.T, labels[:, None] == np.arange(len(y))[None, :]
    loss, d = side(scale * s, gx @ gy.T, positive, labels, np.ones_like(positive), margin, strategy)
    return loss, (scale * d @ y, scale * d.T @ x, (d * s).sum())


def check(loss, student, dtype, want):
    """Compare value and gradients of the loss of kernels with those of the rounded features in float64."""
    args = *(jnp.asarray(a, dtype) for a in student), jnp.float32(20)
    value, gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(*args)
    expected, expected_gradients = want([np.asarray(a, np.float64) for a in args[:2]])
    np.testing.assert_allclose(float(value), expected, rtol=TOLERANCES[dtype])
    for got, wanted in zip(gradients, expected_gradients, strict=True):
        assert oracle.relative_error(got, wanted) <= TOLERANCES[dtype]


def check_clip(implementation, b, dtype, kind, margin, strategy, by_id, masked):
    """Compare `clip_loss` of kernels with the oracle."""
    student, guide, mask = make(b=b, dim=40, guide_dim=24, kind=kind, masked=masked)
    ids = np.random.default_rng(1).integers(0, b // 2, b).astype(np.int32) if by_id else None
    loss = functools.partial(
        clip_loss,
        mask=mask if masked else None,
        image_ids=ids,
        text_ids=ids,
        guide=tuple(jnp.asarray(a, dtype) for a in guide),
        margin=margin,
        margin_strategy=strategy,
        implementation=implementation,
    )
    check(loss, student, dtype, lambda s: clip(s, guide, 20.0, margin, strategy, mask, ids))


def check_retrieval(implementation):
    """Compare `retrieval_loss` of kernels with the oracle; some passages are those of no query."""
    student, guide, _ = make(b=70, extra=90, dim=40)
    features = tuple(jnp.asarray(a, jnp.bfloat16) for a in guide)
    loss = functools.partial(retrieval_loss, guide=features, implementation=implementation)
    check(loss, student, jnp.bfloat16, lambda s: retrieval(s, guide, 20.0, np.arange(70)))


def check_duplicates(implementation):
    """With random features and no margin, a copy of each pair ties with it whatever the rounding."""
    rng = np.random.default_rng(0)
    x, y, gx, gy = (np.tile(oracle.unit(rng.normal(size=(33, 48))), (2, 1)).astype(np.float32) for _ in range(4))
    image = jax.jit(jax.grad(lambda x: clip_loss(x, y, 5.0, guide=(gx, gy), implementation=implementation)))(x)
    without = functools.partial(clip, (x, y), (gx, gy), 5.0)
    assert oracle.relative_error(image, without(margin=-1e-6)[1][0]) <= 2e-5
    assert oracle.relative_error(image, without(margin=1e-6)[1][0]) > 0.02
