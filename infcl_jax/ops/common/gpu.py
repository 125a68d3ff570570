"""Properties of the target GPU, and limits of Hopper GPUs."""

import functools
import logging
from typing import Any

import jax

_logger = logging.getLogger(__name__)

# Compute capability of Hopper GPUs, and their device kinds in an abstract mesh.
HOPPER = "9.0"
HOPPER_NAMES = ("H100", "H200", "GH200", "H800", "H20")
# Bytes of SMEM available to the CTAs of a Hopper SM: 227 KiB (CUDA C++ Programming Guide, compute capability 9.0).
SHARED_MEMORY = 227 * 1024
# Bytes of a CTA's SMEM that kernels leave to barriers and alignment.
RESERVED_BYTES = 2048
# Bytes of a row of the widest SMEM swizzle of TMA and wgmma (PTX ISA, `tensorMap` swizzling modes).
SWIZZLE_BYTES = 128
# SMs of an H100 or H200 SXM (NVIDIA H100 Tensor Core GPU Architecture).
SM_COUNT = 132
# Rows of a device from which kernels over rows are chosen. With fewer, XLA's fused ops take no longer, and a run starts
# sooner, because Python lowers a kernel anew for each shape (docs/archive/measurements.md).
FEWEST_ROWS = 8192
WARPS = 4  # warps of a warpgroup
LANES = 32  # threads of a warp
# Bytes of workspace that cuBLAS allocates on Hopper GPUs (cuBLAS documentation, `cublasSetWorkspace`).
CUBLAS_WORKSPACE = 32 << 20


def target_device() -> Any:
    """Return the target: the device of the abstract mesh, or the default device."""
    return jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]


def compute_capability() -> str | None:
    """CUDA compute capability of the target GPU; None without an NVIDIA GPU."""
    device = target_device()
    if isinstance(device, jax.sharding.AbstractDevice):
        return HOPPER if any(name in device.device_kind for name in HOPPER_NAMES) else None
    return getattr(device, "compute_capability", None) if device.platform == "gpu" else None


def multiprocessors() -> int:
    """Number of SMs of the target GPU."""
    device = target_device()
    return getattr(device, "core_count", None) or device.num_cores


@functools.cache
def log_fallback(op: str, array: str, supported: str) -> None:
    """Log once per process and array that an op runs without its Hopper kernels.

    It is a warning on a GPU. Programs that are traced elsewhere for a described GPU are only planned.
    """
    level = logging.WARNING if jax.default_backend() == "gpu" else logging.INFO
    _logger.log(level, "%s of %s runs without Hopper kernels; they support %s", op, array, supported)
