"""Which implementations run on the device at hand, and which of them is the best."""

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp

from infcl_jax.pairwise.tiles import Backend

FUSED = ("mosaic_gpu",)
PORTABLE = ("dense", "local", "disco", "ring", "xla")
HOPPER = "9.0"
HOPPER_NAMES = ("H100", "H200", "GH200", "H800", "H20")


def available_implementations() -> tuple[str, ...]:
    """Names of `pairwise_lse`'s implementations that run on the default device."""
    return (*PORTABLE, *FUSED) if _capability() == HOPPER else PORTABLE


def best_implementation() -> str:
    """The fastest implementation of constant memory on the default device; on a GPU without kernels it says so once."""
    capability = _capability()
    if capability == HOPPER:
        return "mosaic_gpu"
    if capability is not None:
        _say_no_kernels(capability)
    return "xla"


def check_device(implementation: str, dtype: jnp.dtype) -> None:
    """Raises `ValueError` if the implementation does not run on the default device, or not with this dtype."""
    if implementation in PORTABLE:
        return
    if implementation not in available_implementations():
        raise ValueError(
            f"implementation {implementation!r} expects a Hopper GPU, got {jax.devices()[0].device_kind}; use one of "
            f"{available_implementations()} or None"
        )
    if dtype == jnp.float64:
        raise ValueError(f"implementation {implementation!r} expects bf16, fp16 or fp32 features, got {dtype}")


def fused_backend() -> Backend:
    """The backend around the fused kernels for the default device."""
    device = _device()
    return _mosaic_gpu(getattr(device, "core_count", None) or device.num_cores)


@functools.cache
def _mosaic_gpu(blocks: int) -> Backend:
    # Imported here, since only GPUs need them.
    from infcl_jax.pairwise.fused import Fused
    from infcl_jax.pairwise.mosaic_gpu import MosaicGpu

    return Fused(MosaicGpu(blocks=blocks))


def _device() -> Any:
    """The device that is traced for: one that was only described, or the first of the default backend."""
    return jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]


def _capability() -> str | None:
    """CUDA compute capability of that device, None without an NVIDIA GPU."""
    device = _device()
    if isinstance(device, jax.sharding.AbstractDevice):
        return HOPPER if any(name in device.device_kind for name in HOPPER_NAMES) else None
    return getattr(device, "compute_capability", None) if device.platform == "gpu" else None


@functools.cache
def _say_no_kernels(capability: str) -> None:
    warnings.warn(
        f"no fused kernels for a GPU of compute capability {capability}; the loss runs as strips in plain XLA",
        stacklevel=2,
    )
