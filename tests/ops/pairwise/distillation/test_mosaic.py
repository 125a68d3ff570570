"""Hopper kernels of distillation, interpreted or lowered for CUDA."""

import dataclasses
import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
import pytest
from gpus import ALONE, count_kernels, described, largest_array
from gpus import lowered as lowered_for_cuda
from oracle_distillation import check, make

from infcl_jax.losses import clip_and_distillation
from infcl_jax.ops.pairwise.distillation import mosaic
from infcl_jax.ops.pairwise.distillation.block import DistillationGradient
from infcl_jax.ops.pairwise.distillation.fused import MAX_FORWARD_PAIRS, DistillationFused
from infcl_jax.ops.pairwise.distillation.mosaic import DistillationMosaic
from infcl_jax.ops.pairwise.fused_windows import WindowConfig
from infcl_jax.ops.pairwise.mosaic_schedule import Tiles, TileSchedule

SMALL = Tiles(rows=64, columns=64, stages=3, cluster=2, lag=1, store_slots=1)


def kernels(forward, backward, **options):
    return DistillationMosaic(forward, ((math.inf, backward),), sm_count=4, **options)


CLUSTERED = kernels(SMALL, SMALL, group_bytes=0)  # groups of one cluster's column tiles
WIDE = kernels(*(dataclasses.replace(SMALL, columns=n, stages=2, slices=2) for n in (192, 128)))
SINGLE = kernels(*[dataclasses.replace(SMALL, columns=128, cluster=1, stages=2, lag=0)] * 2)


def store_column_sums(terms, smem, results):
    """The same sums by Pallas: the interpreter has no Mosaic GPU. tests/gpu compares the kernel with float64."""
    for subtiles, result in zip(terms, results, strict=True):
        result[...] = jnp.concatenate([subtile.sum(0) for subtile in subtiles])


@pytest.fixture
def interpreter(interpreter, monkeypatch):
    monkeypatch.setattr(mosaic, "store_column_sums", store_column_sums)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("k", "options"),
    [
        (SINGLE, {"masked": True, "dim": 100, "teacher_dim": 40}),
        (WIDE, {"bx": 70, "by": 400, "dim": 150}),
        pytest.param(CLUSTERED, {"own": False, "teacher_dtype": jnp.float32}, marks=pytest.mark.full),
        (CLUSTERED, {"kind": "aligned", "scale": 100.0, "teacher_scale": 90.0, "masked": True}),
        (CLUSTERED, {"dtype": jnp.float32, "dim": 50, "scale": 1.0}),
    ],
    ids=["masked", "tiles of 192 and of 128 columns, slices in pairs", "another teacher", "scale 100", "fp32"],
)
def test_options_match_oracle(interpreter, k, options):
    check(DistillationFused(k), make(**{"bx": 150, "by": 140} | options))


@pytest.mark.slow
def test_windows_make_the_whole_without_gradients_of_the_rows(interpreter, monkeypatch):
    """Tests windows with remainders, in loops, with rounding per column group."""
    monkeypatch.setattr(WindowConfig, "best_size", lambda *_: (128, 128))
    backend = DistillationFused(CLUSTERED, WindowConfig(group_bytes=0))
    check(backend, make(bx=200, by=200), needs_grad=DistillationGradient(x=False), dtype=jnp.bfloat16)


@pytest.mark.parametrize("group", [1, 4, 50])
def test_groups_of_columns_contain_every_tile_once(group):
    schedule = TileSchedule(SMALL, 7 * 128, 11 * 128, 64, ((0, 0),), 4, True, group=group)
    segments, columns = jax.vmap(schedule.segment_and_columns)(jnp.arange(schedule.tasks))
    assert set(zip(segments.tolist(), columns.tolist(), strict=True)) == set(itertools.product(range(7), range(11)))
    assert columns[: min(group, 11)].tolist() == list(range(min(group, 11)))


def lowered(rows, dim, teacher_dim, dtype, argnums=(0, 1, 2), mesh=None, mask=False):
    """Lowers both losses and their gradients for Hopper GPUs, with the default implementation."""
    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    student, teacher = (
        [jax.ShapeDtypeStruct((rows, width), d)] * 2 for width, d in ((dim, dtype), (teacher_dim, jnp.bfloat16))
    )
    given = {"mask": jax.ShapeDtypeStruct((rows,), bool)} if mask else {}

    def loss(*operands, **arrays):
        return sum(clip_and_distillation(*operands, **arrays, mesh=mesh))

    with jax.sharding.use_abstract_mesh(mesh or ALONE):
        gradients = jax.jit(jax.value_and_grad(loss, argnums=argnums))
        return lowered_for_cuda(gradients, *student, scalar, *teacher, scalar, **given)


@pytest.mark.parametrize(
    ("dim", "teacher_dim", "dtype", "mask"),
    [(512, 768, jnp.bfloat16, False), pytest.param(1000, 1024, jnp.float32, True, marks=pytest.mark.full)],
)
def test_large_batches_take_few_kernels_and_little_memory(dim, teacher_dim, dtype, mask):
    """Windows have few shapes, and arrays are bounded in size.

    No array has more pairs than a window, or more elements than the features' bf16 terms.
    """
    b = 65536
    text = lowered(b, dim, teacher_dim, dtype, mask=mask)
    assert count_kernels(text) <= 3 * 4
    limit = max(WindowConfig.max_pairs, 3 * b * (max(dim, teacher_dim) + 127), MAX_FORWARD_PAIRS // 64)
    assert largest_array(text) <= limit


def test_gradients_that_are_not_needed_are_not_computed():
    """Only the scale's gradient: no GEMM of dS, except in the general path."""
    text = lowered(4096, 512, 512, jnp.bfloat16, argnums=(2,))
    general = functools.partial(re.findall, r"stablehlo.dot_general.*tensor<(\d+)x")
    assert all(int(rows) <= 4096 for rows in general(text))
    assert count_kernels(text) == 3  # sums, positives and dS


@pytest.mark.slow
def test_a_ring_of_eight_lowers():
    """Lowers inside a checked `shard_map`. Only the own block has positives."""
    text = lowered(8 * 4096, 512, 512, jnp.bfloat16, mesh=described(data=8))
    assert count_kernels(text) == 5
