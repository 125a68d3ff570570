"""LayerNorm's Hopper kernels in the CPU interpreter and lowered for CUDA.

One test needs a Hopper GPU.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import runs
from gpus import ALONE, count_kernels, described, interpreted, lowered, under
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from infcl_jax.models.transformer import TransformerBlock, TransformerConfig
from infcl_jax.ops.layer_norm import api, pallas_mosaic_gpu
from infcl_jax.ops.layer_norm.pallas_mosaic_gpu import Tiling
from infcl_jax.ops.pairwise.lse import available_implementations

EPSILON = api.LAYER_NORM_EPSILON
BF16, FP16, FP32 = jnp.dtype("bfloat16"), jnp.dtype("float16"), jnp.dtype("float32")
NAMES = ("y", "x", "scale", "bias", "added")


def given(rows, width, dtype, result):
    """Argument, scale, bias, and the cotangents of the result and of the residual."""
    rng = np.random.default_rng(0)
    x, dy, dx_residual = (rng.standard_normal((rows, width)) + 0.5 for _ in range(3))
    scale, bias = (jnp.asarray(rng.standard_normal(width), jnp.float32) for _ in range(2))
    return jnp.asarray(x, dtype), scale, bias, jnp.asarray(dy, result), jnp.asarray(dx_residual, dtype)


def expected(x, scale, bias, dy, dx_residual):
    """Result and gradients over argument, scale, bias and added vector, in float64."""
    x, scale, bias, dy, dx_residual = (np.asarray(a, np.float64) for a in (x, scale, bias, dy, dx_residual))
    inverse = 1 / np.sqrt(x.var(1, keepdims=True) + EPSILON)
    normal, dx_hat = (x - x.mean(1, keepdims=True)) * inverse, dy * scale
    mean_dx_hat, projection = dx_hat.mean(1, keepdims=True), (dx_hat * normal).mean(1, keepdims=True)
    dx = inverse * (dx_hat - mean_dx_hat - normal * projection) + dx_residual
    return normal * scale + bias, dx, (dy * normal).sum(0), dy.sum(0), dx.sum(0)


def assert_close(outputs, want, dtype, result):
    """`want` may be more than was asked for."""
    for name, got, exact in zip(NAMES, outputs, want, strict=False):
        assert got.dtype == {"y": result, "x": dtype}.get(name, FP32), name
        bound = max(float(jnp.finfo(got.dtype).eps), 3e-6) * np.abs(exact).max()
        np.testing.assert_allclose(np.asarray(got, np.float64), exact, rtol=0, atol=bound, err_msg=name)


@functools.partial(jax.jit, static_argnums=(5, 6, 7))
def with_residual(x, scale, bias, dy, dx_residual, dtype, implementation, added=True):
    added = jnp.zeros(x.shape[1], jnp.float32) if added else None
    norm = functools.partial(api.normalize_with_residual, dtype=dtype, implementation=implementation)
    (y, _), pull = jax.vjp(norm, x, scale, bias, added)
    return y, *jax.tree.leaves(pull((dy, dx_residual)))


@functools.partial(jax.jit, static_argnums=(4, 5))
def alone(x, scale, bias, dy, dtype, implementation):
    y, pull = jax.vjp(lambda *a: api.normalize(*a, dtype, implementation), x, scale, bias)
    return y, *pull(dy)


@pytest.mark.parametrize(
    ("way", "rows", "width", "dtype", "result"),
    [
        ("alone", 130, 768, BF16, BF16),
        ("residual", 37, 640, FP16, FP32),
        ("residual with a bias", 130, 768, BF16, BF16),
        ("residual with a bias", 61, 256, FP32, FP32),
        pytest.param("alone", 61, 256, FP32, FP32, marks=pytest.mark.full),
        pytest.param("residual", 8, 128, BF16, BF16, marks=pytest.mark.full),
        pytest.param("residual with a bias", 37, 640, FP16, FP32, marks=pytest.mark.full),
    ],
)
def test_kernels_match_float64(capsys, way, rows, width, dtype, result):
    arrays = given(rows, width, dtype, result)
    with interpreted(capsys):
        if way != "alone":
            outputs = with_residual(*arrays, result, "mosaic_gpu", way != "residual")
        else:
            arrays = *arrays[:-1], jnp.zeros_like(arrays[0])
            outputs = alone(*arrays[:-1], result, "mosaic_gpu")
        outputs = jax.device_get(outputs)
    assert len(outputs) == {"alone": 4, "residual": 4}.get(way, 5)
    assert_close(outputs, expected(*arrays), dtype, result)


@pytest.mark.parametrize("tiling", [Tiling(4, 1, 1), Tiling(8, 3, 2), Tiling(12, 2, 1)], ids=str)
def test_any_tiling(capsys, tiling):
    """One tile, fewer tiles than pipeline stages, and an overlapping last tile."""
    x, scale, bias, dy, dx_residual = arrays = given(45, 128, FP32, FP32)
    with interpreted(capsys):
        y, *saved = pallas_mosaic_gpu.forward(x, scale, bias, dtype=FP32, epsilon=EPSILON, sm_count=2, tiling=tiling)
        gradients = pallas_mosaic_gpu.backward(
            x, *saved, scale, dy, dx_residual, sum_rows=True, sm_count=2, tiling=tiling
        )
        outputs = jax.device_get((y, *gradients))
    assert_close(outputs, expected(*arrays), FP32, FP32)


def test_tiles_are_whole_groups_of_rows():
    with pytest.raises(ValueError, match="multiple of 4 rows per tile, got 6"):
        Tiling(rows=6, stages=2, ctas_per_sm=1)


@pytest.mark.parametrize(
    ("rows", "width", "dtype", "result"),
    [
        (99072, 1024, BF16, BF16),
        (8195, 1280, FP32, FP32),
        (8192, 1152, BF16, FP32),
    ],
)
def test_large_arrays_lower_to_two_kernels(rows, width, dtype, result):
    x, y = jax.ShapeDtypeStruct((rows, width), dtype), jax.ShapeDtypeStruct((rows, width), result)
    vector = jax.ShapeDtypeStruct((width,), jnp.float32)
    run = jax.jit(functools.partial(with_residual, dtype=result, implementation=None))
    with jax.sharding.use_abstract_mesh(ALONE):
        assert count_kernels(lowered(run, x, vector, vector, y, x)) == 2


@pytest.mark.parametrize(
    ("shape", "dtype", "mesh", "best"),
    [
        ((8192, 1024), "bfloat16", ALONE, "mosaic_gpu"),
        ((8191, 1024), "bfloat16", ALONE, "xla"),
        ((256, 50, 768), "float32", ALONE, "mosaic_gpu"),
        ((65536, 1024), "bfloat16", described(data=8), "mosaic_gpu"),
        ((32768, 1024), "bfloat16", described(data=8), "xla"),
        ((65537, 1024), "bfloat16", described(data=8), "xla"),
        ((8192, 1024), "bfloat16", described(data=8).update(axis_types=(AxisType.Manual,)), "mosaic_gpu"),
        ((65536, 1024), "bfloat16", described(data=8).update(axis_types=(AxisType.Explicit,)), "xla"),
        ((8192, 1024), "float64", ALONE, "xla"),
        ((8192, 1000), "float32", ALONE, "xla"),
        ((8192, 4096), "float32", ALONE, "xla"),
        ((1024,), "float32", ALONE, "xla"),
        ((8192, 1024), "bfloat16", None, "xla"),  # a CPU
    ],
)
def test_best_normalization(shape, dtype, mesh, best):
    with under(mesh):
        assert api.best_normalization(jax.ShapeDtypeStruct(shape, dtype), jnp.float32) == best


def test_blocks_of_a_sharded_batch_have_kernels_for_their_own_rows():
    """Trace the backward pass outside the mesh, as a training step does."""
    config = TransformerConfig(width=256, layers=1, heads=4, attention="xla", dtype="bfloat16")
    block, mesh = TransformerBlock(config, 16), described(data=8)
    x = jax.ShapeDtypeStruct((4096 * 16, 256), jnp.bfloat16)
    variables = jax.eval_shape(lambda: block.init(jax.random.key(0), jnp.zeros(x.shape, x.dtype), None, None, False))

    def gradients(variables, x):
        with jax.sharding.use_abstract_mesh(mesh):
            y, pull = jax.vjp(lambda *a: block.apply(*a, None, None, False), variables, x)
        return pull(y)

    text = lowered(jax.jit(gradients), variables, x)
    assert count_kernels(text) == 5  # norms' forward, backward with and without a bias in the sum; the activation's own
    assert "tensor<8192x256xbf16>" in text


@pytest.mark.parametrize("shape", [(40, 128), (8, 5, 128)])
def test_devices_add_up_the_gradients_of_their_rows(monkeypatch, shape):
    """The kernels' own arithmetic is replaced by XLA's: the interpreter has one device."""

    def forward(x, scale, bias, *, dtype, epsilon, sm_count):
        assert x.shape == (10, 128)
        y, *statistics = api._forward_xla(x, scale, bias, dtype, epsilon)
        return y, *(s[:, 0] for s in statistics)

    def backward(x, mean, inverse, scale, dy, dx_residual, *, sum_rows, sm_count):
        return api._backward_xla(x, mean[:, None], inverse[:, None], scale, dy, dx_residual, sum_rows)

    monkeypatch.setattr(pallas_mosaic_gpu, "forward", forward)
    monkeypatch.setattr(pallas_mosaic_gpu, "backward", backward)
    monkeypatch.setattr(api.gpu, "multiprocessors", lambda: 132)
    arrays, mesh = given(40, 128, FP32, FP32), oracle.mesh_of(4)
    own, all_of = (NamedSharding(mesh, spec) for spec in (P("data"), P()))
    sharded = [jax.device_put(a.reshape(shape), own) if a.ndim > 1 else jax.device_put(a, all_of) for a in arrays]

    @jax.jit
    def run(x, scale, bias, dy, dx_residual):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            norm = functools.partial(api.normalize_with_residual, dtype=FP32, implementation="mosaic_gpu")
            (y, _), pull = jax.vjp(norm, x, scale, bias, bias)
        return y, *pull((dy, dx_residual))

    outputs = [a.reshape(40, 128) if a.ndim > 1 else a for a in run(*sharded)]
    assert_close(outputs, expected(*arrays), FP32, FP32)


@pytest.mark.parametrize("check_vma", [True, False])
def test_kernels_lower_inside_shard_map(check_vma):
    mesh = described(data=8)
    x, scale, bias, _, _ = (jax.ShapeDtypeStruct(a.shape, a.dtype) for a in given(65536, 256, BF16, BF16))
    norm = functools.partial(api.normalize, dtype=BF16)
    run = jax.shard_map(norm, mesh=mesh, in_specs=(P("data"), P(), P()), out_specs=P("data"), check_vma=check_vma)
    with jax.sharding.use_abstract_mesh(mesh):
        assert count_kernels(lowered(jax.jit(run), x, scale, bias)) == 1


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "width", "dtype"),
    [(8, 128, BF16), (999, 768, BF16), (4097, 1024, BF16), (4097, 1024, FP32), (2051, 1280, BF16), (1001, 640, FP32)],
)
def test_kernels_on_the_gpu_match_float64_and_repeat(rows, width, dtype):
    if "mosaic_gpu" not in available_implementations():
        pytest.skip("no kernels for this device")
    arrays = given(rows, width, dtype, dtype)
    outputs = jax.device_get(with_residual(*arrays, dtype, "mosaic_gpu"))
    assert_close(outputs, expected(*arrays), dtype, dtype)
    for _ in range(3):
        assert runs.equal_bits(outputs, jax.device_get(with_residual(*arrays, dtype, "mosaic_gpu")))
