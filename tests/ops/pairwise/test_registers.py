"""Registers of the Hopper kernels, assembled for an H100 that this machine does not have."""

import cuda_plugin
import pytest


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
    count, spilled = cuda_plugin.assembled("assemble_loss.py", loss, str(dim), dtype)
    assert count >= kernels and spilled == {"0"}
