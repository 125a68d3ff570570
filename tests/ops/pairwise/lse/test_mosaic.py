"""Hopper kernels without a GPU.

Pallas interprets them on the CPU, and they are lowered for CUDA. `tests/gpu` runs them on a GPU.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from fused_ids import check_ids
from gpus import ALONE, FINDS_RACES, count_kernels, count_primitives, described, largest_array
from gpus import lowered as lowered_for_cuda
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from infcl_jax import clip_loss, pairwise_lse, retrieval_loss
from infcl_jax.ops.pairwise import fused, fused_operands
from infcl_jax.ops.pairwise.fused_windows import WindowConfig
from infcl_jax.ops.pairwise.implementations import TABLE
from infcl_jax.ops.pairwise.kernel_api import Window
from infcl_jax.ops.pairwise.lse import dense
from infcl_jax.ops.pairwise.lse.block import LseBlock, LseCotangents, LseGradient
from infcl_jax.ops.pairwise.lse.fused import LseFused
from infcl_jax.ops.pairwise.lse.kernel_api import LseOperands
from infcl_jax.ops.pairwise.lse.mosaic import LseMosaic
from infcl_jax.ops.pairwise.mosaic_schedule import Tiles

EVERYTHING = LseGradient()
BF16 = ((0, 0),)
FP32 = ((0, 2), (2, 0), (1, 1), (0, 1), (1, 0), (0, 0))


def kernels(sums, d_s, per_sample):
    return LseMosaic(sums, ((math.inf, d_s),), per_sample=per_sample, sm_count=4)


SMALL = Tiles(rows=64, columns=64, stages=3, cluster=2, lag=1, store_slots=1)
CLUSTERED = kernels(SMALL, SMALL, SMALL)
CONFIGURATIONS = {
    "single CTAs": [dataclasses.replace(SMALL, cluster=1, stages=2, lag=0)] * 3,
    "clusters of two CTAs": [
        Tiles(rows=128, columns=128, stages=3, cluster=2, lag=2),
        Tiles(rows=64, columns=128, stages=4, cluster=2, lag=3, store_slots=2),
        SMALL,
    ],
}


def make(
    bx=128,
    by=128,
    dim=64,
    dtype=jnp.bfloat16,
    kind="random",
    scale=20.0,
    norm=1.0,
    per_sample=False,
    masked=False,
    columns=True,
    labels="random",
):
    rng = np.random.default_rng(0)
    x, y = oracle.features(kind, bx, by, dim)
    x, y = jnp.asarray(norm * x, dtype), jnp.asarray(y, dtype)
    own = {"random": rng.integers(0, by, bx), "own": np.arange(bx), "outside": rng.integers(-by, 2 * by, bx)}[labels]
    x_scale = rng.uniform(5, 30, bx) if per_sample else scale
    y_scale = rng.uniform(5, 30, by) if per_sample and columns else None
    x_mask, y_mask = (jnp.asarray(rng.random(n) < 0.8) if masked else None for n in (bx, by))
    scales = (None if s is None else jnp.asarray(s, jnp.float32) for s in (x_scale, y_scale))
    return LseBlock(x, y, *scales, x_mask, y_mask, jnp.asarray(own, jnp.int32))


def cotangent_weights(block, loss):
    """dL / d (row, column, positive): random, or those of a loss.

    The terms of a loss cancel.
    """
    bx, by = block.x.shape[0], block.y.shape[0]
    if loss:
        return np.full(bx, 0.5 / bx), np.full(by, 0.5 / bx), np.full(bx, -float(block.x_scale) / bx)
    row, column, positive = (np.random.default_rng(1).normal(size=n) / bx for n in (bx, by, bx))
    x_mask, y_mask = (1.0 if mask is None else np.asarray(mask) for mask in (block.x_mask, block.y_mask))
    return row * x_mask, column * y_mask, positive * x_mask


def expected(block, weights, exclude, columns):
    """Computes sums, positives and gradients in fp64."""
    names = [n for n in ("x", "y", "x_scale", "y_scale") if getattr(block, n) is not None]

    def value(args):
        results = dense.dense_lse(block._replace(**args), exclude=exclude, columns=columns)
        pairs = zip(results, weights, strict=True)
        return sum((jnp.nan_to_num(v, neginf=0.0) * w).sum() for v, w in pairs if v is not None), results

    with jax.enable_x64(True):
        exact = {n: jnp.asarray(np.asarray(getattr(block, n), np.float64)) for n in names}
        gradients, results = jax.jit(jax.grad(value, has_aux=True))(exact)
        return jax.device_get((results, gradients))


def run(backend, block, weights, *, exclude=False, columns=True, needs_grad=EVERYTHING, dtype=jnp.float32):
    backend = dataclasses.replace(backend, exclude=exclude, columns=columns)
    sums = jax.jit(backend.forward)(block)
    row, column, positive = (jnp.asarray(w, jnp.float32) for w in weights)
    column = column if columns else None
    cotangents = LseCotangents(sums.row, row, sums.column, column, sums.positive, positive)

    @jax.jit
    def backward(block, cotangents):
        init = backend.accumulators(block, needs_grad, dtype)
        acc = backend.backward(block, cotangents, init)
        return backend.gradient(block, cotangents, acc, needs_grad)

    return sums, backward(block, cotangents)


def assert_sums(block, sums, expected_sums):
    """Checks non-empty sums to a relative error of 1e-6."""
    for got, want, mask in zip(sums[:3], expected_sums, (block.x_mask, block.y_mask, block.x_mask), strict=True):
        if want is None:
            assert got is None
            continue
        keep = np.ones(want.shape, bool) if mask is None else np.asarray(mask)
        got = got if got is sums.positive else got.log()
        assert oracle.relative_error(np.asarray(got)[keep], want[keep]) <= 1e-6


def assert_gradients(block, gradient, want, *, needs_grad=EVERYTHING, canceling=0.0):
    for name, got in gradient._asdict().items():
        if not getattr(needs_grad, name) or name not in want:
            assert got is None
            continue
        exact = block.x.dtype == jnp.float32 or getattr(block, name).shape == (block.x.shape[0],)
        bound = (1e-5 if exact else 1e-2) * np.linalg.norm(want[name])
        assert oracle.absolute_error(got, want[name]) <= max(bound, canceling)


def check(backend, block, *, loss=False, exclude=False, columns=True, needs_grad=EVERYTHING, dtype=jnp.float32):
    weights = cotangent_weights(block, loss)
    sums, gradient = run(backend, block, weights, exclude=exclude, columns=columns, needs_grad=needs_grad, dtype=dtype)
    expected_sums, want = expected(block, weights, exclude, columns)
    assert_sums(block, sums, expected_sums)
    rounding = float(jnp.finfo(block.x.dtype).eps) * float(np.max(block.x_scale)) / np.sqrt(block.x.shape[0])
    assert_gradients(block, gradient, want, needs_grad=needs_grad, canceling=rounding * loss)


@pytest.mark.slow
@pytest.mark.parametrize("tiles", CONFIGURATIONS.values(), ids=CONFIGURATIONS)
def test_any_tiles_in_odd_sizes(interpreter, tiles):
    check(LseFused(kernels(*tiles)), make(bx=270, by=140, dim=70))


@pytest.mark.slow
def test_ctas_that_run_one_task_each(interpreter):
    check(LseFused(dataclasses.replace(CLUSTERED, persistent=False)), make(bx=150, by=140, dim=100))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"masked": True, "exclude": True, "labels": "outside"},
        {"kind": "aligned", "labels": "own", "scale": 100.0, "loss": True},
        {"dtype": jnp.float32, "dim": 70},
        pytest.param({"masked": True, "exclude": True, "per_sample": True}, marks=pytest.mark.full),
        pytest.param({"columns": False, "per_sample": True, "dim": 96}, marks=pytest.mark.full),
        # exponentials out of range: maxima
        pytest.param({"dtype": jnp.float32, "norm": 8.0, "scale": 40.0, "per_sample": True}, marks=pytest.mark.full),
        pytest.param({"columns": False, "dim": 96}, marks=pytest.mark.full),
        pytest.param({"norm": 8.0, "scale": 40.0, "per_sample": True}, marks=pytest.mark.full),
    ],
    ids=lambda options: "-".join(f"{k}={getattr(v, '__name__', v)}" for k, v in options.items()),
)
def test_options_match_oracle(interpreter, options):
    how = {name: options[name] for name in ("exclude", "columns", "loss") if name in options}
    what = {name: value for name, value in options.items() if name not in ("exclude", "loss")}
    check(LseFused(CLUSTERED), make(bx=150, by=140, **what), **how)


@pytest.mark.slow
def test_masked_rows_may_hold_anything(interpreter, monkeypatch):
    clustered = dataclasses.replace(TABLE["mosaic_gpu"], backend=lambda *_: LseFused(CLUSTERED))
    monkeypatch.setitem(TABLE, "mosaic_gpu", clustered)
    args, options, check = oracle.masked_retrieval(dtype=jnp.bfloat16)
    loss = functools.partial(retrieval_loss, implementation="mosaic_gpu")
    check(*jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(*args, **options), 1e-2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tiles", "scale", "options"),
    [
        ("single CTAs", "shared", {"multi_positive": "mean", "exclude": True}),
        pytest.param(
            "clusters of two CTAs", "per_sample", {"multi_positive": "any", "exclude": True}, marks=pytest.mark.full
        ),
        pytest.param(
            "clusters of two CTAs", "shared", {"multi_positive": "any", "exclude": False}, marks=pytest.mark.full
        ),
        pytest.param("single CTAs", "rows", {"multi_positive": "mean", "exclude": False}, marks=pytest.mark.full),
    ],
)
def test_positives_by_id(interpreter, monkeypatch, tiles, scale, options):
    fused = LseFused(kernels(*CONFIGURATIONS[tiles]))
    monkeypatch.setitem(TABLE, "mosaic_gpu", dataclasses.replace(TABLE["mosaic_gpu"], backend=lambda *_: fused))
    check_ids("mosaic_gpu", scale, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "needs_grad"),
    [
        (jnp.bfloat16, LseGradient(x=False)),
        pytest.param(jnp.float32, LseGradient(x=False, y=False), marks=pytest.mark.full),
    ],
)
def test_only_needed_gradients(interpreter, dtype, needs_grad):
    check(LseFused(CLUSTERED), make(dtype=dtype), needs_grad=needs_grad)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "group_bytes", "dtype", "options"),
    [
        pytest.param((128, 128), 0, jnp.bfloat16, {}, id="loops"),
        pytest.param(
            (128, 256), WindowConfig.group_bytes, jnp.float32, {}, id="windows of a group", marks=pytest.mark.full
        ),
        pytest.param(
            (256, 128), 0, jnp.float32, {"per_sample": True, "masked": True}, id="rests", marks=pytest.mark.full
        ),
    ],
)
def test_windows_make_the_whole(interpreter, monkeypatch, size, group_bytes, dtype, options):
    """Tests windows with remainders, in loops, with rounding per column group."""
    monkeypatch.setattr(WindowConfig, "best_size", lambda *_: size)
    monkeypatch.setattr(fused, "POSITIVE_ROWS", 256)
    check(LseFused(CLUSTERED, WindowConfig(group_bytes=group_bytes)), make(bx=340, by=200, **options), dtype=dtype)


@pytest.mark.slow
@pytest.mark.parametrize("slice_rows", [pytest.param(WindowConfig.slice_rows, marks=pytest.mark.full), 256])
def test_steps_of_a_ring_add_up(interpreter, slice_rows):
    """Two column blocks give the same result as one.

    The second block has no positives. Rows are in one slice or several.
    """
    whole, backend = make(by=256, labels="own"), LseFused(CLUSTERED, WindowConfig(slice_rows=slice_rows))
    weights = cotangent_weights(whole, loss=False)
    w = [jnp.asarray(v, jnp.float32) for v in weights]
    blocks = whole._replace(y=whole.y[:128]), whole._replace(y=whole.y[128:], labels=None)
    forward = jax.jit(backend.forward)
    backward = jax.jit(backend.backward)
    own, other = (forward(b) for b in blocks)
    assert not np.any(other.positive)
    row = own.row.merge(other.row)
    gradient, d_y = backend.accumulators(whole, EVERYTHING, jnp.float32), []
    for block, sums, column in zip(blocks, (own, other), jnp.split(w[1], 2), strict=True):
        cotangents = LseCotangents(row, w[0], sums.column, column, sums.positive, w[2])
        ones = jnp.ones_like(backend.accumulators(block, EVERYTHING, jnp.float32).y)
        gradient = backward(block, cotangents, gradient._replace(y=ones))
        d_y.append(gradient.y[: len(block.y)] - 1)
    column = jax.tree.map(lambda *a: jnp.concatenate(a), own.column, other.column)
    cotangents = LseCotangents(row, w[0], column, w[1], own.positive, w[2])
    gradient = backend.gradient(whole, cotangents, gradient._replace(y=jnp.concatenate(d_y)), EVERYTHING)
    expected_sums, want = expected(whole, weights, False, True)
    assert_sums(whole, own._replace(row=row, column=column), expected_sums)
    assert_gradients(whole, gradient, want)


@pytest.mark.parametrize("pairs", [BF16, pytest.param(FP32, marks=pytest.mark.full)], ids=["bf16", "fp32"])
def test_positives_are_the_tiles_own_values(interpreter, pairs):
    """Positives are bitwise equal to the tiles' values.

    The largest similarity of an aligned pair is its positive.
    """
    num_terms = 1 + max(p for p, _ in pairs)
    x, y = oracle.features("aligned", 256, 256, 128)
    x, y = (fused_operands._split_bf16(jnp.asarray(a), num_terms).astype(jnp.bfloat16) for a in (x, y))
    ones, zeros = jnp.ones(256, jnp.float32), jnp.zeros(256, jnp.float32)
    window = Window(jnp.int32(0), jnp.int32(0), 256, 256)
    row, column = CLUSTERED.sums(
        LseOperands(x, y, ones, zeros), window, pairs, exclude=False, columns=True, maxima=True
    )
    positive = CLUSTERED.positives(x, y, pairs)
    np.testing.assert_array_equal(row, positive)
    np.testing.assert_array_equal(column, positive)


@pytest.mark.parametrize("safe", [True, False])
def test_races_are_noticed(capsys, safe):
    """One warpgroup reads what another writes, with a barrier if `safe`."""

    def kernel(x, out, shared, written):
        warpgroup = jax.lax.axis_index("warpgroup")

        @pl.when(warpgroup == 0)
        def _():
            shared[...] = x[...]
            plgpu.barrier_arrive(written)

        @pl.when(warpgroup == 1)
        def _():
            if safe:
                plgpu.barrier_wait(written)
            out[...] = shared[...]

    x = jnp.ones((64, 64), jnp.float32)
    scratch = [plgpu.SMEM(x.shape, x.dtype), plgpu.Barrier()]
    report = ""
    with plgpu.force_gpu_interpret_mode(FINDS_RACES), jax.sharding.use_abstract_mesh(ALONE):
        copy = plgpu.kernel(kernel, out_type=x, scratch_types=scratch, num_threads=2, thread_name="warpgroup")
        try:
            jax.block_until_ready(copy(x))
        except jax.errors.JaxRuntimeError as error:  # from JAX 0.12; JAX 0.11 prints
            report = str(error)
    assert ("RACE" in report + capsys.readouterr().out) != safe


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": 96}, "multiples of 64"),
        ({"columns": 320}, "columns <= 256"),
        ({"cluster": 4}, "cluster 1 or 2"),
        ({"lag": 4}, "less than the 4 stages, got 4"),
        ({"lag": -1}, "less than the 4 stages, got -1"),
        ({"store_slots": 3}, "multiple of store_slots"),
        ({"stages": 8}, "at most 232448 bytes of shared memory, got"),
    ],
)
def test_tiles_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ValueError, match=message) as error:
        Tiles(**{"rows": 128, "columns": 128, "stages": 4, "lag": 2} | change)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("limit", [WindowConfig.max_pairs, WindowConfig.max_pairs // 2])
def test_windows_are_whole_tiles_within_the_limit(limit):
    tile = LseMosaic().tile
    for counts in [
        (tile[0], tile[1]),
        (8192, 8192),
        (1 << 20, 65536),
        (tile[0], 1 << 20),
        (77 * tile[0], 991 * tile[1]),
    ]:
        size = WindowConfig().best_size(*counts, limit, 512, tile)
        assert all(n % t == 0 and t <= n <= count for n, t, count in zip(size, tile, counts, strict=True))
        assert math.prod(size) <= limit


def lowered(argnums, rows, dim, dtype, mesh=None, by_id=False):
    """Lowers a loss and its gradients for Hopper GPUs."""
    features = jax.ShapeDtypeStruct((rows, dim), dtype)
    scale, ids = jax.ShapeDtypeStruct((), jnp.float32), jax.ShapeDtypeStruct((rows, 2), jnp.int32) if by_id else None

    def loss(*args):
        *args, ids = args
        options = {"image_ids": ids, "text_ids": ids}
        return clip_loss(*args, mesh=mesh, implementation="mosaic_gpu", **options)

    with jax.sharding.use_abstract_mesh(mesh or ALONE):
        return lowered_for_cuda(jax.jit(jax.value_and_grad(loss, argnums=argnums)), features, features, scale, ids)


FULL = [*((dim, jnp.bfloat16) for dim in (512, 640, 768, 1024, 1280)), (1000, jnp.float32), (1024, jnp.float32)]


@pytest.mark.parametrize(
    ("dim", "dtype", "by_id"),
    [
        pytest.param(512, jnp.bfloat16, True, marks=pytest.mark.slow),
        *(pytest.param(*case, False, marks=pytest.mark.full) for case in FULL),
    ],
)
def test_large_batches_take_few_kernels_and_little_memory(dim, dtype, by_id):
    """Windows have few shapes, and arrays are bounded in size.

    No array has more pairs than a window, or more elements than the features' bf16 terms.
    """
    b = 65536
    text = lowered((0, 1, 2), b, dim, dtype, by_id=by_id)
    assert count_kernels(text) <= 4 * 5 + (6 if by_id else 1)
    assert largest_array(text) <= max(WindowConfig.max_pairs, 3 * b * (dim + 127))


@pytest.mark.slow
@pytest.mark.parametrize(("argnums", "products"), [((0, 1, 2), 4), ((1,), 2), ((2,), 1)])
def test_gradients_that_are_not_needed_are_not_computed(argnums, products):
    """Only GEMMs of the needed gradients are in the program.

    A frozen tower has none in either path. The scale alone needs one in the shared path. The program contains the
    kernels of both paths.
    """
    text = lowered(argnums, 4096, 512, jnp.bfloat16)
    assert text.count("stablehlo.dot_general") == products
    assert count_kernels(text) == 6  # sums, maxima, positives and dS; sums and dS also with a shared scale


def test_calls_of_one_program_compute_only_what_each_needs():
    """Count the work of two calls on a ring, which share a trace; the second holds its columns constant."""
    mesh = described(data=2)
    features = [jax.ShapeDtypeStruct((1024, 128), jnp.bfloat16)] * 3

    def first(x, y, other):
        return clip_loss(x, y, 14.3, mesh=mesh, implementation="mosaic_gpu")

    def second(x, y, other):
        return first(other, jax.lax.stop_gradient(y), x)

    def counts(loss):
        with jax.sharding.use_abstract_mesh(mesh):
            equations = count_primitives(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(*features).jaxpr)
        return np.array([equations[name] for name in ("dot_general", "wgmma_ref", "ppermute")])

    both = counts(lambda *args: first(*args) + second(*args))
    np.testing.assert_array_equal(both, counts(first) + counts(second))
    assert counts(second)[0] < counts(first)[0]


@pytest.mark.parametrize(("by_id", "number"), [(False, 2 * 6 - 1), pytest.param(True, 9, marks=pytest.mark.slow)])
def test_a_ring_of_eight_lowers(by_id, number):
    """Lowers inside a checked `shard_map`.

    Each of two paths has kernels for blocks with and without positives by label. The kernel of the positives is the
    same. By id every block has positives: two sums, maxima and two dS. Two kernels reduce positives to sums and to
    maxima, and two to moments of a slice of the columns, for rows and for columns.
    """
    text = lowered((0, 1, 2), 8 * 4096, 512, jnp.bfloat16, mesh=described(data=8), by_id=by_id)
    assert count_kernels(text) == number


@pytest.mark.parametrize("columns", [True, pytest.param(False, marks=pytest.mark.full)])
def test_every_option_lowers(columns):
    """Tests masks, labels, per-sample scales, excluded positives and few features."""
    shapes = {"x": (1000, 100), "y": (3000, 100), "x_scale": (1000,)} | ({"y_scale": (3000,)} if columns else {})
    given = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    mask, labels = jax.ShapeDtypeStruct((1000,), bool), jax.ShapeDtypeStruct((1000,), jnp.int32)

    def value(given, mask, labels):
        options = {"positives": "exclude", "columns": columns, "implementation": "mosaic_gpu"}
        result = pairwise_lse(**given, x_mask=mask, labels=labels, **options)
        return sum(jax.tree.leaves(jax.tree.map(jnp.sum, result)))

    with jax.sharding.use_abstract_mesh(ALONE):
        text = lowered_for_cuda(jax.jit(jax.value_and_grad(value)), given, mask, labels)
    assert count_kernels(text) == 4  # sums, maxima, positives, dS
