"""Compilation of Triton kernels for GPUs that this machine does not have."""

import subprocess
import sys

import cuda_plugin
import pytest

# SMEM limit of a program in KiB, by compute capability.
LIMITS = {"8.0": 163, "8.9": 99, "9.0": 227}
# CI compiles for the GPUs of the smallest limit, and one loss for Hopper GPUs.
CAPABILITIES = [pytest.param("8.0", marks=pytest.mark.full), "8.9", pytest.param("9.0", marks=pytest.mark.full)]
_PROGRAM = """
import jax, jax.numpy as jnp
from jax_triton import triton_lib
from infcl_jax.ops.pairwise.kernel_api import Window

def record(*args, compile=triton_lib.compile_ttir_to_ptx_inplace):
    result = compile(*args)
    print("bytes", result.shared_mem_bytes)
    return result

triton_lib.compile_ttir_to_ptx_inplace = record
x, y = jnp.zeros((256, 192), jnp.bfloat16), jnp.zeros((384, 192), jnp.bfloat16)
r, c, labels = jnp.zeros(256), jnp.zeros(384), jnp.zeros(256, jnp.int32)
one, six = ((0, 0),), ((0, 2), (2, 0), (1, 1), (0, 1), (1, 0), (0, 0))

CALLS
k = KERNELS.for_capability("CAPABILITY")
text = jax.jit(lambda i: calls(k, Window(i, i, 128, 256))).trace(jnp.int32(0)).lower(lowering_platforms=("cuda",))
print("calls", text.as_text().count("triton_kernel_call"))
"""


def check(capability: str, kernels: str, count: int) -> None:
    """Compile kernels for a GPU, in a separate process: the interpreter changes Triton for good.

    Args:
      capability: compute capability, a key of `LIMITS`.
      kernels: code that imports `KERNELS` and defines `calls(k, window)`, which calls the kernels `k`. It has
        features `x` and `y` of 256 rows and 384 columns, fp32 vectors `r` and `c`, int32 `labels` of the rows, and the
        pairs of terms `one` and `six`.
      count: number of calls.
    """
    pytest.importorskip("triton", "3.7")
    env = cuda_plugin.environment()
    code = _PROGRAM.replace("CALLS", kernels).replace("CAPABILITY", capability)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [int(value) for name, value in lines if name == "calls"] == [count]
    sizes = [int(value) for name, value in lines if name == "bytes"]
    assert len(sizes) == count
    assert max(sizes) <= LIMITS[capability] * 1024
