"""Memory of the fused backend, by XLA's memory analysis of a program with callbacks in place of kernels and GEMMs."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from infcl_jax import clip_loss
from infcl_jax.ops.pairwise import fused_gradients
from infcl_jax.ops.pairwise.ids import order_bytes
from infcl_jax.ops.pairwise.implementations import TABLE
from infcl_jax.ops.pairwise.lse.fused import LseFused

ROWS = 1 << 16


def results(shapes, *operands):
    """Results of a callback, which is compiled but never called."""
    specs = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    return jax.pure_callback(lambda *a: None, specs, *jax.tree.leaves(operands))


def fp32(*shapes):
    return [(shape, jnp.float32) for shape in shapes]


class OpaqueKernels:
    """`Kernels` with the operands and results of the GPU kernels, and no other memory."""

    tile, depth = (256, 256), 64

    def sums(self, operands, window, pairs, *, exclude, columns, maxima):
        row, column = results(fp32((window.rows,), (window.columns,)), operands, window)
        return row, column if columns else None

    def ds(self, operands, weights, window, pairs, *, exclude, terms, moments):
        shapes = [*fp32((window.rows,), (window.columns,)), ((window.rows, terms * window.columns), jnp.bfloat16)]
        row, column, ds = results(shapes, operands, weights, window)
        return ds, *((row, column) if moments else (None, None))

    def positives(self, x, y, pairs):
        return results(fp32(x.shape[:1]), x, y)[0]

    def positive_sums(self, operands, pairs, *, maxima):
        return results(fp32(*[operands.x.shape[:1]] * 3), operands)


def matmul(a, b, contract):
    shape = a.shape[1 - contract[0]], b.shape[1 - contract[1]]
    return results(fp32(shape), a, b)[0]


@jax.custom_vjp
def tower(seed, width):
    return results([((ROWS, width.shape[0]), jnp.bfloat16)], seed)[0]


tower.defvjp(
    lambda seed, width: (tower(seed, width), seed), lambda seed, gradient: (*results(fp32(seed.shape), gradient), None)
)


@pytest.mark.slow
@pytest.mark.parametrize("width", [512, pytest.param(1024, marks=pytest.mark.full)])
def test_sorted_features_take_the_memory_of_the_features(width, monkeypatch, compiled_afresh):
    row = dataclasses.replace(TABLE["triton"], backend=lambda *_: LseFused(OpaqueKernels()), capabilities=None)
    monkeypatch.setitem(TABLE, "triton", dataclasses.replace(row, package_error=lambda: None))
    monkeypatch.setattr(fused_gradients, "matmul", matmul)

    def memory(by_id):
        def loss(image, text, ids, zeros):
            options = {"image_ids": ids, "text_ids": ids} if by_id else {}
            return clip_loss(tower(image, zeros), tower(text, zeros), 14.3, implementation="triton", **options)

        seeds = [jax.ShapeDtypeStruct((8,), jnp.float32)] * 2
        integers = [jax.ShapeDtypeStruct((size,), jnp.int32) for size in (ROWS, width)]
        compiled = jax.jit(jax.grad(loss, (0, 1))).lower(*seeds, *integers).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert 0 <= memory(True) - memory(False) <= order_bytes(ROWS)
