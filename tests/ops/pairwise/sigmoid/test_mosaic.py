"""Hopper kernels of the sigmoid loss, interpreted or lowered for CUDA."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import pytest
from gpus import ALONE, count_kernels, described, largest_array
from gpus import lowered as lowered_for_cuda
from oracle_sigmoid import check, make

from infcl_jax import siglip_loss
from infcl_jax.ops.pairwise.fused_windows import WindowConfig
from infcl_jax.ops.pairwise.mosaic_schedule import Tiles
from infcl_jax.ops.pairwise.sigmoid import mosaic
from infcl_jax.ops.pairwise.sigmoid.block import SigmoidGradient
from infcl_jax.ops.pairwise.sigmoid.fused import SigmoidFused
from infcl_jax.ops.pairwise.sigmoid.mosaic import SigmoidMosaic

SMALL = Tiles(rows=64, columns=64, stages=3, cluster=2, lag=1, store_slots=1)


def kernels(sums, d_s):
    return SigmoidMosaic(sums, ((math.inf, d_s),), sm_count=4)


CLUSTERED = kernels(SMALL, SMALL)
CONFIGURATIONS = {
    "single CTAs": kernels(*[dataclasses.replace(SMALL, cluster=1, stages=2, lag=0)] * 2),
    "clusters of two CTAs": kernels(
        Tiles(rows=128, columns=128, stages=3, cluster=2, lag=2),
        Tiles(rows=64, columns=128, stages=4, cluster=2, lag=3, store_slots=2),
    ),
}


def reciprocal(a):
    """Stand-in for the one that the interpreter cannot run."""
    return jnp.where(jnp.abs(a) > 2.0**126, 0.0, 1.0 / a)


@pytest.fixture
def interpreter(interpreter, monkeypatch):
    monkeypatch.setattr(mosaic, "reciprocal", reciprocal)


@pytest.mark.slow
@pytest.mark.parametrize("k", CONFIGURATIONS.values(), ids=CONFIGURATIONS)
def test_any_tiles_in_odd_sizes(interpreter, k):
    check(SigmoidFused(k), make(bx=270, by=140, dim=70))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"masked": True, "ids": 12, "bias": 0.0},
        pytest.param({"ids": None, "scale": 100.0, "bias": -100.0}, marks=pytest.mark.full),
        pytest.param({"kind": "aligned", "scale": 100.0, "bias": -30.0, "masked": True}, marks=pytest.mark.full),
        {"dtype": jnp.float32, "dim": 50, "scale": 1.0, "bias": 10.0, "ids": 40},
    ],
    ids=lambda options: "-".join(f"{k}={getattr(v, '__name__', v)}" for k, v in options.items()),
)
def test_options_match_oracle(interpreter, options):
    check(SigmoidFused(CLUSTERED), make(bx=150, by=140, **options))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "needs_grad"),
    [
        (jnp.bfloat16, SigmoidGradient(x=False, scale=False)),
        pytest.param(jnp.float32, SigmoidGradient(x=False, y=False, bias=False), marks=pytest.mark.full),
    ],
)
def test_only_needed_gradients(interpreter, dtype, needs_grad):
    check(SigmoidFused(CLUSTERED), make(dtype=dtype), needs_grad=needs_grad)


@pytest.mark.slow
def test_windows_make_the_whole(interpreter, monkeypatch):
    """Tests windows with remainders, in loops, with rounding per column group."""
    monkeypatch.setattr(WindowConfig, "best_size", lambda *_: (256, 128))
    check(SigmoidFused(CLUSTERED, WindowConfig(group_bytes=0)), make(bx=270, by=200, ids=9), dtype=jnp.bfloat16)


def lowered(argnums, rows, dim, dtype, mesh=None, ids=False, mask=False):
    """Lowers the loss and its gradients for Hopper GPUs."""
    features, scalar = jax.ShapeDtypeStruct((rows, dim), dtype), jax.ShapeDtypeStruct((), jnp.float32)
    options = {"image_ids": (rows, 2), "text_ids": (rows, 2)} if ids else {}
    given = {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name, shape in options.items()}
    given |= {"mask": jax.ShapeDtypeStruct((rows,), bool)} if mask else {}
    loss = functools.partial(siglip_loss, mesh=mesh, implementation="mosaic_gpu")
    with jax.sharding.use_abstract_mesh(mesh or ALONE):
        gradients = jax.jit(jax.value_and_grad(loss, argnums=argnums))
        return lowered_for_cuda(gradients, features, features, scalar, scalar, **given)


@pytest.mark.parametrize(
    ("dim", "dtype", "ids", "mask"),
    [
        (512, jnp.bfloat16, False, False),
        pytest.param(1000, jnp.float32, True, True, marks=pytest.mark.slow),
        pytest.param(1024, jnp.bfloat16, True, False, marks=pytest.mark.full),
    ],
)
def test_large_batches_take_few_kernels_and_little_memory(dim, dtype, ids, mask):
    """Windows have few shapes, and arrays are bounded in size.

    No array has more pairs than a window, or more elements than the features' bf16 terms.
    """
    b = 65536
    text = lowered((0, 1, 2, 3), b, dim, dtype, ids=ids, mask=mask)
    assert count_kernels(text) <= 2 * 4
    assert largest_array(text) <= max(WindowConfig.max_pairs, 3 * b * (dim + 127))


@pytest.mark.parametrize(("argnums", "products"), [((0, 1, 2, 3), 2), ((1,), 1), ((3,), 0)])
def test_gradients_that_are_not_needed_are_not_computed(argnums, products):
    text = lowered(argnums, 4096, 512, jnp.bfloat16)
    assert text.count("stablehlo.dot_general") == products
    assert count_kernels(text) == 2  # sums and dS


@pytest.mark.parametrize("ids", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_ring_of_eight_lowers(ids):
    """Lowers inside a checked `shard_map`. Without ids, only the own block has positives."""
    text = lowered((0, 1, 2, 3), 8 * 4096, 512, jnp.bfloat16, mesh=described(data=8), ids=ids)
    assert count_kernels(text) == (2 if ids else 4)
