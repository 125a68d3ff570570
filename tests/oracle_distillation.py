"""Backends of the pairs' sums of distillation against float64, on one block."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle

from infcl_jax.ops.pairwise.distillation.block import (
    DistillationBlock,
    DistillationCotangents,
    DistillationGradient,
    Side,
    SideSums,
)

EVERYTHING = DistillationGradient()


def make(
    bx=128, by=128, dim=64, teacher_dim=48, dtype=jnp.bfloat16, teacher_dtype=jnp.bfloat16, kind="random", scale=20.0,
    teacher_scale=30.0, masked=False, own=True,
):  # fmt: skip
    """Creates a block; without `own` it has no positives."""
    rng = np.random.default_rng(0)
    x, y = (jnp.asarray(a, dtype) for a in oracle.features(kind, bx, by, dim))
    teacher_x, teacher_y = (
        jnp.asarray(a, teacher_dtype) for a in oracle.features("random", bx, by, teacher_dim, seed=1)
    )
    masks = (jnp.asarray(rng.random(n) < 0.8) if masked else None for n in (bx, by))
    labels = jnp.arange(bx, dtype=jnp.int32) - 3 if own else None
    return DistillationBlock(
        x, y, jnp.float32(scale), teacher_x, teacher_y, jnp.float32(teacher_scale), *masks, labels
    )  # fmt: skip


def expected(block, cotangents):
    """Computes the log-sum-exps and gaps of both sides, positives, gradients and |dz| in fp64."""
    x, y, tx, ty = (np.asarray(a, np.float64) for a in (block.x, block.y, block.teacher_x, block.teacher_y))
    x_mask, y_mask = (
        np.ones(len(a), bool) if mask is None else np.asarray(mask)
        for a, mask in ((x, block.x_mask), (y, block.y_mask))
    )
    valid, scale = np.outer(x_mask, y_mask), float(block.scale)
    own = np.zeros_like(valid)
    if block.labels is not None:
        own = np.asarray(block.labels)[:, None] == np.arange(len(y))[None, :]
    s = x @ y.T
    z, t = scale * s, float(block.teacher_scale) * (tx @ ty.T)
    d_z, size, sides = np.zeros_like(s), np.zeros_like(s), []
    for axis, (d_negatives, d_gap) in ((1, cotangents[:2]), (0, cotangents[2:4])):
        lse, teacher = (
            oracle.log_sum_exp(np.where(kept, a, -1e9), axis) for kept, a in ((valid & ~own, z), (valid, t))
        )
        q, p = (
            np.where(kept, np.exp(np.minimum(a - np.expand_dims(log_sum, axis), 0)), 0)
            for kept, a, log_sum in ((valid & ~own, z, lse), (valid, t, teacher))
        )
        sides.append((lse, teacher, (p * (t - z)).sum(axis) - teacher))
        d_negatives, d_gap = (np.expand_dims(np.asarray(d, np.float64), axis) for d in (d_negatives, d_gap))
        d_z += d_negatives * q - d_gap * p
        size += np.abs(d_negatives * q) + np.abs(d_gap * p)
    positive = np.where(own & valid, np.asarray(cotangents[4], np.float64)[:, None], 0)
    d_z, size = d_z + positive, size + np.abs(positive)
    gradients = {"x": scale * d_z @ y, "y": scale * d_z.T @ x, "scale": (d_z * s).sum()}
    return sides, (own * z).sum(1), gradients, size


def check(backend, block, *, needs_grad=EVERYTHING, dtype=jnp.float32, rounding=1):
    """Compares sums and gradients of a backend with float64.

    `rounding` is the error of bf16 relative to round-to-nearest.
    """
    rng, (bx, by) = np.random.default_rng(1), (len(block.x), len(block.y))
    keep = [np.ones(n, bool) if m is None else np.asarray(m) for n, m in ((bx, block.x_mask), (by, block.y_mask))]
    rows, positive, columns = jax.jit(backend.forward)(block)
    lengths = (bx, bx, by, by, bx)
    cotangents = [jnp.asarray(rng.uniform(0.5, 1, n), jnp.float32) for n in lengths]
    masks = (*[keep[0]] * 2, *[keep[1]] * 2, keep[0])
    cotangents = [jnp.where(m, c, jnp.zeros_like(c)) for m, c in zip(masks, cotangents, strict=True)]
    if block.labels is not None:  # a masked pair has neither row nor column
        labels = np.clip(block.labels, 0, by - 1)
        cotangents[4] = jnp.where(keep[1][labels], cotangents[4], jnp.zeros_like(cotangents[4]))
    want_sides, want_positive, want, size = expected(block, cotangents)
    logit = 1 + abs(float(block.scale)) + abs(float(block.teacher_scale))
    for sums, side, kept in zip((rows, columns), want_sides, keep, strict=True):
        for got, exact in zip((sums.negatives.log(), sums.teacher.log(), sums.gap()), side, strict=True):
            assert np.abs(np.asarray(got, np.float64) - exact)[kept].max() <= 2e-6 + 4e-7 * logit
    assert np.abs(np.asarray(positive, np.float64) - want_positive).max() <= 2e-7 * logit

    @jax.jit
    def backward(block, cotangents, rows: SideSums, columns: SideSums):
        sides = (Side(s, *d) for s, d in ((rows, cotangents[:2]), (columns, cotangents[2:4])))
        acc = backend.accumulators(block, needs_grad, dtype)
        cotangents = DistillationCotangents(*sides, cotangents[4])
        return backend.gradient(block, cotangents, backend.backward(block, cotangents, acc), needs_grad)

    for name, got in backward(block, cotangents, rows, columns)._asdict().items():
        if not getattr(needs_grad, name):
            assert got is None
            continue
        if name in "xy":
            bound = rounding * (1e-5 if block.x.dtype == jnp.float32 else 1e-2) * np.linalg.norm(want[name])
        else:  # the terms cancel
            bound = (1e-6 + 2e-7 * logit) * size.sum()
        assert np.linalg.norm(np.asarray(got, np.float64) - want[name]) <= bound + 1e-30, name
