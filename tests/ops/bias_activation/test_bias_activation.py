"""Hopper kernels of biased activations in the CPU interpreter and lowered for CUDA.

One test needs a Hopper GPU.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import runs
from gpus import ALONE, count_kernels, described, interpreted, lowered, under
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from infcl_jax.ops.bias_activation import api, pallas_mosaic_gpu
from infcl_jax.ops.bias_activation.api import activate
from infcl_jax.ops.common.row_pipeline import Tiling
from infcl_jax.ops.pairwise.lse import available_implementations

BF16, FP16, FP32 = jnp.dtype("bfloat16"), jnp.dtype("float16"), jnp.dtype("float32")
NAMES = ("y", "x", "bias")


def given(rows, width, dtype):
    """Argument, bias, cotangent of the result; some arguments are far out."""
    rng = np.random.default_rng(0)
    x, dy = (rng.standard_normal((rows, width)) for _ in range(2))
    x[:2] = np.linspace(-40, 40, 2 * width).reshape(2, width)[: len(x)]
    return jnp.asarray(2 * x, dtype), jnp.asarray(rng.standard_normal(width), jnp.float32), jnp.asarray(dy, dtype)


def expected(x, bias, dy, name):
    """The result and the gradients of argument and bias, in float64."""
    x, bias, dy = (np.asarray(a, np.float64) for a in (x, bias, dy))
    x = x + bias
    if name == "gelu":
        cdf = 0.5 * np.vectorize(math.erfc)(-x / math.sqrt(2))
        slope = cdf + x * np.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    else:
        u, du = 1.702 * x, 1.702
        if name == "gelu_tanh":
            a = 2 * math.sqrt(2 / math.pi)
            u, du = a * (x + 0.044715 * x**3), a * (1 + 3 * 0.044715 * x**2)
        cdf = 0.5 * (1 + np.tanh(u / 2))
        slope = cdf * (1 + du * x * (1 - cdf))
    return x * cdf, dy * slope, (dy * slope).sum(0)


def assert_close(outputs, want, dtype):
    for key, got, exact in zip(NAMES, outputs, want, strict=True):
        of = FP32 if key == "bias" else dtype
        assert got.dtype == of, key
        # Rounding is relative; the error function is off by 1.5e-7, which up to 80 is multiplied by. The sums over the
        # rows add such errors of either sign.
        sums = key == "bias"
        rtol, atol = (1e-5, 5e-6 * math.sqrt(len(outputs[0]))) if sums else (0.51 * float(jnp.finfo(of).eps), 2e-5)
        np.testing.assert_allclose(np.asarray(got, np.float64), exact, rtol=rtol, atol=atol, err_msg=key)


@functools.partial(jax.jit, static_argnums=(3, 4))
def with_gradients(x, bias, dy, name, implementation):
    y, pull = jax.vjp(lambda x, bias: activate(x, bias, name, implementation), x, bias)
    return y, *pull(dy)


@pytest.mark.parametrize(
    ("name", "rows", "width", "dtype"),
    [
        *(("gelu", 37, 768, BF16), ("gelu", 30, 512, FP16)),
        *(("quick_gelu", 2, 256, BF16), ("gelu_tanh", 30, 512, FP16)),
    ],
)
def test_kernels_match_float64(capsys, name, rows, width, dtype):
    arrays = given(rows, width, dtype)
    with interpreted(capsys):
        outputs = jax.device_get(with_gradients(*arrays, name, "mosaic_gpu"))
    assert_close(outputs, expected(*arrays, name), dtype)


@pytest.mark.parametrize("tiling", [Tiling(4, 1, 1), Tiling(8, 3, 2), Tiling(12, 2, 1)], ids=str)
def test_any_tiling(capsys, tiling):
    """One tile, fewer tiles than pipeline stages, and an overlapping last tile."""
    x, bias, dy = arrays = given(23, 256, BF16)
    how = {"name": "gelu", "sm_count": 2, "tiling": tiling}
    with interpreted(capsys):
        outputs = pallas_mosaic_gpu.forward(x, bias, **how), *pallas_mosaic_gpu.backward(x, bias, dy, **how)
        outputs = jax.device_get(outputs)
    assert_close(outputs, expected(*arrays, "gelu"), BF16)


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "quick_gelu"])
def test_what_is_not_finite_stays_so(capsys, name):
    values = jnp.asarray([np.inf, -np.inf, np.nan, np.inf], BF16)
    x, bias = jnp.broadcast_to(values[:, None], (4, 256)), jnp.zeros(256)
    with interpreted(capsys):
        outputs = jax.device_get(activate(x, bias, name, "mosaic_gpu"))
    assert not np.isfinite(outputs.astype(np.float32)).any()


@pytest.mark.parametrize("shape", [(4096, 77, 2048), (8195, 5120)])
def test_large_arrays_lower_to_two_kernels(shape):
    x, bias = jax.ShapeDtypeStruct(shape, BF16), jax.ShapeDtypeStruct(shape[-1:], jnp.float32)
    run = functools.partial(with_gradients, name="gelu", implementation=None)
    with jax.sharding.use_abstract_mesh(ALONE):
        assert count_kernels(lowered(jax.jit(run), x, bias, x)) == 2


@pytest.mark.parametrize(
    ("shape", "dtype", "mesh", "best"),
    [
        ((8192, 4096), "bfloat16", ALONE, "mosaic_gpu"),
        ((8191, 4096), "bfloat16", ALONE, "xla"),
        ((256, 50, 3072), "float16", ALONE, "mosaic_gpu"),
        ((65536, 2048), "bfloat16", described(data=8), "mosaic_gpu"),
        ((65537, 2048), "bfloat16", described(data=8), "xla"),
        ((8192, 4096), "float32", ALONE, "xla"),  # erf to its last digit
        ((8192, 4000), "bfloat16", ALONE, "xla"),
        ((8192, 8192), "bfloat16", ALONE, "xla"),
        ((1, 4096), "bfloat16", ALONE, "xla"),
        ((4096,), "bfloat16", ALONE, "xla"),
        ((8192, 4096), "bfloat16", None, "xla"),  # a CPU
    ],
)
def test_best_activation(shape, dtype, mesh, best):
    with under(mesh):
        assert api.best_activation(jax.ShapeDtypeStruct(shape, dtype)) == best


@pytest.mark.parametrize("shape", [(40, 128), (8, 5, 128)])
def test_devices_add_up_the_gradients_of_their_rows(monkeypatch, shape):
    """The kernels' own arithmetic is replaced by XLA's: the interpreter has one device."""

    def forward(x, bias, *, name, sm_count):
        assert x.shape == (10, 128)
        return activate(x, bias, name, "xla")

    def backward(x, bias, dy, *, name, sm_count):
        return api._backward_xla(x, bias, dy, name)

    monkeypatch.setattr(pallas_mosaic_gpu, "forward", forward)
    monkeypatch.setattr(pallas_mosaic_gpu, "backward", backward)
    monkeypatch.setattr(api.gpu, "multiprocessors", lambda: 132)
    arrays, mesh = given(40, 128, BF16), oracle.mesh_of(4)
    own, all_of = (NamedSharding(mesh, spec) for spec in (P("data"), P()))
    sharded = [jax.device_put(a.reshape(shape), own) if a.ndim > 1 else jax.device_put(a, all_of) for a in arrays]

    @jax.jit
    def run(*arrays):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return with_gradients(*arrays, "gelu", "mosaic_gpu")

    y, dx, d_bias = run(*sharded)
    outputs, (want_y, want_x, _) = (y.reshape(40, 128), dx.reshape(40, 128), d_bias), expected(*arrays, "gelu")
    assert_close(outputs, (want_y, want_x, np.asarray(outputs[1], np.float64).sum(0)), BF16)  # XLA adds what is rounded


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "quick_gelu"])
@pytest.mark.parametrize(
    ("rows", "width", "dtype"),
    [(2, 256, BF16), (999, 768, BF16), (4097, 3072, BF16), (4097, 4096, FP16), (2051, 5120, BF16), (3001, 2048, BF16)],
)
def test_kernels_on_the_gpu_match_float64_and_repeat(rows, width, dtype, name):
    if "mosaic_gpu" not in available_implementations():
        pytest.skip("no kernels for this device")
    arrays = given(rows, width, dtype)
    outputs = jax.device_get(with_gradients(*arrays, name, "mosaic_gpu"))
    assert_close(outputs, expected(*arrays, name), dtype)
    for _ in range(3):
        assert runs.equal_bits(outputs, jax.device_get(with_gradients(*arrays, name, "mosaic_gpu")))
