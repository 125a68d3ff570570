"""Hopper kernels with a guide, in Pallas' interpreter."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import oracle_guide
import pytest
from gpus import ALONE, count_kernels, largest_array
from gpus import lowered as lowered_for_cuda

from infcl_jax import clip_loss, retrieval_loss
from infcl_jax.ops.pairwise.fused_windows import WindowConfig

TOLERANCES = {jnp.float32: 2e-5, jnp.bfloat16: 1e-2}


def check(loss, student, dtype, want):
    """Compare value and gradients with the oracle of the rounded features."""
    args = *(jnp.asarray(a, dtype) for a in student), jnp.float32(20)
    value, gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(*args)
    expected, expected_gradients = want([np.asarray(a, np.float64) for a in args[:2]])
    assert float(value) == pytest.approx(expected, rel=TOLERANCES[dtype])
    for got, wanted in zip(gradients, expected_gradients, strict=True):
        assert oracle.relative_error(got, wanted) <= TOLERANCES[dtype]


@pytest.mark.parametrize(
    ("b", "dtype", "kind", "margin", "strategy", "by_id", "masked"),
    [
        (150, jnp.bfloat16, "duplicates", 0.0, "absolute", False, True),
        (130, jnp.float32, "random", 0.25, "relative", False, False),
        (140, jnp.bfloat16, "random", 0.125, "absolute", True, True),
    ],
)
def test_clip_matches_oracle(interpreter, b, dtype, kind, margin, strategy, by_id, masked):
    student, guide, mask = oracle_guide.make(b=b, dim=40, guide_dim=24, kind=kind, masked=masked)
    ids = np.random.default_rng(1).integers(0, b // 2, b).astype(np.int32) if by_id else None
    loss = functools.partial(
        clip_loss,
        mask=mask if masked else None,
        image_ids=ids,
        text_ids=ids,
        guide=tuple(jnp.asarray(a, dtype) for a in guide),
        margin=margin,
        margin_strategy=strategy,
        implementation="mosaic_gpu",
    )
    check(loss, student, dtype, lambda s: oracle_guide.clip(s, guide, 20.0, margin, strategy, mask, ids))


def test_retrieval_matches_oracle(interpreter):
    student, guide, _ = oracle_guide.make(b=70, extra=90, dim=40)
    features = tuple(jnp.asarray(a, jnp.bfloat16) for a in guide)
    loss = functools.partial(retrieval_loss, guide=features, implementation="mosaic_gpu")
    check(loss, student, jnp.bfloat16, lambda s: oracle_guide.retrieval(s, guide, 20.0, np.arange(70)))


def test_large_batches_take_few_kernels_and_little_memory():
    b, dim = 65536, 512
    features, scale = jax.ShapeDtypeStruct((b, dim), jnp.bfloat16), jax.ShapeDtypeStruct((), jnp.float32)
    loss = jax.jit(jax.value_and_grad(lambda x, y, s, *guide: clip_loss(x, y, s, guide=guide), (0, 1, 2)))
    with jax.sharding.use_abstract_mesh(ALONE):
        text = lowered_for_cuda(loss, features, features, scale, features, features)
    assert count_kernels(text) <= 6 * 4
    assert largest_array(text) <= max(WindowConfig.max_pairs, 3 * b * dim)
