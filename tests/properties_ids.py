"""Checks of the losses with positives by id, against NumPy in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
from hypothesis import strategies as st
from properties import (
    EACH,
    ROWS,
    assert_within,
    geometries,
    junk,
    masks,
    scales,
    similarity,
    softmax_terms,
    with_junk,
)

from infcl_jax import clip_loss, retrieval_loss, siglip_loss

IDS = ("unique", "equal", "none", "some", "mixed")


def draw_ids(data, bx, by, wide):
    """Int32 ids `[bx]` and `[by]`, or `[bx, 2]` and `[by, 2]` if `wide`."""
    kind, rng = data.draw(st.sampled_from(IDS)), np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    pool = rng.choice(2**31, max(bx, by), replace=False).astype(np.int32)
    if kind == "unique":
        x, y = pool[:bx], pool[:by]
    elif kind == "equal":
        x, y = np.full(bx, pool[0]), np.full(by, pool[0])
    elif kind == "none":
        x, y = pool[:bx], -1 - pool[:by]
    else:  # ids that one side lacks, too
        x, y = rng.choice(pool[: bx // 2], bx), rng.choice(pool[bx // 4 :], by)
        if kind == "some":
            y[: min(bx, by)] = x[: min(bx, by)]
    return (np.stack([x % 2, x], 1), np.stack([y % 2, y], 1)) if wide else (x, y)


def matches(x_ids, y_ids, kept):
    """Bool `[rows, columns]`, True at the positives."""
    x_ids, y_ids = x_ids.reshape(len(x_ids), -1), y_ids.reshape(len(y_ids), -1)
    return (x_ids[:, None] == y_ids[None]).all(2) & kept


def direction(z, kept, match, axis, multi_positive):
    """Loss along `axis`, its gradient over `z` and the gradient's absolute terms."""
    negatives, p_negative = softmax_terms(z, kept & ~match, axis)
    positives, p = softmax_terms(z, match, axis)
    number = match.sum(axis)
    positives = np.where(number > 0, positives, 0)
    share = np.exp(np.minimum(negatives - positives, 0) - np.logaddexp(0, -np.abs(negatives - positives)))
    share, loss = np.expand_dims(share, axis), np.logaddexp(0, negatives - positives)
    d_z, size = share * (p_negative - p), share * (p_negative + p)
    if multi_positive == "mean":
        several, each = np.expand_dims(number > 1, axis), match / np.expand_dims(np.maximum(number, 1), axis)
        loss = loss + np.where(number > 1, positives - (each * z).sum(axis), 0)
        d_z, size = d_z + several * (p - each), size + several * (p + each)
    return loss, d_z, size


def smoothed(z, kept, match, axis, multi_positive):
    """Like `direction`, with an even distribution over the kept pairs as the target."""
    lse, p = softmax_terms(z, kept, axis)
    even = kept / np.maximum(kept.sum(axis, keepdims=True), 1)
    return np.where(match.any(axis), lse, 0) - (even * z).sum(axis), p - even, p + even


def expected(x, y, scale, ids, kept, axes, weights, multi_positive, smoothing):
    """Loss, gradients and their sums of absolute terms: [loss, dx, dy, dscale] each."""
    s = similarity(x, y)
    match = matches(*ids, kept)
    value, d_z, size = 0.0, np.zeros_like(s), np.zeros_like(s)
    for axis in axes:
        w = np.where(match.any(axis), weights, 0)
        w = np.expand_dims(w / max(w.sum(), 1e-30) / len(axes), axis)
        for term, share in ((direction, 1 - smoothing), (smoothed, smoothing)):
            loss, d, terms = term(scale * s, kept, match, axis, multi_positive)
            value += share * (np.squeeze(w, axis) * loss).sum()
            d_z, size = d_z + share * w * d, size + share * w * terms
    x, y = x.astype(np.float64), y.astype(np.float64)
    gradients = [scale * d_z @ y, scale * d_z.T @ x, (d_z * s).sum()]
    magnitudes = [scale * size @ np.abs(y), scale * size.T @ np.abs(x), (size * np.abs(s)).sum()]
    return [value, *gradients], [abs(value) + smoothing * scale, *magnitudes]


def assert_all_within(got, want, magnitudes, scale):
    for g, w, magnitude in zip(got, want, magnitudes, strict=True):
        assert_within(g, w, magnitude, scale)


def draw_weights(data, rows):
    seed = data.draw(st.integers(0, 99))
    return np.random.default_rng(seed).integers(0, 4, rows).astype(np.float32) if seed else np.ones(rows, np.float32)


@functools.cache
def clip(implementation, devices, multi_positive, smoothing):
    options = {"multi_positive": multi_positive, "label_smoothing": smoothing}
    loss = functools.partial(clip_loss, mesh=oracle.mesh_of(devices), implementation=implementation, **options)
    return jax.jit(jax.value_and_grad(lambda *args, **arrays: loss(*args, **arrays), argnums=(0, 1, 2)))


