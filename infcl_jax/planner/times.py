"""Time of a training step before it runs, from measured rates."""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any, cast

from infcl_jax.models import CLIP, TextPair
from infcl_jax.models.bert import Bert
from infcl_jax.models.clip import row_shapes
from infcl_jax.models.config import BertConfig
from infcl_jax.models.convert import config_of
from infcl_jax.models.flops import group_flops
from infcl_jax.models.registry import bert_config_of
from infcl_jax.ops.packing import rows_of
from infcl_jax.planner.activations import feature_width, parameter_shapes, tree_bytes
from infcl_jax.planner.api import Workload
from infcl_jax.planner.devices import Device, Rates, rates_of
from infcl_jax.planner.loss import loss_time
from infcl_jax.planner.state import state_bytes
from infcl_jax.planner.tower_times import TowerTime, tower_time
from infcl_jax.training.frozen import frozen_towers

PHASES = ("forward", "recompute", "backward", "loss", "reduce", "update", "transfer")
GPUS_PER_HOST = 8  # of the hosts in docs/archive/measurements.md
_ALL_REDUCE, _FSDP = 2, 3  # passes over the gradients; two gathers of the parameters and one reduction
_ACCUMULATE = 3  # a gradient and the sum are read, the sum is written


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTime:
    """Estimated time of a training step in seconds.

    Examples:
      >>> config = model_config("ViT-B/32", dtype="bfloat16")
      >>> run = Workload(model=config, optimizer=optax.adamw(1e-3), batch_size=4096, implementation="mosaic_gpu")
      >>> time = step_time(run, "H200")
      >>> round(1e3 * time.total), round(time.images_per_second)
      (356, 11504)

    Attributes:
      workload: settings of the step.
      device: GPU.
      forward: forward pass of all chunks whose features the loss gets.
      recompute: second forward pass of gradient caching.
      backward: backward pass of all chunks, with the accumulation of their gradients.
      loss: loss and feature gradients.
      reduce: all-reduce of the gradients; with "fsdp", gathers of the parameters and the reduction.
      update: optimizer.
      transfer: transfers of a batch in host memory that do not overlap with the above.
      measured: whether the GPU's rates and such towers were measured. Never with several hosts.
    """

    workload: Workload
    device: Device
    forward: float
    recompute: float
    backward: float
    loss: float
    reduce: float
    update: float
    transfer: float
    measured: bool

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(getattr(self, phase) for phase in PHASES)

    @property
    def images_per_second(self) -> float:
        """Pairs per second over all GPUs."""
        return self.workload.batch_size / self.total


def step_time(
    workload: Workload, device: str | Device, gpus_per_host: int = GPUS_PER_HOST, nccl: bool | None = None
) -> StepTime:
    """Estimate the time of a training step without running it.

    The sum of its parts: GEMMs and other kernels of both towers, the loss, the all-reduce of the gradients and the
    update. With the batch in host memory, its transfer overlaps with each of the two passes. With the batch in device
    memory, its transfer is assumed to be hidden. Reading and decoding of files, compilation, evaluation and checkpoints
    are not included.

    On an H200 the estimates are within 15 % of the measured steps of ViT-B/32, B/16 and L/14, direct and with gradient
    caching (docs/memory.md). Other GPUs have the rates of an H200 scaled by data sheets.

    Examples:
      >>> config = model_config("ViT-B/16", dtype="bfloat16")
      >>> run = Workload(model=config, optimizer=optax.adamw(1e-3), batch_size=8192, devices=8, implementation="xla")
      >>> h200, a100 = step_time(run, "H200"), step_time(run, "A100-80")
      >>> 3 < a100.total / h200.total < 4, h200.measured, a100.measured
      (True, True, False)

    Args:
      workload: settings of the step.
      device: GPU or its name, see `device_named`.
      gpus_per_host: GPUs of each host at most; more devices are several hosts.
      nccl: whether the GPUs of a host belong to several processes; None: with several hosts only.

    Raises:
      ValueError: the GPU is unknown.
    """
    rates, devices = rates_of(device), workload.devices
    model = cast(CLIP | TextPair, workload.model)
    state = state_bytes(model, workload.optimizer, devices, workload.parameter_sharding, workload.frozen_parameters)
    passes = [_passes(workload, name, rates) for name in row_shapes(model, 1)]
    forward, recompute, backward, measured = zip(*passes, strict=True)
    chunks = math.ceil(workload.block_rows / workload.shard_rows)
    accumulate = chunks * _ACCUMULATE * state.trained_gradients / rates.memory if chunks > 1 else 0.0
    first, second = sum(forward), sum(recompute) + sum(backward) + accumulate
    # The update reads and writes parameters, their updates and the optimizer's state, and reads the gradients.
    update_bytes = 2 * (state.updates + state.optimizer + state.ema * workload.ema) + state.updates
    loss = loss_time(
        workload.implementation,
        workload.batch_size,
        workload.batch_size * workload.passages,
        feature_width(model),
        str(model.feature_dtype),
        rates,
        devices,
        gpus_per_host,
        nccl,
    )
    return StepTime(
        workload=workload,
        device=rates.device,
        forward=first,
        recompute=sum(recompute),
        backward=sum(backward) + accumulate,
        loss=loss,
        reduce=_reduce_time(workload, state.trained_gradients, rates, gpus_per_host),
        update=update_bytes / rates.memory,
        transfer=_exposed_transfer(workload, rates, gpus_per_host, first, second),
        measured=rates.measured and devices <= gpus_per_host and all(measured),
    )


