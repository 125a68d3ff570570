"""Table of the implementations of `pairwise_lse`, and selection for the default device.

An implementation is a strategy, which moves features between devices, and a backend, which computes one block.
"""

import dataclasses
import functools
import importlib
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from infcl_jax.ops.common.derivatives import only_reverse
from infcl_jax.ops.common.gpu import HOPPER, compute_capability, multiprocessors
from infcl_jax.ops.pairwise_lse import all_gather, ring
from infcl_jax.ops.pairwise_lse.base import Array, AxisName, Backend, Block, Results, Strategy
from infcl_jax.ops.pairwise_lse.fused_windows import WindowConfig
from infcl_jax.ops.pairwise_lse.id_order import order_bytes, sort_block
from infcl_jax.ops.pairwise_lse.vjp import Plan, blockwise
from infcl_jax.ops.pairwise_lse.xla_chunked import XlaStrips

# Compute capabilities of the Triton kernels, from Ampere to Hopper.
TRITON_CAPABILITIES = ("8.0", "8.6", "8.7", "8.9", HOPPER)


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One row of the table.

    Attributes:
      strategy: a `Strategy`, or a function with the arguments and results of `all_gather.dense` that JAX
        differentiates.
      workspace: functions with the arguments of `workspace_bytes`, which is the sum of their results.
      backend: `backend(single_device)` creates the backend of a `Strategy` for the default device. With
        `single_device`, its kernels never overlap with collectives, such as the transfers of a ring.
      rank: the available implementation with the highest rank is the default. Rank 0 is never the default, see
        `quadratic`.
      requires: required device and packages, for the error message; None: any device.
      capabilities: compute capabilities of the supported GPUs; None: any device.
      package_error: function that returns why the required packages cannot be used, in one line; None if they can.
      fp64: whether fp64 features are supported.
      sorted_ids: whether the backend needs rows and columns that are sorted by id, see `id_order`.
    """

    strategy: Strategy | Callable[..., Results]
    workspace: tuple[Callable[[int, int, Any, int], int], ...]
    backend: Callable[[bool], Backend] | None = None
    rank: int = 0
    requires: str | None = None
    capabilities: tuple[str, ...] | None = None
    package_error: Callable[[], str | None] = lambda: None
    fp64: bool = True
    sorted_ids: bool = False

    def supports_gpu(self, capability: str | None) -> bool:
        """Return whether a compute capability is supported; None without an NVIDIA GPU."""
        return self.capabilities is None or capability in self.capabilities

    def runs_on(self, capability: str | None) -> bool:
        """Return whether the device and the installed packages meet the requirements."""
        return self.supports_gpu(capability) and self.package_error() is None

    @property
    def quadratic(self) -> bool:
        """True if the workspace is quadratic in the batch size."""
        return self.rank == 0

    def compute(
        self,
        block: Block,
        counts: tuple[Array | None, Array | None],
        *,
        axis_name: AxisName | None,
        exclude: bool,
        columns: bool,
    ) -> Results:
        """Compute log-sum-exps and positives.

        `counts` are the numbers of positives by id of rows and columns. Other arguments and results are those of
        `all_gather.dense`.
        """
        if not isinstance(self.strategy, Strategy):
            return self.strategy(block, axis_name=axis_name, exclude=exclude, columns=columns)
        backend = self.backend(not ring.ring_axes(axis_name))
        plan = Plan(self.strategy, backend, axis_name, exclude, columns)
        block = only_reverse(block, 'use implementation="dense" or "local", which JAX differentiates in every mode')
        if block.x_ids is None or not self.sorted_ids:
            return blockwise(plan, *block, *counts)
        block, x_order, y_order = sort_block(block)
        row, column, positives = blockwise(plan, *block, x_order.sort(counts[0]), y_order.sort(counts[1]))
        row, row_positives = jax.tree.map(x_order.restore, (row, positives[0]))
        column, column_positives = jax.tree.map(y_order.restore, (column, positives[1]))
        return row, column, (row_positives, column_positives)

    def workspace_bytes(self, rows: int, width: int, dtype: Any, devices: int, *, by_id: bool = False) -> int:
        """Estimate the workspace on each device.

        Args:
          rows: rows of the batch on each device.
          width: feature dimension D.
          dtype: dtype of the features.
          devices: number of devices over which the batch is sharded.
          by_id: whether positives are given by id.
        """
        workspace = sum(count(rows, width, dtype, devices) for count in self.workspace)
        return workspace + (order_bytes(rows) if by_id and self.sorted_ids else 0)


def fused_backends(package: str) -> dict[str, Callable[[bool], Any]]:
    """Return the backends of an op's fused kernels, by implementation; see `Implementation.backend`.

    Args:
      package: name of the op in `infcl_jax.ops`. Its modules `fused`, `pallas_mosaic_gpu` and `triton` are imported
        when a backend is created, because only GPUs need them.
    """

    def module(name: str) -> Any:
        return importlib.import_module(f"infcl_jax.ops.{package}.{name}")

    def mosaic_gpu(single_device: bool) -> Any:
        # Collectives occupy SMs. A persistent CTA that waits for such an SM delays the end of the whole kernel.
        sm_count = multiprocessors()
        kernels = module("pallas_mosaic_gpu").MosaicGpu(sm_count=sm_count, persistent=single_device)
        return module("fused").Fused(kernels, WindowConfig(sm_count))

    def triton(single_device: bool) -> Any:
        kernels = module("triton").TritonKernels.for_capability(compute_capability())
        return module("fused").Fused(kernels, WindowConfig(multiprocessors()))

    return {"mosaic_gpu": mosaic_gpu, "triton": triton}


@functools.cache
def _triton_error() -> str | None:
    """Return why Triton or jax-triton cannot be used; None if they can."""
    # Imported lazily, because only GPUs need these modules.
    from infcl_jax.ops.pairwise_lse.triton import load

    try:
        load()
    except ImportError as error:
        return str(error)
    return None


# Backends of the rings in plain XLA. `pairwise_sigmoid` uses the same strip sizes.
XLA_RINGS = {"ring": XlaStrips(rows=None), "xla": XlaStrips()}

_DISCO = Strategy(all_gather.disco_forward, all_gather.disco_backward)
_RING = Strategy(ring.forward, ring.backward)
_FUSED = fused_backends("pairwise_lse")

# Error messages list the implementations in this order.
TABLE = {
    "dense": Implementation(all_gather.dense, (all_gather.gathered_bytes, all_gather.dense_bytes)),
    "local": Implementation(all_gather.local, (all_gather.gathered_bytes, all_gather.local_bytes)),
    "disco": Implementation(
        _DISCO, (all_gather.gathered_bytes, all_gather.disco_bytes), lambda _: XlaStrips(rows=None)
    ),
    "ring": Implementation(
        _RING, (ring.rotating_bytes, XLA_RINGS["ring"].workspace_bytes), lambda _: XLA_RINGS["ring"]
    ),
    "xla": Implementation(
        _RING, (ring.rotating_bytes, XLA_RINGS["xla"].workspace_bytes), lambda _: XLA_RINGS["xla"], rank=1
    ),
    "mosaic_gpu": Implementation(
        _RING,
        (ring.rotating_bytes, WindowConfig().workspace_bytes),
        _FUSED["mosaic_gpu"],
        rank=3,
        requires="a Hopper GPU",
        capabilities=(HOPPER,),
        fp64=False,
        sorted_ids=True,
    ),
    "triton": Implementation(
        _RING,
        (ring.rotating_bytes, WindowConfig().workspace_bytes),
        _FUSED["triton"],
        rank=2,
        requires="an Ampere, Ada or Hopper GPU and jax-triton",
        capabilities=TRITON_CAPABILITIES,
        package_error=_triton_error,
        fp64=False,
        sorted_ids=True,
    ),
}
IMPLEMENTATIONS = TABLE.keys()  # a view, which has rows that are added later


def available_implementations() -> tuple[str, ...]:
    """Names of the implementations that run on the default device.

    Examples:
      >>> available_implementations()
      ('dense', 'local', 'disco', 'ring', 'xla')
    """
    capability = compute_capability()
    return tuple(name for name, row in TABLE.items() if row.runs_on(capability))


def best_implementation(dtype: Any = jnp.float32) -> str:
    """Return the fastest implementation for the default device.

    Its workspace is linear in the batch size. Warns once on a GPU without fused kernels.

    Args:
      dtype: dtype of the features.
    """
    capability = compute_capability()
    names = [name for name, row in TABLE.items() if dtype != jnp.float64 or row.fp64]
    by_rank = sorted(names, key=lambda name: TABLE[name].rank, reverse=True)
    best = next(name for name in by_rank if TABLE[name].runs_on(capability))
    if TABLE[best].requires is None and dtype != jnp.float64 and capability is not None:
        _warn_no_kernels(capability)
    return best


def check_device(implementation: str, dtype: Any) -> None:
    """Raise `ValueError` unless the default device and the dtype are supported."""
    row = TABLE[implementation]
    if not row.runs_on(capability := compute_capability()):
        reason = row.package_error() if row.supports_gpu(capability) else None
        raise ValueError(
            f"implementation {implementation!r} expects {row.requires}, got {jax.devices()[0].device_kind}"
            f"{f' ({reason})' if reason else ''}; use one of {available_implementations()} or None"
        )
    if dtype == jnp.float64 and not row.fp64:
        raise ValueError(f"implementation {implementation!r} expects bf16, fp16 or fp32 features, got {dtype}")


@functools.cache
def _warn_no_kernels(capability: str) -> None:
    message = f"no fused kernels for a GPU of compute capability {capability}; the loss runs as strips in plain XLA"
    reasons = [row.package_error() for row in TABLE.values() if row.supports_gpu(capability)]
    warnings.warn(": ".join([message, *filter(None, reasons)]), stacklevel=2)
