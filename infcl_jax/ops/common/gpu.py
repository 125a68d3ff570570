"""Facts about the GPU that a program is traced for."""

from typing import Any

import jax

# Compute capability of H100 and H200, and the names under which described devices have it.
HOPPER = "9.0"
HOPPER_NAMES = ("H100", "H200", "GH200", "H800", "H20")


def _device() -> Any:
    """The device that is traced for: one that was only described, or the first of the default backend."""
    return jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]


def compute_capability() -> str | None:
    """CUDA compute capability of the device that is traced for, None without an NVIDIA GPU."""
    device = _device()
    if isinstance(device, jax.sharding.AbstractDevice):
        return HOPPER if any(name in device.device_kind for name in HOPPER_NAMES) else None
    return getattr(device, "compute_capability", None) if device.platform == "gpu" else None


def multiprocessors() -> int:
    """Of that device, an NVIDIA GPU."""
    device = _device()
    return getattr(device, "core_count", None) or device.num_cores
