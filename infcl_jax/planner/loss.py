"""Workspace of the loss and its gradient.

The workspace excludes the features, their gradients and the parameters. `loss_workspace` has a formula of each
implementation's buffers on GPUs, fitted to docs/benchmarks.md. `compiled_workspace` asks XLA for the current devices.

| implementation | formula / measured |
| --- | --- |
| `mosaic_gpu` | 0.75 to 1.2; 1.6 for 8,192 rows per device or fewer |
| `xla`, `dense` on one GPU | 0.95 to 1.1 |
| `triton` | 0.6 to 0.9 |
| `xla`, `dense` on several GPUs; `local`, `disco`, `ring` | not measured |

On the CPU XLA plans two to four times the formula.
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
from infcl_jax.training import loss_class, make_loss

_FP32 = 4  # bytes
# cuBLAS workspace in bytes.
_LIBRARY = 32 << 20
# Number of fp32 vectors of the block's length in the fused backends.
_VECTORS = 14
# Number of similarity-sized matrices: the similarities s and the gradient weights computed from them.
_MATRICES = 2


def loss_workspace(implementation: str, batch_size: int, width: int, dtype: Any, devices: int = 1) -> int:
    """Estimate the workspace in bytes on each device by formula.

    Args:
      implementation: one of `infcl_jax.ops.pairwise_lse.IMPLEMENTATIONS`.
      batch_size: global batch size b.
      width: feature dimension D.
      dtype: dtype of the features.
      devices: number of devices n over which the batch is sharded.

    Raises:
      ValueError: the implementation is unknown.
    """
    check_choice("implementation", implementation, IMPLEMENTATIONS)
    rows, itemsize = batch_size // devices, jnp.dtype(dtype).itemsize
    accumulators = 2 * rows * width * _FP32
    if implementation in FUSED:
        return _fused(rows, width, itemsize, devices)
    if implementation == "dense":
        return _MATRICES * batch_size**2 * _FP32 + _gathered(batch_size, width, itemsize, devices) + _LIBRARY
    if implementation in ("local", "disco"):
        directions = 2 if implementation == "local" and devices > 1 else 1
        matrices = directions * _MATRICES * rows * batch_size * _FP32
        return matrices + _gathered(batch_size, width, itemsize, devices) + accumulators
    strip = rows if implementation == "ring" else min(STRIP_ROWS, rows)
    return _MATRICES * strip * rows * _FP32 + accumulators + _rotating(rows, width, itemsize, devices)


def compiled_workspace(
    implementation: str | None, batch_size: int, width: int, dtype: Any, mesh: Mesh, loss: str = "clip"
) -> int:
    """Workspace in bytes on each device, from XLA's memory analysis.

    Args:
      implementation: one of `infcl_jax.ops.pairwise_lse.IMPLEMENTATIONS`; None for the best on these devices.
      batch_size: global batch size b.
      width: feature dimension D.
      dtype: dtype of the features.
      mesh: current devices; the batch is sharded over the mesh's first axis.
      loss: training loss, one of `infcl_jax.training.LOSSES`.

    Raises:
      ValueError: the implementation, the batch size or the loss does not run on the devices.
    """
    loss_fn = make_loss(loss_class(loss).workspace or loss, mesh, implementation)

    def shape(dims: tuple[int, ...], dtype: Any, *axes: str) -> Any:
        return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, PartitionSpec(*axes)))

    features = shape((batch_size, width), dtype, mesh.axis_names[0])
    scalar = shape((), jnp.float32)
    step = jax.jit(jax.value_and_grad(lambda output: loss_fn(output).value))
    output = CLIPOutput(features, features, scalar, scalar)
    return step.lower(output).compile().memory_analysis().temp_size_in_bytes


def _gathered(batch_size: int, width: int, itemsize: int, devices: int) -> int:
    """Gathered features of all devices and their fp32 gradients."""
    return 0 if devices == 1 else 2 * batch_size * width * (itemsize + _FP32)


def _rotating(rows: int, width: int, itemsize: int, devices: int) -> int:
    """Column block in rotation, its double-buffered slice and that slice's accumulators."""
    return 0 if devices == 1 else ((rows + panel_columns(rows)) * itemsize + panel_columns(rows) * _FP32) * width


def _fused(rows: int, width: int, itemsize: int, devices: int) -> int:
    """Workspace of the fused backends.

    It consists of bf16 gradients of the similarities for a limited number of pairs, and of fp32 accumulators. fp32
    features are also stored as three bf16 matrices.
    """
    splits = 1 if itemsize == 2 else 3
    limit = WINDOW if splits == 1 else WINDOW // PRECISE * 2
    vectors, matrix = _VECTORS * rows * _FP32, rows * width * _FP32
    split_features = 0 if splits == 1 else 2 * splits * rows * width * 2
    if devices == 1:
        pairs = min(rows * rows, limit)
        accumulators = min(matrix, PANEL) + min(matrix, limit // rows * width * _FP32)
        return 2 * pairs + accumulators + split_features + vectors + _LIBRARY
    pairs = min(rows * panel_columns(rows), limit // 2, RING_WINDOW * rows * width)
    in_line = splits == 1 and rows <= IN_LINE * IN_LINE_ROWS
    products = 0 if in_line else rows * width * itemsize
    rotating = _rotating(rows, width, itemsize, devices)
    return 2 * pairs + 2 * matrix + rotating + products + split_features + vectors + _LIBRARY
