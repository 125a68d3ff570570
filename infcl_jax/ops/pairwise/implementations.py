"""Table of the implementations of pairwise ops, and selection for the default device.

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
from infcl_jax.ops.pairwise import ring
from infcl_jax.ops.pairwise.base import AxisName, Backend, Strategy
from infcl_jax.ops.pairwise.fused_windows import WindowConfig
from infcl_jax.ops.pairwise.gradient_rule import Loss, Plan, blockwise
from infcl_jax.ops.pairwise.ids import order_bytes, sort_block
from infcl_jax.ops.pairwise.strips import STRIP_ROWS, Strips

# Compute capabilities of the Triton kernels, from Ampere to Hopper.
TRITON_CAPABILITIES = ("8.0", "8.6", "8.7", "8.9", HOPPER)
# Folders of the losses. Each has the modules `xla` with its `BACKEND`, `fused` with its `BACKEND` around GPU kernels,
# and `mosaic` and `triton` with these `KERNELS`.
LOSSES = ("lse", "sigmoid", "distillation")


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One row of the table.

    Attributes:
      strategy: a `Strategy`, or a function with the arguments and results of `lse.all_gather.dense` that JAX
        differentiates.
      workspace: functions with the arguments of `workspace_bytes`, which is the sum of their results.
      backend: `backend(loss, single_device)` creates the backend of a `Strategy` for the default device. With
        `single_device`, its kernels never overlap with collectives, such as the transfers of a ring.
      losses: folders of the losses that it computes.
      rank: the available implementation with the highest rank is the default. Rank 0 is never the default, see
        `quadratic`.
      requires: required device and packages, for the error message; None: any device.
      capabilities: compute capabilities of the supported GPUs; None: any device.
      package_error: function that returns why the required packages cannot be used, in one line; None if they can.
      fp64: whether fp64 features are supported.
      sorted_ids: whether the backend needs rows and columns that are sorted by id, see `ids`.
    """

    strategy: Strategy | Callable[..., Any]
    workspace: tuple[Callable[[int, int, Any, int], int], ...]
    backend: Callable[[str, bool], Backend] | None = None
    losses: tuple[str, ...] = ("lse",)
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


def compute(implementation: str, loss: Loss, block: Any, axis_name: AxisName | None, **options: bool) -> Any:
    """Compute the results of a loss from this device's block.

    Args:
      implementation: name of a row of the table with a `Strategy`.
      loss: the loss.
      block: rows and columns of this device.
      axis_name: mesh axes of the batch; None for one device.
      **options: fields of the backend.
    """
    row, block = TABLE[implementation], only_reverse(block, loss.forward_mode)
    backend: Any = row.backend(loss.folder, not ring.ring_axes(axis_name))
    strategy: Any = row.strategy
    backend = dataclasses.replace(backend, **options)
    block, plan = loss.prepared(backend, block), Plan(loss, strategy, backend, axis_name)
    if not row.sorted_ids or getattr(block, "x_ids", None) is None:
        return blockwise(plan, block)
    block, x_order, y_order = sort_block(block)
    return loss.restore(blockwise(plan, block), x_order, y_order)


def _module(loss: str, name: str) -> Any:
    """Import a module of a loss when it is needed: kernels are for GPUs, and all modules import this one."""
    return importlib.import_module(f"infcl_jax.ops.pairwise.{loss}.{name}")


def _gathered(name: str) -> Callable[..., Any]:
    """Return a function of `lse.all_gather`, which imports this module in turn."""
    return lambda *arguments, **options: getattr(_module("lse", "all_gather"), name)(*arguments, **options)


def _strips(rows: int | None, loss: str, single_device: bool) -> Any:
    return _module(loss, "xla").BACKEND(rows)


def _mosaic_gpu(loss: str, single_device: bool) -> Any:
    # Collectives occupy SMs. A persistent CTA that waits for such an SM delays the end of the whole kernel.
    sm_count = multiprocessors()
    kernels = _module(loss, "mosaic").KERNELS(sm_count=sm_count, persistent=single_device)
    return _module(loss, "fused").BACKEND(kernels, WindowConfig(sm_count))


def _triton(loss: str, single_device: bool) -> Any:
    kernels = _module(loss, "triton").KERNELS.for_capability(compute_capability())
    return _module(loss, "fused").BACKEND(kernels, WindowConfig(multiprocessors()))


@functools.cache
def _triton_error() -> str | None:
    """Return why Triton or jax-triton cannot be used; None if they can."""
    # Imported lazily, because only GPUs need these modules.
    from infcl_jax.ops.pairwise.triton import load

    try:
        load()
    except ImportError as error:
        return str(error)
    return None


_RING = Strategy(ring.forward, ring.backward)

# Error messages list the implementations in this order.
TABLE = {
    "dense": Implementation(_gathered("dense"), (_gathered("gathered_bytes"), _gathered("dense_bytes"))),
    "local": Implementation(_gathered("local"), (_gathered("gathered_bytes"), _gathered("local_bytes"))),
    "disco": Implementation(
        Strategy(_gathered("disco_forward"), _gathered("disco_backward")),
        (_gathered("gathered_bytes"), _gathered("disco_bytes")),
        functools.partial(_strips, None),
    ),
    "ring": Implementation(
        _RING, (ring.rotating_bytes, Strips(None).workspace_bytes), functools.partial(_strips, None), LOSSES
    ),
    "xla": Implementation(
        _RING,
        (ring.rotating_bytes, Strips().workspace_bytes),
        functools.partial(_strips, STRIP_ROWS),
        LOSSES,
        rank=1,
    ),
    "mosaic_gpu": Implementation(
        _RING,
        (ring.rotating_bytes, WindowConfig().workspace_bytes),
        _mosaic_gpu,
        LOSSES,
        rank=3,
        requires="a Hopper GPU",
        capabilities=(HOPPER,),
        fp64=False,
        sorted_ids=True,
    ),
    "triton": Implementation(
        _RING,
        (ring.rotating_bytes, WindowConfig().workspace_bytes),
        _triton,
        LOSSES,
        rank=2,
        requires="an Ampere, Ada or Hopper GPU and jax-triton",
        capabilities=TRITON_CAPABILITIES,
        package_error=_triton_error,
        fp64=False,
        sorted_ids=True,
    ),
}
IMPLEMENTATIONS = TABLE.keys()  # a view, which has rows that are added later


def implementations_of(loss: str) -> tuple[str, ...]:
    """Names of the implementations of a loss, given its folder."""
    return tuple(name for name, row in TABLE.items() if loss in row.losses)


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