def check_clip(data, implementation, devices, multi_positive, smoothing):
    b = ROWS[devices]
    x, y = data.draw(geometries).features(b)
    scale, mask, value = data.draw(scales), data.draw(masks(b)), data.draw(junk)
    ids, weights = draw_ids(data, b, b, devices == 4), draw_weights(data, b)
    loss, gradients = clip(implementation, devices, multi_positive, smoothing)(
        with_junk(x, mask, value),
        with_junk(y, mask, value),
        jnp.float32(scale),
        mask=mask,
        weights=with_junk(weights, mask, value),
        image_ids=ids[0],
        text_ids=ids[1],
    )
    kept = np.outer(mask, mask)
    want, magnitudes = expected(x, y, scale, ids, kept, (1, 0), weights, multi_positive, smoothing)
    assert_all_within([loss, *gradients], want, magnitudes, scale)
    assert not any(np.any(np.asarray(g)[~mask]) for g in gradients[:2])


@functools.cache
def retrieval(implementation, devices, multi_positive):
    loss = functools.partial(
        retrieval_loss, mesh=oracle.mesh_of(devices), implementation=implementation, multi_positive=multi_positive
    )
    return jax.jit(jax.value_and_grad(lambda *args, **arrays: loss(*args, **arrays), argnums=(0, 1, 2)))


def check_retrieval(data, implementation, devices, multi_positive):
    bx, by = ROWS[devices], EACH * ROWS[devices]
    x, y = data.draw(geometries).features(bx, by)
    scale, mask, passage_mask = data.draw(scales), data.draw(masks(bx)), data.draw(masks(by))
    ids, weights, value = draw_ids(data, bx, by, devices == 4), draw_weights(data, bx), data.draw(junk)
    loss, gradients = retrieval(implementation, devices, multi_positive)(
        with_junk(x, mask, value),
        with_junk(y, passage_mask, value),
        jnp.float32(scale),
        mask=mask,
        passage_mask=passage_mask,
        weights=weights,
        query_ids=ids[0],
        passage_ids=ids[1],
    )
    kept = np.outer(mask, passage_mask)
    want, magnitudes = expected(x, y, scale, ids, kept, (1,), weights, multi_positive, 0.0)
    assert_all_within([loss, *gradients], want, magnitudes, scale)


@functools.cache
def siglip(implementation, devices):
    loss = functools.partial(siglip_loss, mesh=oracle.mesh_of(devices), implementation=implementation)
    return jax.jit(jax.value_and_grad(lambda *args, **arrays: loss(*args, **arrays), argnums=(0, 1, 2, 3)))


def check_siglip(data, implementation, devices):
    b = ROWS[devices]
    x, y = data.draw(geometries).features(b)
    scale, mask, value = data.draw(scales), data.draw(masks(b)), data.draw(junk)
    ids, bias = draw_ids(data, b, b, devices == 4), data.draw(st.sampled_from((0.0, -10.0, -30.0)))
    loss, gradients = siglip(implementation, devices)(
        with_junk(x, mask, value),
        with_junk(y, mask, value),
        jnp.float32(scale),
        jnp.float32(bias),
        mask=mask,
        image_ids=ids[0],
        text_ids=ids[1],
    )
    kept, s = np.outer(mask, mask), similarity(x, y)
    z = np.where(matches(*ids, kept), 1, -1)
    margin = z * (scale * s + bias)
    terms = np.where(kept, np.logaddexp(0, -margin), 0) / mask.sum()
    d_z = np.where(kept, -z * np.exp(-np.logaddexp(0, margin)), 0) / mask.sum()
    x, y, size = x.astype(np.float64), y.astype(np.float64), np.abs(d_z)
    want = [terms.sum(), scale * d_z @ y, scale * d_z.T @ x, (d_z * s).sum(), d_z.sum()]
    magnitudes = [terms.sum(), scale * size @ np.abs(y), scale * size.T @ np.abs(x), (size * np.abs(s)).sum()]
    assert_all_within([loss, *gradients], want, [*magnitudes, size.sum()], scale + abs(bias))


def checks(implementations):
    """`{name: check(data)}` for every loss and implementation, on 1, 4 and 8 devices."""
    cases = {}
    for i in implementations:
        for n, multi, smoothing in {
            "dense": [(1, "any", 0.1), (4, "mean", 0.0)],
            "xla": [(1, "mean", 0.1), (1, "any", 0.0), (4, "mean", 0.0), (4, "any", 0.1), (8, "mean", 0.0)],
            "ring": [(4, "mean", 0.0), (4, "any", 0.1)],
            "local": [(4, "mean", 0.0)],
        }.get(i, [(4, "any", 0.1)]):
            settings = {"implementation": i, "devices": n, "multi_positive": multi}
            cases[f"clip-{i}-{n}-{multi}"] = functools.partial(check_clip, **settings, smoothing=smoothing)
    for i, multi in (("dense", "any"), ("xla", "mean"), ("xla", "any")):
        settings = {"implementation": i, "devices": 4, "multi_positive": multi}
        cases[f"retrieval-{i}-4-{multi}"] = functools.partial(check_retrieval, **settings)
    for i, n in (("xla", 1), ("xla", 8), ("ring", 4)):
        cases[f"siglip-{i}-{n}"] = functools.partial(check_siglip, implementation=i, devices=n)
    return cases
