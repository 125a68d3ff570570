"""The fused backend of distillation around kernels in plain JAX.

Includes the general path and the ring. `test_mosaic.py` and `test_triton.py` test the GPU kernels.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import properties
import properties_distillation
import pytest
from jax import lax

from infcl_jax.losses import clip_and_distillation, distillation_loss
from infcl_jax.ops.pairwise.distillation.fused import DistillationFused
from infcl_jax.ops.pairwise.distillation.kernel_api import KernelSums
from infcl_jax.ops.pairwise.fused_windows import WindowConfig
from infcl_jax.ops.pairwise.implementations import TABLE
from infcl_jax.ops.pairwise.kernel_api import LABEL_RANGE_ROWS


def products(x, y, pairs):
    """Sums the products of the bf16 terms."""
    width = x.shape[1] // (1 + max(p for p, _ in pairs))
    x, y = ([a[:, n : n + width].astype(jnp.float32) for n in range(0, a.shape[1], width)] for a in (x, y))
    return sum(jnp.matmul(x[p], y[q].T, precision="highest") for p, q in pairs)


class PlainKernels:
    """`Kernels` in plain JAX with small tiles."""

    tile, depth = (LABEL_RANGE_ROWS, 8), 8

    def _window(self, operands, window, pairs):
        """Returns s, z, t, e, f and the positives of a window."""

        def rows(a, axis):
            first, count = ((window.row, window.rows), (window.column, window.columns))[axis]
            return lax.dynamic_slice_in_dim(a, first, count)

        o = operands
        s = products(rows(o.x, 0), rows(o.y, 1), pairs[0])
        z, t = o.scale[0] * s, o.teacher_scale[0] * products(rows(o.teacher_x, 0), rows(o.teacher_y, 1), pairs[1])
        masked = 0.0 if o.column_masked is None else rows(o.column_masked, 1)[None, :]
        e, f = (
            jnp.exp2(a - rows(shift, 0)[:, None] - masked) for a, shift in ((z, o.row_shift), (t, o.teacher_row_shift))
        )
        positive = jnp.zeros_like(s, bool)
        if o.labels is not None:
            columns = window.column + jnp.arange(window.columns)
            positive = rows(o.labels, 0)[:, None] == columns[None, :]
        return s, z, t, e, f, positive

    def sums(self, operands, window, pairs):
        _, z, t, e, f, positive = self._window(operands, window, pairs)
        terms = jnp.where(positive, jnp.zeros_like(e), e), f, f * (t - z)
        row, column = (KernelSums(*(a.sum(axis) for a in terms)) for axis in (1, 0))
        return row, column

    def ds(self, operands, weights, window, pairs, *, terms, moments):
        s, _, _, e, f, positive = self._window(operands, window, pairs)

        def of(name, first, count):
            return lax.dynamic_slice_in_dim(getattr(weights, name), first, count)

        row, teacher_row = (of(n, window.row, window.rows)[:, None] for n in ("row", "teacher_row"))
        column, teacher_column = (of(n, window.column, window.columns)[None, :] for n in ("column", "teacher_column"))
        student = e * (row + column)
        if weights.positive is not None:
            student = jnp.where(positive, of("positive", window.row, window.rows)[:, None], student)
        ds = rest = student - f * (teacher_row + teacher_column)
        rounded = []
        for _ in range(terms):
            rounded.append(lax.reduce_precision(rest, 8, 7))
            rest = rest - rounded[-1]
        return jnp.concatenate(rounded, axis=1).astype(jnp.bfloat16), (ds * s).sum(1) if moments else None, None

    def positives(self, x, y, pairs):
        return jnp.diagonal(products(x, y, pairs))


@pytest.fixture
def plain(monkeypatch):
    """Makes "triton" the fused backend around `PlainKernels`, with several windows."""
    monkeypatch.setattr(WindowConfig, "best_size", lambda *_: (LABEL_RANGE_ROWS, 16))
    row = dataclasses.replace(TABLE["triton"], backend=lambda *_: DistillationFused(PlainKernels()), capabilities=None)
    monkeypatch.setitem(TABLE, "triton", row)
    monkeypatch.setattr(properties, "LEAST_ERROR", 2e-5)  # dS in two bf16 terms keeps 16 bits
    properties_distillation.losses.cache_clear()


@pytest.mark.parametrize("devices", [1, 4])
def test_matches_float64(plain, devices):
    """Includes sums outside the range of the shared shifts."""
    properties.run(functools.partial(properties_distillation.check, implementation="triton", devices=devices), 8)


@pytest.mark.parametrize(("dtype", "teacher_dtype"), [(jnp.bfloat16, jnp.float32), (jnp.float32, jnp.bfloat16)])
def test_both_terms_at_another_width_of_the_teacher(plain, dtype, teacher_dtype):
    """One sweep yields both losses; masked rows hold junk."""
    student, teacher = oracle.features("random", 40, 40, 20), oracle.features("random", 40, 40, 9, seed=1)
    student, teacher = ([jnp.asarray(a, d) for a in f] for f, d in ((student, dtype), (teacher, teacher_dtype)))
    kept, weights = np.arange(40) % 5 != 3, np.linspace(0, 2, 40).astype(np.float32)

    def loss(x, y, scale):
        masked = [jnp.where(kept[:, None], a, jnp.full_like(a, jnp.nan)) for a in (x, y, *teacher)]
        clip, divergence = clip_and_distillation(
            *masked[:2], scale, *masked[2:], 30.0, mask=kept, weights=weights, mesh=oracle.mesh_of(2),
            implementation="triton",
        )  # fmt: skip
        return divergence, clip

    gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))
    (divergence, clip), (d_x, d_y, d_scale) = gradients(*student, jnp.float32(20))
    want_clip, want, (want_x, want_y, want_scale), sizes = oracle.distillation(
        student, teacher, 20.0, 30.0, kept, weights
    )
    assert (float(clip), float(divergence)) == pytest.approx((want_clip, want), rel=1e-5)
    for got, wanted in ((d_x, want_x), (d_y, want_y)):
        assert oracle.relative_error(got, wanted) <= (1e-2 if dtype == jnp.bfloat16 else 2e-5)
    assert abs(float(d_scale) - want_scale) <= 1e-5 * sizes[2]


@pytest.mark.parametrize("implementation", ["xla", "triton"])
def test_a_frozen_tower_and_a_scale_of_zero(plain, implementation):
    student, teacher = oracle.features("random", 24, 24, 8), oracle.features("random", 24, 24, 8, seed=1)
    loss = functools.partial(distillation_loss, implementation=implementation)
    for scale in (0.0, 10.0):
        d_y, d_scale = jax.jit(jax.grad(loss, argnums=(1, 2)))(*student, jnp.float32(scale), *teacher, 30.0)
        _, _, (_, want_y, want_scale), sizes = oracle.distillation(student, teacher, scale, 30.0)
        assert np.linalg.norm(d_y - want_y) <= 3e-5 * np.linalg.norm(sizes[1])
        assert abs(float(d_scale) - want_scale) <= 1e-5 * sizes[2]


def test_sums_out_of_range_take_the_general_path(plain):
    """Features of norm 3 have logits far above the shared max-shift; 131 rows pad the last strip."""
    student, teacher = (oracle.features("random", 131, 131, 8, seed=seed) for seed in (0, 1))
    student, teacher = ([3 * a for a in f] for f in (student, teacher))
    args = (*student, jnp.float32(50), *teacher, jnp.float32(50))
    loss = functools.partial(distillation_loss, implementation="triton")
    value, gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(*args)
    _, want, expected, sizes = oracle.distillation(student, teacher, 50.0, 50.0)
    assert float(value) == pytest.approx(want, rel=1e-5)
    for got, wanted, size in zip(gradients, expected, sizes, strict=True):
        assert np.linalg.norm(got - wanted) <= 1e-4 * np.linalg.norm(size)
