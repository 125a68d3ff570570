"""Memory of the loss and its gradient beyond the features, their gradients and the parameters.

The formulas are for GPUs: what each implementation holds, fitted to the figures of docs/benchmarks.md. They give 0.75
to 1.2 times those for `mosaic_gpu` (1.6 for 8,192 rows or less of a device), 0.95 to 1.1 for `xla` and `dense` on one
GPU, 0.6 to 0.9 for `triton`; `local`, `disco` and `ring`, and `xla` and `dense` on several GPUs, have not been measured
there. On the CPU XLA plans two to four times as much. `compiled_workspace` asks XLA for the devices at hand.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from infcl_jax.checks import check_choice
from infcl_jax.models import CLIPOutput
from infcl_jax.ops.pairwise_lse import IMPLEMENTATIONS
from infcl_jax.ops.pairwise_lse.chunking import STRIP_ROWS
from infcl_jax.ops.pairwise_lse.fused import IN_LINE, IN_LINE_ROWS, PANEL, PRECISE, RING_WINDOW, WINDOW
from infcl_jax.ops.pairwise_lse.implementations import FUSED
from infcl_jax.ops.pairwise_lse.ring import panel_columns
from infcl_jax.training import make_loss

_FP32 = 4
# What the library of matrix products reserves.
_LIBRARY = 32 << 20
# fp32 vectors of rows and columns in the fused backends.
_VECTORS = 14
# Similarities and the weights made of them.
_MATRICES = 2


def loss_workspace(implementation: str, batch_size: int, width: int, dtype: Any, devices: int = 1) -> int:
    """Bytes on each device, by the formula of the implementation.

    Args:
      implementation: one of `infcl_jax.ops.pairwise_lse.IMPLEMENTATIONS`.
      batch_size: b, of the global batch.
      width: D, of the features.
      dtype: of the features.
      devices: n, over which the batch is sharded.

    Raises:
      ValueError: unknown implementation.
    """
    check_choice("implementation", implementation, IMPLEMENTATIONS)
    rows, item = batch_size // devices, jnp.dtype(dtype).itemsize
    accumulators = 2 * rows * width * _FP32
    if implementation in FUSED:
        return _fused(rows, width, item, devices)
    if implementation == "dense":
        return _MATRICES * batch_size**2 * _FP32 + _gathered(batch_size, width, item, devices) + _LIBRARY
    if implementation in ("local", "disco"):
        directions = 2 if implementation == "local" and devices > 1 else 1
        matrices = directions * _MATRICES * rows * batch_size * _FP32
        return matrices + _gathered(batch_size, width, item, devices) + accumulators
    strip = rows if implementation == "ring" else min(STRIP_ROWS, rows)
    return _MATRICES * strip * rows * _FP32 + accumulators + _travelling(rows, width, item, devices)


def compiled_workspace(
    implementation: str | None, batch_size: int, width: int, dtype: Any, mesh: Mesh, loss: str = "clip"
) -> int:
    """Bytes on each device that XLA plans for the loss on the devices at hand.

    Args:
      implementation: None picks the best of these devices.
      batch_size: as for `loss_workspace`.
      width: likewise.
      dtype: likewise.
      mesh: the devices, over whose first axis the batch is sharded.
      loss: "clip" or "siglip".

    Raises:
      ValueError: the implementation, the batch or the loss does not suit the devices.
    """
    loss_fn = make_loss(loss, mesh, implementation)

    def shape(dims: tuple[int, ...], dtype: Any, *axes: str) -> Any:
        return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, PartitionSpec(*axes)))

    features = shape((batch_size, width), dtype, mesh.axis_names[0])
    scalar = shape((), jnp.float32)
    step = jax.jit(jax.value_and_grad(loss_fn))
    output = CLIPOutput(features, features, scalar, scalar)
    return step.lower(output).compile().memory_analysis().temp_size_in_bytes


def _gathered(batch_size: int, width: int, item: int, devices: int) -> int:
    """Features of all devices and their gradients in fp32."""
    return 0 if devices == 1 else 2 * batch_size * width * (item + _FP32)


def _travelling(rows: int, width: int, item: int, devices: int) -> int:
    """The columns on their way with the one panel that is there twice, and its accumulators."""
    return 0 if devices == 1 else ((rows + panel_columns(rows)) * item + panel_columns(rows) * _FP32) * width


def _fused(rows: int, width: int, item: int, devices: int) -> int:
    """A window of weights in bf16, fp32 accumulators, and with fp32 features three bf16 parts of them."""
    parts = 1 if item == 2 else 3
    window = WINDOW if parts == 1 else WINDOW // PRECISE * 2
    vectors, matrix = _VECTORS * rows * _FP32, rows * width * _FP32
    split = 0 if parts == 1 else 2 * parts * rows * width * 2
    if devices == 1:
        pairs = min(rows * rows, window)
        accumulators = min(matrix, PANEL) + min(matrix, window // rows * width * _FP32)
        return 2 * pairs + accumulators + split + vectors + _LIBRARY
    pairs = min(rows * panel_columns(rows), window // 2, RING_WINDOW * rows * width)
    in_line = parts == 1 and rows <= IN_LINE * IN_LINE_ROWS
    products = 0 if in_line else rows * width * item
    return 2 * pairs + 2 * matrix + _travelling(rows, width, item, devices) + products + split + vectors + _LIBRARY
