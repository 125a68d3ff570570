"""Memory and time of the loss and its gradient.

The workspace excludes the features, their gradients and the parameters. Each implementation has a formula. Accuracy of
the formulas, as measured on GPUs in docs/archive/measurements.md:

| implementation | formula / measured |
| --- | --- |
| `mosaic_gpu` | 0.75 to 1.2; 1.6 for 8,192 rows per device or fewer |
| `xla`, `dense` on one GPU | 0.95 to 1.1 |
| `triton` | 0.6 to 0.9 |
| `xla`, `dense` on several GPUs; `local`, `disco`, `ring` | not measured |

On the CPU XLA plans two to four times the formula.
"""

import math
from typing import Any

import jax.numpy as jnp

from infcl_jax.ops.common.checks import check_choice
from infcl_jax.ops.pairwise.implementations import IMPLEMENTATIONS, TABLE
from infcl_jax.planner.devices import Rates

# FLOPs for each pair and channel: the similarities, the same again in the backward pass, and both gradients.
_PAIR_FLOPS = 8
_FUSED = ("mosaic_gpu", "triton")
# Strategies that gather the features and compute in plain XLA like `dense`: "dense" computes all pairs on each device,
# the other two a block of rows and a block of columns.
_GATHERED = {"dense": 1, "local": 2, "disco": 2}
# Bytes that a ring moves for each row and channel in both passes: twice bf16 features, once fp32 gradients.
_RING_BYTES = 8


def loss_workspace(
    implementation: str, batch_size: int, width: int, dtype: Any, devices: int = 1, *, by_id: bool = False
) -> int:
    """Estimate the workspace in bytes on each device by the implementation's formula.

    Examples:
      >>> names = ("mosaic_gpu", "local")
      >>> [loss_workspace(name, 65_536, 512, jnp.bfloat16, devices=8) // 2**20 for name in names]  # MiB
      [132, 8608]

    Args:
      implementation: one of `infcl_jax.ops.pairwise.lse.IMPLEMENTATIONS`.
      batch_size: global batch size b.
      width: feature dimension D.
      dtype: dtype of the features.
      devices: number of devices n over which the batch is sharded.
      by_id: whether positives are given by id. The fused kernels then sort the features. The workspace excludes the
        sorted copies, which take the place of the features in a training step.

    Raises:
      ValueError: the implementation is unknown.
    """
    check_choice("implementation", implementation, IMPLEMENTATIONS)
    return TABLE[implementation].workspace_bytes(batch_size // devices, width, dtype, devices, by_id=by_id)


def loss_time(
    implementation: str,
    rows: int,
    columns: int,
    width: int,
    dtype: str,
    rates: Rates,
    devices: int = 1,
    gpus_per_host: int = 8,
    nccl: bool | None = None,
) -> float:
    """Estimate the seconds of a contrastive loss with its gradients.

    On one GPU it takes `8 rows columns width` FLOPs at the rate of the implementation, and a constant overhead. In a
    ring of n GPUs, each of n blocks takes the longer of its FLOPs and its transfer, and an overhead.

    Examples:
      >>> one = loss_time("mosaic_gpu", 65_536, 65_536, 512, "bfloat16", rates_of("H200"))
      >>> eight = loss_time("mosaic_gpu", 65_536, 65_536, 512, "bfloat16", rates_of("H200"), devices=8)
      >>> round(1e3 * one, 1), round(1e3 * eight, 1)  # ms
      (30.0, 5.1)

    Args:
      implementation: implementation of `pairwise_lse`.
      rows: rows of the global batch.
      columns: columns of the global batch, the rows times the passages of each query.
      width: feature dimension D.
      dtype: dtype of the features.
      rates: rates of the GPUs.
      devices: number of GPUs n.
      gpus_per_host: GPUs of each host.
      nccl: whether the GPUs of a host exchange blocks with NCCL, as several processes do; None: with several
        hosts only.

    Raises:
      ValueError: the implementation is unknown.
    """
    check_choice("implementation", implementation, IMPLEMENTATIONS)
    fused, gathered = implementation in _FUSED, implementation in _GATHERED
    rate, overhead = rates.losses["dense" if gathered or implementation == "ring" else implementation]
    rate = rates.fp32_loss if fused and dtype == "float32" else rate
    flops = _PAIR_FLOPS * rows * columns * width
    hosts = math.ceil(devices / gpus_per_host)
    if devices == 1:
        return flops / rate + overhead
    if gathered:
        share = devices / _GATHERED[implementation] if implementation != "dense" else 1
        moved = 2 * (rows + columns) * width * jnp.dtype(dtype).itemsize  # features, then their gradients
        return flops / share / rate + moved / (rates.link if hosts == 1 else rates.network) + overhead
    block_bytes = _RING_BYTES * max(rows, columns) // devices * width
    block_overhead = rates.nccl_overhead if (hosts > 1 if nccl is None else nccl) else rates.copy_overhead
    flops_time = flops / devices**2 / (min(rate, rates.ring) if fused else rate)
    block_time = max(flops_time, block_bytes / rates.link) + block_overhead
    # Between the hosts, a block moves once for each round of the ring within a host.
    return hosts * max(devices / hosts * block_time, block_bytes / rates.network if hosts > 1 else 0.0)
