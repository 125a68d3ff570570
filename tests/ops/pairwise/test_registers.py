"""Registers of the Hopper kernels, assembled for an H100 that this machine does not have."""

import re
import subprocess
import sys
from pathlib import Path

import cuda_plugin
import pytest

PROGRAM = Path(cuda_plugin.__file__).with_name("assemble_loss.py")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "dim", "dtype", "kernels"),
    [
        ("clip", 512, "bfloat16", 4),
        ("by_id", 512, "bfloat16", 4),
        ("per_sample", 1024, "float32", 3),
        ("guided", 512, "bfloat16", 4),
        ("siglip", 768, "float32", 2),
        ("distillation", 512, "bfloat16", 3),
    ],
)
def test_kernels_spill_no_registers(loss, dim, dtype, kernels):
    env = cuda_plugin.environment() | {"MOSAIC_GPU_DUMP_PTXAS": "1", "JAX_ENABLE_COMPILATION_CACHE": "0"}
    command = [sys.executable, PROGRAM, loss, str(dim), dtype]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    report = done.stdout + done.stderr
    assert len(re.findall(r"Used (\d+) registers", report)) >= kernels
    assert set(re.findall(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", report)) == {"0"}
