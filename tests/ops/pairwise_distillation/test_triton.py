"""Triton kernels of distillation, interpreted or compiled without a GPU."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import triton_interpreter
from gpus import ALONE
from oracle_distillation import check, make

from infcl_jax.ops.pairwise_distillation.base import NeedsGrad
from infcl_jax.ops.pairwise_distillation.fused import Fused
from infcl_jax.ops.pairwise_distillation.triton import TritonKernels
from infcl_jax.ops.pairwise_lse.triton import TritonConfig

WIDE = TritonKernels(TritonConfig(block_m=32, block_n=64, block_d=16, group_m=2), 80)
TALL = TritonKernels(TritonConfig(block_m=64, block_n=32, block_d=16, group_m=3), 80)


@pytest.fixture
def interpreter(monkeypatch):
    triton_interpreter.install(monkeypatch)
    with jax.sharding.use_abstract_mesh(ALONE):
        yield


@pytest.mark.parametrize(
    ("k", "options"),
    [
        (WIDE, {"masked": True}),
        (TALL, {"own": False, "teacher_dtype": jnp.float32, "teacher_dim": 20}),
        (WIDE, {"kind": "aligned", "scale": 100.0, "teacher_scale": 90.0, "masked": True}),
        (TALL, {"dtype": jnp.float32, "dim": 30, "scale": 1.0}),
    ],
    ids=["masked", "another teacher", "scale 100", "fp32"],
)
def test_options_match_oracle(interpreter, k, options):
    check(Fused(k), make(**{"bx": 150, "by": 130, "dim": 40} | options), rounding=2)


@pytest.mark.parametrize("needs_grad", [NeedsGrad(x=False, scale=False), NeedsGrad(x=False, y=False)])
def test_only_needed_gradients(interpreter, needs_grad):
    check(Fused(WIDE), make(dim=16, teacher_dim=16), needs_grad=needs_grad, rounding=2)


# SMEM limit of a program in KiB, by compute capability.
LIMITS = {80: 163, 89: 99, 90: 227}
COMPILE = """
import jax, jax.numpy as jnp
from jax_triton import triton_lib
from infcl_jax.ops.pairwise_distillation.fused_kernel_api import Operands, Weights
from infcl_jax.ops.pairwise_distillation.triton import TritonKernels
from infcl_jax.ops.pairwise_lse.fused_kernel_api import Window

def record(*args, compile=triton_lib.compile_ttir_to_ptx_inplace):
    result = compile(*args)
    print(result.shared_mem_bytes)
    return result

triton_lib.compile_ttir_to_ptx_inplace = record
x, y = jnp.zeros((256, 192), jnp.bfloat16), jnp.zeros((384, 192), jnp.bfloat16)
r, c, scale = jnp.zeros(256), jnp.zeros(384), jnp.ones(1)
labels = jnp.zeros(256, jnp.int32)
one, six = ((0, 0),), ((0, 2), (2, 0), (1, 1), (0, 1), (1, 0), (0, 0))
k = TritonKernels.for_capability("CAPABILITY")

def f(i):
    own = Operands(x, y, x, y, scale, scale, r, r, None, labels, labels[:4], labels[:4])
    other = own._replace(column_masked=c, labels=None, lowest=None, highest=None)
    w = Window(i, i, 128, 256)
    return (
        k.sums(own, w, (one, six)),
        k.sums(other, w, (six, one)),
        k.ds(own, Weights(r, c, r, c, r), w, (one, one), terms=1, moments=True),
        k.ds(other, Weights(r, c, r, c, None), w, (six, one), terms=2, moments=False),
    )

text = jax.jit(f).trace(jnp.int32(0)).lower(lowering_platforms=("cuda",)).as_text()
assert text.count("triton_kernel_call") == 4, text
"""


@pytest.mark.parametrize("capability", LIMITS)
def test_kernels_compile_without_a_gpu(capability):
    """Compiles without running, in a separate process.

    The interpreter changes Triton for the rest of a process.
    """
    pytest.importorskip("triton", "3.7")
    plugin = Path(sys.prefix, "cuda")  # see the Makefile
    if not plugin.exists() and importlib.util.find_spec("jax_cuda13_plugin") is None:
        pytest.skip("needs JAX's plugin for CUDA")
    env = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"}
    env |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{plugin}{os.pathsep}{env.get('PYTHONPATH', '')}"}
    code = COMPILE.replace("CAPABILITY", f"{capability / 10}")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    sizes = [int(size) for size in done.stdout.split()]
    assert len(sizes) == 4
    assert max(sizes) <= LIMITS[capability] * 1024
