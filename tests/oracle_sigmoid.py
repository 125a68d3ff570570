"""Backends of the pairwise sigmoid loss against float64, on one block."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle

from infcl_jax.ops.pairwise.sigmoid.block import SigmoidBlock, SigmoidGradient, SigmoidSums

EVERYTHING = SigmoidGradient()


def make(
    bx=128, by=128, dim=64, dtype=jnp.bfloat16, kind="random", scale=20.0, bias=-10.0, masked=False, ids="own"
):  # fmt: skip
    """Creates a block.

    `ids` are "own", None, or the number of groups from which the rows and columns are drawn.
    """
    rng = np.random.default_rng(0)
    x, y = (jnp.asarray(a, dtype) for a in oracle.features(kind, bx, by, dim))
    x_mask, y_mask = (rng.random(n) < 0.8 if masked else None for n in (bx, by))
    groups = (1 + np.arange(n) if ids == "own" else np.sort(rng.integers(1, 1 + (ids or 1), n)) for n in (bx, by))
    numbers = [
        g if mask is None else np.where(mask, g, unmatched)
        for g, mask, unmatched in zip(groups, (x_mask, y_mask), (0, -1), strict=True)
    ]
    x_ids, y_ids = (None if ids is None else jnp.asarray(n, jnp.int32) for n in numbers)
    masks = (None if mask is None else jnp.asarray(mask) for mask in (x_mask, y_mask))
    return SigmoidBlock(x, y, jnp.float32(scale), jnp.float32(bias), *masks, x_ids, y_ids)


def expected(block, cotangents):
    """Computes row sums and gradients in fp64."""
    x, y = (np.asarray(a, np.float64) for a in (block.x, block.y))
    scale, bias = float(block.scale), float(block.bias)
    x_mask, y_mask = (
        np.ones(len(a), bool) if mask is None else np.asarray(mask)
        for a, mask in ((x, block.x_mask), (y, block.y_mask))
    )
    kept = np.outer(x_mask, y_mask)
    positive = np.zeros_like(kept)
    if block.x_ids is not None:
        positive = kept & (np.asarray(block.x_ids)[:, None] == np.asarray(block.y_ids)[None, :])
    negative = kept & ~positive
    s = x @ y.T
    z = scale * s + bias
    w_positive, w_negative = (np.asarray(c, np.float64)[:, None] for c in cotangents)
    d_z = np.where(negative, w_negative * np.exp(-np.logaddexp(0, -z)), 0)
    d_z -= np.where(positive, w_positive * np.exp(-np.logaddexp(0, z)), 0)
    terms = zip((positive, negative), (-z, z), strict=True)
    sums = SigmoidSums(*(np.where(kept, np.logaddexp(0, logits), 0).sum(1) for kept, logits in terms))
    return (
        sums,
        {"x": scale * d_z @ y, "y": scale * d_z.T @ x, "scale": (d_z * s).sum(), "bias": d_z.sum()},
        np.abs(d_z),
    )


def check(backend, block, *, needs_grad=EVERYTHING, dtype=jnp.float32, tolerance=1e-6, rounding=1):
    """Compares sums and gradients of a backend with float64.

    `rounding` is the error of bf16 relative to round-to-nearest.
    """
    rng = np.random.default_rng(1)
    cotangents = SigmoidSums(*(jnp.asarray(rng.uniform(0.5, 1, block.x.shape[0]), jnp.float32) for _ in range(2)))
    sums = jax.jit(backend.forward)(block)

    @jax.jit
    def backward(block, cotangents):
        acc = backend.backward(block, cotangents, backend.accumulators(block, needs_grad, dtype))
        return backend.gradient(block, cotangents, acc, needs_grad)

    gradient = backward(block, cotangents)
    if block.x_mask is not None:
        cotangents = SigmoidSums(*(np.where(block.x_mask, c, 0) for c in cotangents))
    want_sums, want, size = expected(block, cotangents)
    keep = np.ones(block.x.shape[0], bool) if block.x_mask is None else np.asarray(block.x_mask)
    logit = 1 + abs(float(block.scale)) + abs(float(block.bias))  # its rounding is relative to its largest value
    for got, exact in zip(sums, want_sums, strict=True):
        bound = (tolerance + 2e-7 * logit) * np.linalg.norm(exact)
        assert np.linalg.norm(np.asarray(got, np.float64)[keep] - exact[keep]) <= bound
    for name, got in gradient._asdict().items():
        if not getattr(needs_grad, name):
            assert got is None
            continue
        if name in "xy":
            bound = rounding * (1e-5 if block.x.dtype == jnp.float32 else 1e-2) * np.linalg.norm(want[name])
        else:  # the terms may cancel
            bound = (tolerance + 2e-7 * logit) * size.sum()
        assert np.linalg.norm(np.asarray(got, np.float64) - want[name]) <= bound + 1e-30, name
