"""Which implementations run on the device at hand, and which of them is the best."""

import functools
import importlib.metadata
import warnings

import jax
import jax.numpy as jnp

from infcl_jax.ops.common.gpu import HOPPER, compute_capability, multiprocessors
from infcl_jax.ops.pairwise_lse.base import Backend

FUSED = ("mosaic_gpu", "triton")
PORTABLE = ("dense", "local", "disco", "ring", "xla")
# Compute capabilities from Ampere to Hopper.
TRITON = ("8.0", "8.6", "8.7", "8.9", HOPPER)


def available_implementations() -> tuple[str, ...]:
    """Names of `pairwise_lse`'s implementations that run on the default device."""
    capability = compute_capability()
    found = [*PORTABLE]
    if capability == HOPPER:
        found.append("mosaic_gpu")
    if capability in TRITON and _has_triton():
        found.append("triton")
    return tuple(found)


def best_implementation() -> str:
    """The fastest implementation of constant memory on the default device; on a GPU without kernels it says so once."""
    available = available_implementations()
    best = next((name for name in FUSED if name in available), "xla")
    if best == "xla" and compute_capability() is not None:
        _say_no_kernels(compute_capability())
    return best


def check_device(implementation: str, dtype: jnp.dtype) -> None:
    """Raises `ValueError` if the implementation does not run on the default device, or not with this dtype."""
    if implementation in PORTABLE:
        return
    if implementation not in available_implementations():
        needs = "a Hopper GPU" if implementation == "mosaic_gpu" else "an Ampere, Ada or Hopper GPU and jax-triton"
        raise ValueError(
            f"implementation {implementation!r} expects {needs}, got {jax.devices()[0].device_kind}; use one of "
            f"{available_implementations()} or None"
        )
    if dtype == jnp.float64:
        raise ValueError(f"implementation {implementation!r} expects bf16, fp16 or fp32 features, got {dtype}")


def fused_backend(implementation: str, alone: bool) -> Backend:
    """The backend around the fused kernels of that name, for the default device.

    `alone`: nothing else runs beside the kernels, such as the transfers of a ring.
    """
    return _fused_backend(implementation, alone, compute_capability(), multiprocessors())


@functools.cache
def _fused_backend(implementation: str, alone: bool, capability: str, cores: int) -> Backend:
    # Imported here, since only GPUs need them.
    from infcl_jax.ops.pairwise_lse.fused import Fused

    if implementation == "triton":
        from infcl_jax.ops.pairwise_lse.triton import TritonKernels

        return Fused(TritonKernels.for_capability(capability))
    from infcl_jax.ops.pairwise_lse.pallas_mosaic_gpu import MosaicGpu

    # Where transfers take multiprocessors, a thread block that stays would make everyone wait for its late start.
    return Fused(MosaicGpu(blocks=cores, persistent=alone))


def _has_triton() -> bool:
    try:
        version = importlib.metadata.version("triton")
        importlib.metadata.version("jax-triton")
    except importlib.metadata.PackageNotFoundError:
        return False
    return tuple(int(part) for part in version.split(".")[:2]) >= (3, 7)


@functools.cache
def _say_no_kernels(capability: str) -> None:
    warnings.warn(
        f"no fused kernels for a GPU of compute capability {capability} with the packages installed; the loss runs as "
        "strips in plain XLA",
        stacklevel=2,
    )
