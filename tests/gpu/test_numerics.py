"""Losses and gradients of the fused kernels against NumPy in fp64.

Sizes give many tiles and odd remainders.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from infcl_jax import clip_loss, pairwise_lse

pytestmark = pytest.mark.gpu
EPS = float(jnp.finfo(jnp.float32).eps)
BF16, FP32 = jnp.bfloat16, jnp.float32


def tolerance(dtype):
    return 1e-2 if dtype == BF16 else 1e-5


@functools.cache
def value_and_grad(implementation, devices=1):
    mesh = oracle.mesh_of(devices)
    loss = functools.partial(clip_loss, mesh=mesh, implementation=implementation)
    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))


@pytest.mark.parametrize(
    ("b", "dim", "dtype", "kinds"),
    [
        (300, 96, BF16, oracle.KINDS),
        (1003, 512, BF16, oracle.KINDS),
        (4099, 768, BF16, ["random", "adversarial"]),
        (300, 1024, FP32, oracle.KINDS),
        (1003, 640, FP32, oracle.KINDS),
        (2048, 512, FP32, oracle.KINDS),
    ],
)
@pytest.mark.parametrize("scale", [14.3, 100.0])
def test_clip_loss_matches_oracle(implementation, b, dim, dtype, kinds, scale):
    for kind in kinds:
        image, text = oracle.features(kind, b, b, dim, dtype)
        loss, gradients = value_and_grad(implementation)(image, text, jnp.float32(scale))
        expected_loss, expected = oracle.clip(image, text, np.float32(scale))
        assert loss == pytest.approx(expected_loss, rel=1e-6, abs=EPS * scale)
        assert gradients[2] == pytest.approx(expected[2], rel=tolerance(dtype), abs=10 * EPS)
        for got, want in zip(gradients[:2], expected[:2], strict=True):
            bound = tolerance(dtype) * np.linalg.norm(want)
            if kind == "aligned":  # the true gradient all but cancels
                bound = max(bound, float(jnp.finfo(dtype).eps) * scale / np.sqrt(b))
            assert got.dtype == dtype
            assert oracle.absolute_error(got, want) <= bound


@pytest.mark.parametrize("norm", [0.1, 8.0])
def test_features_that_are_not_normalized(implementation, norm):
    image, text = oracle.features("random", 1003, 1003, 512)
    image, text = (np.asarray(norm * a, BF16) for a in (image, text))
    loss, gradients = value_and_grad(implementation)(image, text, jnp.float32(50))
    expected_loss, expected = oracle.clip(image, text, 50.0)
    assert loss == pytest.approx(expected_loss, rel=1e-6, abs=50 * norm**2 * EPS)
    for got, want in zip(gradients, expected, strict=True):
        assert oracle.relative_error(got, want) <= 1e-2


@pytest.mark.parametrize(("b", "dim", "dtype"), [(1003, 512, BF16), (1003, 640, FP32)])
def test_two_runs_are_bitwise_equal(implementation, b, dim, dtype):
    args = (*oracle.features("random", b, b, dim, dtype), jnp.float32(100))
    first, second = (value_and_grad(implementation)(*args) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, second)


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_all_local_gpus_agree_with_one(implementation, dtype):
    devices = jax.local_device_count()
    if devices == 1:
        pytest.skip("needs several GPUs")
    args = (*oracle.features("random", 1000 * devices, 1000 * devices, 512, dtype), jnp.float32(30))
    (loss, gradients), (want_loss, want) = (value_and_grad(implementation, n)(*args) for n in (devices, 1))
    assert loss == pytest.approx(float(want_loss), rel=1e-6)
    for a, b in zip(gradients, want, strict=True):
        assert oracle.relative_error(a, b) <= tolerance(dtype)


def weighted_lse(x, y, x_scale, y_scale, weights, labels, kept):
    """Weighted sum of `pairwise_lse`'s results over the unmasked pairs, with gradients, in fp64."""
    x, y = (np.asarray(a, np.float64) for a in (x, y))
    s, i = x @ y.T, np.arange(len(x))
    x_scale, y_scale = np.reshape(x_scale, (-1, 1)), np.reshape(y_scale, (1, -1))

    def side(scale, weight, axis):
        z = np.where(kept, scale * s, -1e300)
        lse = np.expand_dims(oracle.log_sum_exp(z, axis), axis)
        return (weight * lse).sum(), weight * np.exp(z - lse)

    row, in_rows = side(x_scale, weights[0][:, None], 1)
    column, in_columns = side(y_scale, weights[1][None, :], 0)
    d_s = x_scale * in_rows + y_scale * in_columns
    d_s[i, labels] += weights[2]
    value = row + column + (weights[2] * s[i, labels]).sum()
    return value, (d_s @ y, d_s.T @ x, (in_rows * s).sum(1), (in_columns * s).sum(0))


@pytest.mark.parametrize(
    ("dtype", "exclude", "per_sample", "columns"),
    [
        (BF16, False, False, True),
        (FP32, True, False, True),
        (BF16, True, True, True),
        (FP32, False, True, True),
        (BF16, True, False, False),
        (FP32, False, True, False),
    ],
)
def test_every_option_of_pairwise_lse(implementation, dtype, exclude, per_sample, columns):
    """Rectangular blocks, arbitrary labels, and masks of rows and columns."""
    bx, by, dim = 1003, 2101, 256
    rng = np.random.default_rng(3)
    x, y = oracle.features("random", bx, by, dim, dtype)
    labels = rng.integers(0, by, bx).astype(np.int32)
    x_mask, y_mask = (rng.random(n) < (0.8 if columns else 2) for n in (bx, by))
    positive = x_mask & y_mask[labels]
    weights = [rng.normal(size=n) / bx for n in (bx, by, bx)]
    weights = [weights[0] * x_mask, weights[1] * y_mask * columns, weights[2] * positive]
    x_scale, y_scale = (rng.uniform(5, 50, n).astype(np.float32) if per_sample else np.float32(30) for n in (bx, by))
    kept = np.outer(x_mask, y_mask)
    kept[np.arange(bx), labels] &= not exclude

    @functools.partial(jax.value_and_grad, argnums=(0, 1, 2, 3) if per_sample and columns else (0, 1, 2))
    def value(x, y, x_scale, y_scale):
        found = pairwise_lse(
            x,
            y,
            x_scale,
            y_scale,
            positives="exclude" if exclude else "include",
            labels=labels,
            x_mask=x_mask if columns else None,
            y_mask=y_mask if columns else None,
            columns=columns,
            implementation=implementation,
        )
        return sum((a * jnp.asarray(w, FP32)).sum() for a, w in zip(found, weights, strict=True) if a is not None)

    got_value, got = jax.jit(value)(x, y, x_scale, y_scale if per_sample and columns else None)
    want_value, want = weighted_lse(x, y, x_scale, y_scale, weights, labels, kept)
    if not per_sample:
        want = (*want[:2], want[2].sum() + want[3].sum())
    assert got_value == pytest.approx(want_value, rel=1e-6, abs=50 * EPS)
    for a, b in zip(got, want, strict=False):
        assert oracle.relative_error(a, b) <= tolerance(dtype)