def scaling(
    workload: Workload, device: str | Device, counts: Iterable[int], gpus_per_host: int = GPUS_PER_HOST
) -> dict[int, StepTime]:
    """Estimate a step on several numbers of GPUs.

    The global batch is the same everywhere. Chunks have as many rows on each GPU as in `workload`, and at most the
    GPU's rows.

    Examples:
      >>> config = model_config("ViT-B/32", dtype="bfloat16")
      >>> run = Workload(model=config, optimizer=optax.adamw(1e-3), batch_size=32_768, implementation="mosaic_gpu")
      >>> times = scaling(run, "H200", (1, 8, 64))
      >>> [round(times[count].images_per_second / count / times[1].images_per_second, 2) for count in times]
      [1.0, 0.98, 0.58]

    Args:
      workload: settings of the step.
      device: GPU or its name, see `device_named`.
      counts: numbers of GPUs. Those that do not divide the batch are left out.
      gpus_per_host: GPUs of each host.

    Returns:
      Estimates by number of GPUs.
    """
    return {
        count: step_time(on_devices(workload, count), device, gpus_per_host)
        for count in counts
        if workload.batch_size % count == 0
    }


def on_devices(workload: Workload, count: int) -> Workload:
    """Return a workload on another number of GPUs, with the same global batch and chunks of as many rows per GPU.

    Examples:
      >>> run = Workload(model=model, optimizer=optax.adamw(1e-3), batch_size=64, cache=GradCacheConfig(chunk_size=8))
      >>> on_devices(run, 4).cache.chunk_size
      32

    Args:
      workload: settings of the step.
      count: number of GPUs, which divides the batch size.

    Raises:
      ValueError: the number does not divide the batch size.
    """
    cache = workload.cache
    if cache.chunk_size is not None:
        sizes = {
            name: min(size // workload.devices * count, workload.batch_size)
            for name in ("chunk_size", "passage_chunk_size")
            if (size := getattr(cache, name)) is not None
        }
        cache = dataclasses.replace(cache, **sizes)
    return dataclasses.replace(workload, devices=count, cache=cache)


def _passes(workload: Workload, name: str, rates: Rates) -> tuple[float, float, float, bool]:
    """Estimate an encoder on one GPU over all chunks.

    Returns:
      Seconds of the forward pass, of its repetition and of the backward pass; whether such towers were measured.
    """
    if name in workload.precomputed:
        return 0.0, 0.0, 0.0, True
    rows, cache = workload.rows(name), workload.cache
    chunk, chunks = _tower_time(workload, name, rows.shard, rates), rows.block / rows.shard
    if name in frozen_towers(parameter_shapes(cast(Any, workload.model)), workload.frozen_parameters):
        return chunks * chunk.forward, 0.0, 0.0, chunk.measured
    recomputed = (rows.block - rows.stored) / rows.shard if cache.chunk_size is not None else 0.0
    second = chunk.forward - (chunk.residual if cache.keep_residual else 0.0)
    backward = chunks * chunk.backward * _trained_share(workload, name)
    return chunks * chunk.forward, recomputed * second, backward, chunk.measured


def _tower_time(workload: Workload, name: str, rows: int, rates: Rates) -> TowerTime:
    model, flops, tower = cast(Any, workload.model), 0, cast(Any, None)
    if isinstance(model, TextPair):
        bert = cast(Bert, model.text or getattr(model, name))
        tower, dtype = bert_config_of(bert), bert.config.dtype
    else:
        config = config_of(model)
        tower = {"image": config.vision, "text": config.text}[name]
        dtype, flops = config.dtype, sum(group_flops(config)[name])
    if (packing := workload.packings.get(name)) is not None:
        rows = rows_of(rows, packing.rows, packing.shard)
        longer: dict[str, Any] = {"context_length": packing.row_length}
        if isinstance(tower, BertConfig):
            longer["max_positions"] = packing.row_length + tower.position_offset
        tower = dataclasses.replace(tower, **longer)
    return tower_time(tower, feature_width(model), rows, rates, dtype, flops)


def _trained_share(workload: Workload, name: str) -> float:
    """Fraction of the tower's FLOPs that have a backward pass."""
    if name not in workload.frozen:
        return 1.0
    groups = group_flops(config_of(cast(CLIP, workload.model)))[name]
    count = getattr(workload.unlocked_groups, name)
    return sum(groups[max(0, len(groups) - count) :]) / sum(groups)


def _reduce_time(workload: Workload, gradients: int, rates: Rates, gpus_per_host: int) -> float:
    """Seconds of the gradients' all-reduce by a ring, none of which overlaps."""
    devices = workload.devices
    if devices == 1:
        return 0.0
    # Between hosts, each GPU has a network card, and as many rings run at a time.
    bandwidth = rates.link if devices <= gpus_per_host else min(rates.link, gpus_per_host * rates.network)
    passes = _FSDP if workload.parameter_sharding == "fsdp" else _ALL_REDUCE
    return passes * (devices - 1) / devices * gradients / bandwidth


def _exposed_transfer(workload: Workload, rates: Rates, gpus_per_host: int, first: float, second: float) -> float:
    """Seconds in which the GPUs wait for a batch in host memory, which is transferred in each of the two passes."""
    if workload.cache.offload == "none":
        return 0.0
    shapes = row_shapes(cast(Any, workload.model), 1)
    row_bytes = sum(
        tree_bytes(shape) * (workload.passages if name == "passage" else 1)
        for name, shape in shapes.items()
        if name not in workload.precomputed
    )
    transfer = workload.block_rows * min(workload.devices, gpus_per_host) * row_bytes / rates.host_link
    return max(0.0, transfer - first) + max(0.0, transfer - second)
