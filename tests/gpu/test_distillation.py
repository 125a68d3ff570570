"""Distillation in the fused kernels against NumPy in fp64.

Sizes give many tiles and odd remainders.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import properties
import properties_distillation
import pytest

from infcl_jax.losses import clip_and_distillation

pytestmark = pytest.mark.gpu
BF16, FP32 = jnp.bfloat16, jnp.float32


@functools.cache
def value_and_grad(implementation, devices=1):
    """The divergence and its gradients, with the contrastive loss."""
    both = functools.partial(clip_and_distillation, mesh=oracle.mesh_of(devices), implementation=implementation)
    return jax.jit(jax.value_and_grad(lambda *args, **o: both(*args, **o)[::-1], argnums=(0, 1, 2), has_aux=True))


def features(kind, b, dim, teacher_dim, dtype, teacher_dtype):
    return oracle.features(kind, b, b, dim, dtype), oracle.features("random", b, b, teacher_dim, teacher_dtype, seed=1)


def run(implementation, student, teacher, scale, teacher_scale, devices=1, **arrays):
    args = (*student, jnp.float32(scale), *teacher, jnp.float32(teacher_scale))
    return value_and_grad(implementation, devices)(*args, **arrays)


def assert_close(got, want, dtype, logits):
    """Compares losses and gradients.

    The scale's gradient has an error relative to the sum of the absolute terms.
    """
    ((divergence, clip), (d_x, d_y, d_scale)), (want_clip, want_divergence, want_gradients, sizes) = got, want
    for value, wanted in ((divergence, want_divergence), (clip, want_clip)):
        assert float(value) == pytest.approx(wanted, abs=2e-6 + 4e-7 * logits + 2e-6 * wanted)
    for g, w in zip((d_x, d_y), want_gradients, strict=False):
        assert g.dtype == dtype
        assert oracle.relative_error(g, w) <= (1e-2 if dtype == BF16 else 2e-5 + 2e-7 * logits)
    assert abs(float(d_scale) - want_gradients[2]) <= (1e-6 + 2e-7 * logits) * sizes[2]


@pytest.mark.parametrize(
    ("b", "dim", "teacher_dim", "dtype", "teacher_dtype"),
    [
        (300, 96, 96, BF16, BF16),
        (1003, 512, 768, BF16, BF16),
        (4099, 768, 512, BF16, FP32),
        (300, 1024, 640, FP32, BF16),
        (1003, 640, 100, FP32, FP32),
    ],
)
def test_matches_oracle(implementation, b, dim, teacher_dim, dtype, teacher_dtype):
    for kind in oracle.KINDS if b < 4000 else ("random", "adversarial"):
        student, teacher = features(kind, b, dim, teacher_dim, dtype, teacher_dtype)
        for scales in ((10.0, 20.0), (100.0, 90.0), (1.0, 50.0)):
            want = oracle.distillation(student, teacher, *scales)
            assert_close(run(implementation, student, teacher, *scales), want, dtype, max(scales))


@pytest.mark.parametrize(("dtype", "teacher_dtype"), [(BF16, FP32), (FP32, BF16)])
def test_masked_rows_may_hold_anything(implementation, dtype, teacher_dtype):
    b, rng = 1003, np.random.default_rng(2)
    kept, weights = rng.random(b) < 0.7, rng.random(b).astype(np.float32)
    student, teacher = features("random", b, 200, 130, dtype, teacher_dtype)
    want = oracle.distillation(student, teacher, 30.0, 40.0, kept, weights)
    student, teacher = ([np.where(kept[:, None], a, np.nan).astype(a.dtype) for a in f] for f in (student, teacher))
    got = run(implementation, student, teacher, 30.0, 40.0, mask=kept, weights=weights)
    assert not any(np.any(np.asarray(d)[~kept]) for d in got[1][:2])
    assert_close(got, want, dtype, 40.0)


def test_a_student_close_to_its_teacher_in_bf16(implementation):
    """With dS rounded before the teacher's term is subtracted, the gradient would be noise."""
    rng, b = np.random.default_rng(0), 1002
    x = np.repeat(oracle.unit(rng.normal(size=(b // 2, 24))), 2, 0)
    x, y = (oracle.unit(x + 0.01 * rng.normal(size=(b, 24))) for _ in range(2))
    student = [jnp.asarray(a, BF16) for a in (x, y)]
    teacher = [jnp.asarray(oracle.unit(a + 0.01 * rng.normal(size=a.shape)), BF16) for a in (x, y)]
    want = oracle.distillation(student, teacher, 100.0, 90.0)
    assert_close(run(implementation, student, teacher, 100.0, 90.0), want, BF16, 100.0)


@pytest.mark.parametrize("kind", ["random", "aligned"])
def test_sums_out_of_range_take_the_general_path(implementation, kind):
    """Features of norm 3 have logits far above the shared max-shift."""
    student, teacher = features(kind, 300, 64, 40, FP32, FP32)
    student, teacher = ([3 * a for a in f] for f in (student, teacher))
    want = oracle.distillation(student, teacher, 50.0, 50.0)
    got = run(implementation, student, teacher, 50.0, 50.0)
    assert float(got[0][0]) == pytest.approx(want[1], rel=1e-5)
    assert all(oracle.relative_error(g, w) <= 1e-3 for g, w in zip(got[1], want[2], strict=True))


def test_two_runs_are_bitwise_equal(implementation):
    operands = features("random", 1003, 512, 640, BF16, BF16)
    first, second = (run(implementation, *operands, 100.0, 90.0) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, second)


def test_random_inputs_match_float64(implementation, monkeypatch):
    monkeypatch.setattr(properties, "LEAST_ERROR", 2e-5)  # dS in two bf16 terms keeps 16 bits
    check = functools.partial(properties_distillation.check, implementation=implementation, devices=1)
    properties.run(check, examples=100)


def test_memory_does_not_grow_with_the_pairs(implementation):
    """The pairs would take 8 GiB in bf16."""
    features, scalar = jax.ShapeDtypeStruct((65536, 512), BF16), jax.ShapeDtypeStruct((), FP32)
    args = (features, features, scalar) * 2
    assert value_and_grad(implementation).lower(*args).compile().memory_analysis().temp_size_in_bytes < 1 << 30


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_all_local_gpus_agree_with_one(implementation, dtype):
    devices = jax.local_device_count()
    if devices == 1:
        pytest.skip("needs several GPUs")
    operands = features("random", 1000 * devices, 512, 384, dtype, dtype)
    (losses, gradients), (want_losses, want) = (run(implementation, *operands, 30.0, 40.0, n) for n in (devices, 1))
    assert losses == pytest.approx(tuple(map(float, want_losses)), rel=1e-6)
    for g, w in zip(gradients, want, strict=True):
        assert oracle.relative_error(g, w) <= (1e-2 if dtype == BF16 else 1e-5)
