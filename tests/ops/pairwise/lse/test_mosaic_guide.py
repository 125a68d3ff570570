"""Hopper kernels with a guide, in Pallas' interpreter."""

import jax
import jax.numpy as jnp
import oracle_guide
import pytest
from gpus import ALONE, count_kernels, largest_array
from gpus import lowered as lowered_for_cuda

from infcl_jax import clip_loss
from infcl_jax.ops.pairwise.fused_windows import WindowConfig


@pytest.mark.slow
@pytest.mark.parametrize(
    ("b", "dtype", "kind", "margin", "strategy", "by_id", "masked"),
    [
        pytest.param(150, jnp.bfloat16, "duplicates", 0.0, "absolute", False, True, marks=pytest.mark.full),
        pytest.param(130, jnp.float32, "random", 0.25, "relative", False, False, marks=pytest.mark.full),
        (140, jnp.bfloat16, "random", 0.125, "absolute", True, True),
    ],
)
def test_clip_matches_oracle(interpreter, b, dtype, kind, margin, strategy, by_id, masked):
    oracle_guide.check_clip("mosaic_gpu", b, dtype, kind, margin, strategy, by_id, masked)


@pytest.mark.slow
def test_retrieval_matches_oracle(interpreter):
    oracle_guide.check_retrieval("mosaic_gpu")


@pytest.mark.slow
def test_large_batches_take_few_kernels_and_little_memory():
    b, dim = 65536, 512
    features, scale = jax.ShapeDtypeStruct((b, dim), jnp.bfloat16), jax.ShapeDtypeStruct((), jnp.float32)
    loss = jax.jit(jax.value_and_grad(lambda x, y, s, *guide: clip_loss(x, y, s, guide=guide), (0, 1, 2)))
    with jax.sharding.use_abstract_mesh(ALONE):
        text = lowered_for_cuda(loss, features, features, scale, features, features)
    assert count_kernels(text) <= 6 * 4
    assert largest_array(text) <= max(WindowConfig.max_pairs, 3 * b * dim)
