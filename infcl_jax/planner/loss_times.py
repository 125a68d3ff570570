"""Time of the loss and its gradients."""

import math

import jax.numpy as jnp

from infcl_jax.ops.common.checks import check_choice
from infcl_jax.ops.pairwise_lse.implementations import IMPLEMENTATIONS
from infcl_jax.planner.rates import LossRate, Rates

# FLOPs for each pair and channel: the similarities, the same again in the backward pass, and both gradients.
_PAIR_FLOPS = 8
_FUSED = ("mosaic_gpu", "triton")
# Strategies that gather the features and compute in plain XLA like `dense`: "dense" computes all pairs on each device,
# the other two a block of rows and a block of columns.
_GATHERED = {"dense": 1, "local": 2, "disco": 2}
# Bytes that a ring moves for each row and channel in both passes: twice bf16 features, once fp32 gradients.
_RING_BYTES = 8


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
      nccl: whether the GPUs of a host exchange blocks with NCCL, as those of several processes do; None: with several
        hosts only.

    Raises:
      ValueError: the implementation is unknown.
    """
    check_choice("implementation", implementation, IMPLEMENTATIONS)
    rate = _rate(implementation, dtype, rates)
    flops = _PAIR_FLOPS * rows * columns * width
    hosts = math.ceil(devices / gpus_per_host)
    if devices == 1:
        return flops / rate.flops + rate.overhead
    if implementation in _GATHERED:
        share = devices / _GATHERED[implementation] if implementation != "dense" else 1
        gathered = 2 * (rows + columns) * width * jnp.dtype(dtype).itemsize  # features, then their gradients
        return flops / share / rate.flops + gathered / (rates.link if hosts == 1 else rates.network) + rate.overhead
    flops_rate = min(rate.flops, rates.ring) if implementation in _FUSED else rate.flops
    block_bytes = _RING_BYTES * max(rows, columns) // devices * width
    overhead = rates.nccl_overhead if (hosts > 1 if nccl is None else nccl) else rates.copy_overhead
    step = max(flops / devices**2 / flops_rate, block_bytes / rates.link) + overhead
    # Between the hosts, a block moves once for each round of the ring within a host.
    inner = devices / hosts
    return hosts * max(inner * step, block_bytes / rates.network if hosts > 1 else 0.0)


def _rate(implementation: str, dtype: str, rates: Rates) -> LossRate:
    name = "dense" if implementation in (*_GATHERED, "ring") else implementation
    rate = rates.losses[name]
    if dtype == "float32" and implementation in _FUSED:
        return LossRate(rates.fp32_loss, rate.overhead)
    return rate
