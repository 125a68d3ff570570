"""The fused backend around kernels in plain JAX, and the ring.

`test_mosaic.py` and `test_triton.py` test the GPU kernels.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import properties
import properties_ids
import pytest
from jax import lax

from infcl_jax import siglip_loss
from infcl_jax.ops.pairwise.fused_windows import WindowConfig
from infcl_jax.ops.pairwise.implementations import TABLE
from infcl_jax.ops.pairwise.sigmoid.fused import SigmoidFused
from infcl_jax.ops.pairwise.sigmoid.softplus import log1p, merge


class PlainKernels:
    """`Kernels` in plain JAX with small tiles.

    Like the GPU kernels, they compare no ids where ranges do not overlap.
    """

    tile, depth, ranges = (16, 8), 8, (8, 4)

    def _window(self, operands, window, pairs):
        """Returns s, the logits in base 2 and the positives of a window."""

        def rows(a, axis, per=1):
            first, count = ((window.row, window.rows), (window.column, window.columns))[axis]
            return lax.dynamic_slice_in_dim(a, first // per, count // per)

        width = operands.x.shape[1] // (1 + max(p for p, _ in pairs))
        x, y = (rows(a, axis).astype(jnp.float32) for axis, a in enumerate((operands.x, operands.y)))
        dot = functools.partial(jnp.matmul, precision="highest")
        s = sum(
            dot(x[:, p * width : (p + 1) * width], y[:, q * width : (q + 1) * width].T) for p, q in pairs
        )  # fmt: skip
        z = operands.scale[0] * s + rows(operands.row_bias, 0)[:, None]
        if operands.column_bias is not None:
            z = z + rows(operands.column_bias, 1)[None, :]
        if operands.matches is None:
            return s, z, None
        m = operands.matches
        low, high = (rows(a, 0, self.ranges[0])[:, None] for a in (m.row_lowest, m.row_highest))
        columns = [rows(a, 1, self.ranges[1])[None, :] for a in (m.column_lowest, m.column_highest)]
        overlap = (low <= columns[1]) & (high >= columns[0])
        overlap = jnp.repeat(jnp.repeat(overlap, self.ranges[0], 0), self.ranges[1], 1)
        return s, z, overlap & (rows(m.row, 0)[:, None] == rows(m.column, 1)[None, :])

    def sums(self, operands, window, pairs):
        _, z, match = self._window(operands, window, pairs)
        zero, positive = jnp.zeros_like(z), None
        negative = jnp.log(2.0) * jnp.logaddexp2(z, zero)
        if match is not None:
            positive = jnp.where(match, jnp.log(2.0) * jnp.logaddexp2(-z, zero), zero).sum(1)
            negative = jnp.where(match, zero, negative)
        return negative.sum(1), positive

    def ds(self, operands, weights, window, pairs, *, terms, moments):
        s, z, match = self._window(operands, window, pairs)
        weight, positive = (
            None if w is None else lax.dynamic_slice_in_dim(w, window.row, window.rows)[:, None] for w in weights
        )
        ds = weight / (1 + jnp.exp2(-z))
        if match is not None:
            ds = jnp.where(match, positive / (1 + jnp.exp2(z)), ds)
        rounded, rest = [], ds
        for _ in range(terms):
            rounded.append(lax.reduce_precision(rest, 8, 7))
            rest = rest - rounded[-1]
        moment = jnp.stack([(ds * s).sum(1), ds.sum(1)], axis=1) if moments else None
        return jnp.concatenate(rounded, axis=1).astype(jnp.bfloat16), moment, None


@pytest.fixture
def plain(monkeypatch):
    """Makes "triton" the fused backend around `PlainKernels`, with several windows."""
    monkeypatch.setattr(WindowConfig, "best_size", lambda *_: (32, 16))
    row = dataclasses.replace(TABLE["triton"], backend=lambda *_: SigmoidFused(PlainKernels()), capabilities=None)
    monkeypatch.setitem(TABLE, "triton", row)
    monkeypatch.setattr(properties, "LEAST_ERROR", 2e-5)  # dS in two bf16 terms keeps 16 bits


CHECKS = {
    "pairs-1": functools.partial(properties.check_siglip, implementation="triton", devices=1),
    "ids-1": functools.partial(properties_ids.check_siglip, implementation="triton", devices=1),
    "ids-4": functools.partial(properties_ids.check_siglip, implementation="triton", devices=4),
}


@pytest.mark.parametrize("name", CHECKS)
def test_matches_float64(plain, name):
    properties.run(CHECKS[name], 8)


@pytest.mark.parametrize("implementation", ["xla", "triton"])
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("scale", [0.0, 10.0])
def test_bf16_ids_and_a_frozen_tower(plain, implementation, devices, scale):
    """Only the needed gradients are computed, also with a scale of zero."""
    image, text = oracle.features("random", 40, 40, 20, jnp.bfloat16)
    ids = np.random.default_rng(0).integers(0, 9, 40).astype(np.int32)
    loss = functools.partial(
        siglip_loss, mesh=oracle.mesh_of(devices), image_ids=ids, text_ids=ids, implementation=implementation
    )
    args = image, text, jnp.float32(scale), jnp.float32(-3)
    value, got = jax.jit(jax.value_and_grad(loss, argnums=(0, 2, 3)))(*args)
    want_value, (want, _, *scalars) = oracle.siglip(image, text, scale, -3, ids)
    assert value == pytest.approx(want_value, rel=1e-5)
    assert np.linalg.norm(np.asarray(got[0], np.float64) - want) <= 1e-2 * np.linalg.norm(want)
    np.testing.assert_allclose(got[1:], scalars, rtol=1e-4, atol=1e-5)
    frozen = jax.jit(jax.grad(loss, argnums=1))(*args)
    _, (_, want, *_) = oracle.siglip(image, text, scale, -3, ids)
    assert np.linalg.norm(np.asarray(frozen, np.float64) - want) <= 1e-2 * np.linalg.norm(want)


def test_log1p_of_merged_terms_keeps_its_relative_precision():
    e = np.exp2(np.linspace(-100, 0, 997).reshape(-1, 1) - np.linspace(0, 20, 16)).astype(np.float32)
    u = functools.reduce(merge, jnp.asarray(e).T)
    want = np.log1p(e.astype(np.float64)).sum(1)
    assert np.abs(np.asarray(log1p(u), np.float64) / want - 1).max() <= 1e-6
