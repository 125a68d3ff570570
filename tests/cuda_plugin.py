"""JAX's plugin for CUDA, which compiles for GPUs that this machine does not have."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

# A description of an H100 for XLA, from its data sheet and the CUDA C++ Programming Guide (compute capability 9.0).
H100 = """
device_description_str: "NVIDIA H100 80GB HBM3"
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
gpu_device_info {
  cuda_compute_capability { major: 9 minor: 0 }
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  l2_cache_size: 52428800
  memory_bandwidth: 3350000000000
  device_memory_size: 84930330624
}
"""


def environment() -> dict[str, str]:
    """Variables of a process that compiles for GPUs with the plugin; skips the test without it."""
    plugin = Path(sys.prefix, "cuda")  # see the Makefile
    if not plugin.exists() and importlib.util.find_spec("jax_cuda13_plugin") is None:
        pytest.skip("needs JAX's plugin for CUDA")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = os.pathsep.join([str(plugin), *filter(None, [env.get("PYTHONPATH")])])
    return env | {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "PYTHONPATH": path}


def assembled(program: str, *arguments: str) -> tuple[int, set[str]]:
    """Run a program of this folder, which compiles for a GPU.

    Returns:
      Number of kernels that Pallas has assembled, and their different bytes of stack frames and spills.
    """
    env = environment() | {"MOSAIC_GPU_DUMP_PTXAS": "1", "JAX_ENABLE_COMPILATION_CACHE": "0"}
    command = [sys.executable, Path(__file__).with_name(program), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    report = done.stdout + done.stderr
    kernels = re.findall(r"Used (\d+) registers", report)
    return len(kernels), set(re.findall(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", report))
