"""Fallback of shapes without Hopper kernels to XLA, with one line in the log."""

import functools
import logging
import re

import jax
import jax.numpy as jnp
import pytest
from gpus import ALONE, count_kernels, lowered

from infcl_jax.ops.attention.api import attend
from infcl_jax.ops.bias_activation import pallas_mosaic_gpu as bias_activation
from infcl_jax.ops.bias_activation.api import activate
from infcl_jax.ops.common.gpu import FEWEST_ROWS, log_fallback
from infcl_jax.ops.layer_norm import pallas_mosaic_gpu as layer_norm
from infcl_jax.ops.layer_norm.api import normalize_with_residual


def attention(x, implementation=None):
    return attend(x, x, x, causal=True, implementation=implementation)


def activation(x, implementation=None):
    return activate(x, jnp.zeros(x.shape[1]), "gelu", implementation)


def norm(x, implementation=None, dtype=None):
    vector = jnp.zeros(x.shape[1])
    return normalize_with_residual(x, vector, vector, vector, jnp.dtype(dtype or x.dtype), implementation)


def lower_with_gradient(op, shape, dtype):
    def with_gradient(x):
        y, pull = jax.vjp(op, x)
        return y, pull(jax.tree.map(jnp.ones_like, y))

    with jax.sharding.use_abstract_mesh(ALONE):
        return count_kernels(lowered(jax.jit(with_gradient), jax.ShapeDtypeStruct(shape, dtype)))


@pytest.mark.parametrize(
    ("op", "shape", "dtype", "line"),
    [
        (norm, (64, 1), "bfloat16", "LayerNorm of width 1 in bfloat16 .* multiples of 128 up to 1280"),
        (norm, (64, 100), "float16", "LayerNorm of width 100 in float16"),
        (norm, (64, 127), "float32", "LayerNorm of width 127 in float32"),
        (norm, (64, 192), "bfloat16", "LayerNorm of width 192"),
        (norm, (64, 1408), "float32", "LayerNorm of width 1408"),
        (functools.partial(norm, dtype="float8_e5m2"), (64, 256), "bfloat16", "width 256 in bfloat16 and float8_e5m2"),
        (activation, (64, 1), "float16", "activation of width 1 in float16 .* multiples of 256 up to 5120"),
        (activation, (64, 384), "bfloat16", "activation of width 384 in bfloat16"),
        (activation, (64, 5376), "bfloat16", "activation of width 5376"),
        (activation, (64, 1024), "float32", "activation of width 1024 in float32 .* support bf16 or fp16"),
        (attention, (8, 50, 2, 63), "bfloat16", "attention of 50 positions and heads of 63 channels in bfloat16"),
        (attention, (8, 50, 2, 128), "float16", "heads of 128 channels in float16 .* heads of 64 channels"),
        (attention, (8, 321, 2, 64), "bfloat16", "attention of 321 positions .* at most 320 positions"),
        (attention, (8, 50, 2, 64), "float32", "in float32 .* support bf16 or fp16"),
    ],
)
def test_shapes_without_kernels_run_in_xla_and_are_logged_once(caplog, op, shape, dtype, line):
    log_fallback.cache_clear()
    with caplog.at_level(logging.INFO, log_fallback.__module__):
        for _ in range(2):
            assert lower_with_gradient(op, shape, dtype) == 0
    (record,) = caplog.records
    assert re.search(line, record.getMessage())


@pytest.mark.parametrize(("backend", "level"), [("gpu", "WARNING"), ("cpu", "INFO")])
def test_only_a_gpu_without_kernels_is_warned_of(caplog, monkeypatch, backend, level):
    log_fallback.cache_clear()
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    with caplog.at_level(logging.INFO, log_fallback.__module__):
        log_fallback("LayerNorm", "width 100", "others")
    assert [record.levelname for record in caplog.records] == [level]


@pytest.mark.parametrize(("op", "shape"), [(norm, (FEWEST_ROWS - 1, 256)), (activation, (1, 256))])
def test_few_rows_run_in_xla(caplog, op, shape):
    """No line: so few rows cost nothing."""
    with caplog.at_level(logging.INFO, log_fallback.__module__):
        assert lower_with_gradient(op, shape, "bfloat16") == 0
    assert not caplog.records


@pytest.mark.parametrize(
    ("op", "shape", "dtype"),
    [
        (norm, (64, 100), "bfloat16"),
        (norm, (7, 128), "bfloat16"),
        (activation, (64, 384), "bfloat16"),
        (activation, (64, 256), "float32"),
        (activation, (1, 256), "float16"),
    ],
)
def test_a_kernel_by_name_refuses_shapes_that_it_does_not_support(op, shape, dtype):
    with pytest.raises(ValueError, match=r"expected bf16.* for .* 'mosaic_gpu', got .*; use 'xla' or None") as error:
        lower_with_gradient(functools.partial(op, implementation="mosaic_gpu"), shape, dtype)
    assert "\n" not in str(error.value)


WIDTHS = [
    *((norm, n) for n in range(layer_norm.WIDTH_MULTIPLE, layer_norm.WIDEST + 1, layer_norm.WIDTH_MULTIPLE)),
    *(
        (activation, n)
        for n in range(bias_activation.WIDTH_MULTIPLE, bias_activation.WIDEST + 1, bias_activation.WIDTH_MULTIPLE)
    ),
]


@pytest.mark.parametrize(
    ("op", "width"),
    [pytest.param(*case, marks=[pytest.mark.full] * (n % 9 != 0)) for n, case in enumerate(WIDTHS)],
)
def test_every_supported_width_lowers(op, width):
    shape = FEWEST_ROWS, width
    for dtype in ("bfloat16", "float16", "float32"):
        is_supported = op is norm or dtype != "float32"
        assert lower_with_gradient(op, shape, dtype) == 2 * is_supported
    if op is norm:
        assert lower_with_gradient(functools.partial(norm, dtype="float32"), shape, "bfloat16") == 2
