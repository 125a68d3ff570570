"""Implementations of the pairwise sigmoid loss.

Requirements, ranks and workspace are those of the rows of the same names in the table of `pairwise_lse`.
"""

from collections.abc import Callable

from infcl_jax.ops.common.gpu import compute_capability, multiprocessors
from infcl_jax.ops.pairwise_lse.fused_windows import WindowConfig
from infcl_jax.ops.pairwise_sigmoid.base import Backend
from infcl_jax.ops.pairwise_sigmoid.xla import XlaStrips


def _mosaic_gpu(single_device: bool) -> Backend:
    # Imported lazily, because only GPUs need these modules.
    from infcl_jax.ops.pairwise_sigmoid.fused import Fused
    from infcl_jax.ops.pairwise_sigmoid.pallas_mosaic_gpu import MosaicGpu

    sm_count = multiprocessors()
    return Fused(MosaicGpu(sm_count=sm_count, persistent=single_device), WindowConfig(sm_count))


def _triton(single_device: bool) -> Backend:
    # Imported lazily, because only GPUs need these modules.
    from infcl_jax.ops.pairwise_sigmoid.fused import Fused
    from infcl_jax.ops.pairwise_sigmoid.triton import TritonKernels

    return Fused(TritonKernels.for_capability(compute_capability()), WindowConfig(multiprocessors()))


# `backend(single_device)`, see `pairwise_lse.implementations.Implementation.backend`.
BACKENDS: dict[str, Callable[[bool], Backend]] = {
    "ring": lambda _: XlaStrips(rows=None),
    "xla": lambda _: XlaStrips(),
    "mosaic_gpu": _mosaic_gpu,
    "triton": _triton,
}
SIGMOID_IMPLEMENTATIONS = tuple(BACKENDS)
