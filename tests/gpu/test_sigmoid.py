"""The sigmoid loss in the fused kernels against NumPy in fp64; sizes give many tiles and odd remainders."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from infcl_jax import siglip_loss

pytestmark = pytest.mark.gpu
BF16, FP32 = jnp.bfloat16, jnp.float32


@functools.cache
def value_and_grad(implementation, devices=1):
    loss = functools.partial(siglip_loss, mesh=oracle.mesh_of(devices), implementation=implementation)
    return jax.jit(jax.value_and_grad(lambda *args, **arrays: loss(*args, **arrays), argnums=(0, 1, 2, 3)))


def assert_close(got, want, dtype, scale, bias, size):
    """Compares loss and gradients; those of scale and bias relative to the sum of the absolute terms, `size`."""
    (loss, (d_x, d_y, *scalars)), (want_loss, (want_x, want_y, *want_scalars)) = got, want
    logits = 1 + scale + abs(bias)  # tensor cores truncate when they add, so errors of logits share a sign
    assert loss == pytest.approx(want_loss, rel=1e-6 + 4e-7 * logits)
    for g, w in zip((d_x, d_y), (want_x, want_y), strict=True):
        assert g.dtype == dtype
        assert oracle.relative_error(g, w) <= (1e-2 if dtype == BF16 else 1e-5 + 2e-7 * logits)
    for g, w in zip(scalars, want_scalars, strict=True):
        assert g == pytest.approx(w, rel=1e-6, abs=(1e-6 + 4e-7 * logits) * size)


@pytest.mark.parametrize(
    ("b", "dim", "dtype", "repeats"),
    [
        *((300, 96, BF16, None), (1003, 512, BF16, 8), (4099, 768, BF16, None)),
        *((300, 1024, FP32, 100), (1003, 640, FP32, None), (1003, 512, FP32, 1)),
    ],
)
def test_matches_oracle(implementation, b, dim, dtype, repeats):
    """`repeats` is the number of rows of each id; None: no ids. Rows are in any order."""
    ids = None if repeats is None else np.random.default_rng(1).permutation(b).astype(np.int32) // repeats
    arrays = {} if ids is None else {"image_ids": ids, "text_ids": ids}
    for kind in oracle.KINDS if b < 4000 else ("random", "adversarial"):
        image, text = oracle.features(kind, b, b, dim, dtype)
        for scale, bias in ((10.0, -10.0), (100.0, -100.0), (100.0, -30.0), (1.0, 10.0)):
            got = value_and_grad(implementation)(image, text, jnp.float32(scale), jnp.float32(bias), **arrays)
            want = oracle.siglip(image, text, scale, bias, ids)
            assert_close(got, want, dtype, scale, bias, abs(want[1][3]) + 2 * (repeats or 1))


@pytest.mark.parametrize(("dtype", "by_id"), [(BF16, True), (FP32, False)])
def test_masked_rows_may_hold_anything(implementation, dtype, by_id):
    b, rng = 1003, np.random.default_rng(2)
    keep = rng.random(b) < 0.7
    ids = rng.integers(0, 400, b).astype(np.int32)
    image, text = oracle.features("random", b, b, 200, dtype)
    want = oracle.siglip(image[keep], text[keep], 30.0, -10.0, ids[keep] if by_id else None)
    image[~keep], text[~keep] = np.nan, np.inf
    arrays = {"image_ids": ids, "text_ids": ids} if by_id else {}
    loss, (d_x, d_y, *scalars) = value_and_grad(implementation)(
        image, text, jnp.float32(30), jnp.float32(-10), mask=keep, **arrays
    )
    assert not any(np.any(np.asarray(d)[~keep]) for d in (d_x, d_y))
    got = loss, (np.asarray(d_x)[keep], np.asarray(d_y)[keep], *scalars)
    assert_close(got, want, dtype, 30.0, -10.0, abs(want[1][3]) + 10)


def test_two_runs_are_bitwise_equal(implementation):
    args = (*oracle.features("random", 1003, 1003, 512, BF16), jnp.float32(100), jnp.float32(-10))
    arrays = dict.fromkeys(("image_ids", "text_ids"), np.arange(1003, dtype=np.int32) // 8)
    first, second = (value_and_grad(implementation)(*args, **arrays) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, second)


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("by_id", [False, True])
def test_all_local_gpus_agree_with_one(implementation, dtype, by_id):
    devices = jax.local_device_count()
    if devices == 1:
        pytest.skip("needs several GPUs")
    b = 1000 * devices
    args = (*oracle.features("random", b, b, 512, dtype), jnp.float32(30), jnp.float32(-10))
    arrays = dict.fromkeys(("image_ids", "text_ids"), np.arange(b, dtype=np.int32) * 7 % 900) if by_id else {}
    (loss, gradients), (want_loss, want) = (value_and_grad(implementation, n)(*args, **arrays) for n in (devices, 1))
    assert loss == pytest.approx(float(want_loss), rel=1e-6)
    for g, w in zip(gradients, want, strict=True):
        assert oracle.relative_error(g, w) <= (1e-2 if dtype == BF16 else 1e-5)
