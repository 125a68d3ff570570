"""Positives by id in the fused kernels against float64."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import properties
import properties_ids
import pytest

from infcl_jax import clip_loss, pairwise_lse

pytestmark = pytest.mark.gpu
EPS = float(jnp.finfo(jnp.float32).eps)
BF16, FP32 = jnp.bfloat16, jnp.float32


def draw_ids(kind, b):
    """Shuffled ids `[b]`: unique, every id 8 times, few, all equal, or a large group among unique ids."""
    rng = np.random.default_rng(2)
    ids = rng.permutation(b).astype(np.int32)
    groups = {"unique": ids, "8": ids // 8, "few": ids % 5, "equal": 0 * ids, "group": np.maximum(ids, b // 3)}
    return groups[kind]


@functools.cache
def value_and_grad(implementation, multi_positive, devices=1):
    loss = functools.partial(
        clip_loss, mesh=oracle.mesh_of(devices), implementation=implementation, multi_positive=multi_positive
    )
    return jax.jit(jax.value_and_grad(lambda *args, **arrays: loss(*args, **arrays), argnums=(0, 1, 2)))


@pytest.mark.parametrize("multi_positive", ["mean", "any"])
@pytest.mark.parametrize(
    ("b", "dim", "dtype", "kinds"),
    [(1003, 512, BF16, oracle.KINDS), (2301, 96, BF16, ["random"]), (1003, 640, FP32, oracle.KINDS)],
)
def test_clip_loss_matches_float64(implementation, b, dim, dtype, kinds, multi_positive):
    rng = np.random.default_rng(4)
    for kind, ids, scale in itertools.product(kinds, ("unique", "8", "few", "group", "equal"), (14.3, 100.0)):
        x, y = oracle.features(kind, b, b, dim, dtype)
        x_ids, mask = draw_ids(ids, b), rng.random(b) < 0.9
        y_ids = np.where(rng.random(b) < 0.9, x_ids, rng.permutation(x_ids)).astype(np.int32)
        weights = rng.integers(0, 4, b).astype(np.float32)
        exact = (x.astype(np.float32), y.astype(np.float32), scale, (x_ids, y_ids), np.outer(mask, mask), (1, 0))
        want, size = properties_ids.expected(*exact, weights, multi_positive, 0.0)
        loss, gradients = value_and_grad(implementation, multi_positive)(
            *(properties.with_junk(a, mask, np.nan) for a in (x, y)),
            jnp.float32(scale),
            mask=mask,
            weights=weights,
            image_ids=x_ids,
            text_ids=y_ids,
        )
        rounding = float(jnp.finfo(dtype).eps) if dtype == BF16 else 2e-5
        assert loss == pytest.approx(want[0], rel=1e-6, abs=EPS * scale)
        # Few different weights give few different values of dS, whose roundings do not average out.
        assert gradients[2] == pytest.approx(want[3], abs=rounding / 2 * size[3] + 1e-9)
        for got, expected, terms in zip(gradients[:2], want[1:], size[1:], strict=False):
            assert got.dtype == dtype and not np.any(np.asarray(got)[~mask])
            assert oracle.absolute_error(got, expected) <= max(
                2 * rounding * np.linalg.norm(expected), (EPS * scale + 1e-9) * np.linalg.norm(terms)
            )


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("multi_positive", ["mean", "any"])
def test_random_inputs_match_float64(implementation, multi_positive, devices, monkeypatch):
    if devices > jax.local_device_count():
        pytest.skip("needs several GPUs")
    monkeypatch.setattr(properties, "LEAST_ERROR", 2e-5)  # dS in two bf16 terms keeps 16 bits
    monkeypatch.setitem(properties.ROWS, 2, 20)
    settings = {"implementation": implementation, "devices": devices, "multi_positive": multi_positive}
    properties.run(functools.partial(properties_ids.check_clip, **settings, smoothing=0.0), examples=60)
    properties.run(functools.partial(properties_ids.check_retrieval, **settings), examples=60)


@pytest.mark.parametrize(
    ("b", "dtype", "multi_positive", "masked"),
    [(1003, BF16, "mean", True), (4096, BF16, "any", False), (1003, FP32, "mean", False)],
)
def test_unique_ids_change_no_bit(implementation, b, dtype, multi_positive, masked):
    """Op by op: XLA's fusions round differently in every program."""
    x, y = oracle.features("aligned", b, b, 512, dtype)
    ids = np.random.default_rng(0).permutation(b).astype(np.int32)
    mask = np.random.default_rng(1).random(b) < 0.9 if masked else None
    loss = jax.value_and_grad(functools.partial(clip_loss, implementation=implementation, mask=mask), argnums=(0, 1))
    by_id = functools.partial(clip_loss, implementation=implementation, mask=mask, multi_positive=multi_positive)
    for scale in (14.3, 50.0):
        want = loss(x, y, jnp.float32(scale))
        got = jax.value_and_grad(functools.partial(by_id, image_ids=ids, text_ids=ids), argnums=(0, 1))(
            x, y, jnp.float32(scale)
        )
        jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_two_runs_are_bitwise_equal(implementation, dtype):
    args = (*oracle.features("random", 1003, 1003, 640, dtype), jnp.float32(100))
    ids = draw_ids("8", 1003)
    first, second = (value_and_grad(implementation, "any")(*args, image_ids=ids, text_ids=ids) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, second)


@pytest.mark.parametrize(
    ("dtype", "exclude", "columns"),
    [(BF16, True, True), (FP32, False, True), (FP32, True, False), (BF16, False, False)],
)
def test_per_sample_scales(implementation, dtype, exclude, columns):
    """Rectangular blocks with masks, against the dense implementation in float64."""
    bx, by, rng = 1003, 2101, np.random.default_rng(3)
    x, y = oracle.features("random", bx, by, 256, dtype)
    ids, y_ids = rng.integers(0, 300, bx).astype(np.int32), rng.integers(0, 400, by).astype(np.int32)
    x_mask, y_mask = rng.random(bx) < 0.9, rng.random(by) < 0.9
    scales = rng.uniform(5, 90, bx), rng.uniform(5, 90, by) if columns else None

    def value(x, y, x_scale, y_scale, implementation):
        result = pairwise_lse(
            *(x, y, x_scale, y_scale),
            positives="exclude" if exclude else "include",
            x_ids=ids,
            y_ids=y_ids,
            x_mask=x_mask,
            y_mask=y_mask,
            columns=columns,
            implementation=implementation,
        )
        outputs = [result.row, result.col, *result.positive.row[:2], *(result.positive.col or (None, None))[:2]]
        terms = [(i + 1) * jnp.where(jnp.isfinite(a), a, 0) for i, a in enumerate(outputs) if a is not None]
        return sum(term.astype(x.dtype if x.dtype == jnp.float64 else FP32).sum() for term in terms)

    argnums = (0, 1, 2, 3) if columns else (0, 1, 2)
    grad = jax.jit(jax.value_and_grad(value, argnums), static_argnums=4)
    got_value, got = grad(x, y, *(None if s is None else s.astype(np.float32) for s in scales), implementation)
    with jax.enable_x64(True):
        wide = (x.astype(np.float64), y.astype(np.float64), *scales)
        want_value, want = jax.device_get(grad(*wide, "dense"))
    assert got_value == pytest.approx(float(want_value), rel=1e-5)
    for a, b in zip(got, want, strict=True):
        assert oracle.relative_error(a, b) <= (1e-2 if dtype == BF16 else 2e-5)
