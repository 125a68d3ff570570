"""Selection of the implementations that run on the default device."""

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
    names = [*PORTABLE]
    if capability == HOPPER:
        names.append("mosaic_gpu")
    if capability in TRITON and _has_triton():
        names.append("triton")
    return tuple(names)


def best_implementation() -> str:
    """Returns the fastest constant-memory implementation for the default device.

    Warns once on a GPU without fused kernels.
    """
    available = available_implementations()
    best = next((name for name in FUSED if name in available), "xla")
    if best == "xla" and compute_capability() is not None:
        _warn_no_kernels(compute_capability())
    return best


def check_device(implementation: str, dtype: jnp.dtype) -> None:
    """Raises `ValueError` if the default device or dtype is not supported."""
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


def fused_backend(implementation: str, single_device: bool) -> Backend:
    """Returns the fused backend with the named kernels for the default device.

    Args:
      implementation: one of `FUSED`.
      single_device: whether the kernels never overlap with collectives, such as the transfers of a ring.
    """
    return _fused_backend(implementation, single_device, compute_capability(), multiprocessors())


@functools.cache
def _fused_backend(implementation: str, single_device: bool, capability: str, sm_count: int) -> Backend:
    # Imported lazily, because only GPUs need these modules.
    from infcl_jax.ops.pairwise_lse.fused import Fused

    if implementation == "triton":
        from infcl_jax.ops.pairwise_lse.triton import TritonKernels

        return Fused(TritonKernels.for_capability(capability))
    from infcl_jax.ops.pairwise_lse.pallas_mosaic_gpu import MosaicGpu

    # Collectives occupy SMs. A persistent CTA that waits for such an SM starts late and delays the whole kernel.
    return Fused(MosaicGpu(sm_count=sm_count, persistent=single_device))


def _has_triton() -> bool:
    try:
        version = importlib.metadata.version("triton")
        importlib.metadata.version("jax-triton")
    except importlib.metadata.PackageNotFoundError:
        return False
    return tuple(int(number) for number in version.split(".")[:2]) >= (3, 7)


@functools.cache
def _warn_no_kernels(capability: str) -> None:
    warnings.warn(
        f"no fused kernels for a GPU of compute capability {capability} with the packages installed; the loss runs as "
        "strips in plain XLA",
        stacklevel=2,
    )
