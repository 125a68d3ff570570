"""GPUs: memory limits, tracing for them, and the measured rates of their work.

All measured rates are of NVIDIA H200s (700 W) with JAX 0.11.2, 2026-11-21 to 24 (docs/archive/measurements.md). Other
GPUs have the rates of an H200 scaled by the ratio of two data sheets: GEMMs and the loss by the peak bf16 throughput,
kernels that move data by the bandwidth of HBM, and transfers by the bandwidth of the links.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from infcl_jax.runtime.distributed import memory_share
from infcl_jax.training.compiled_step import peak_flops

_MIB, _TERA, _GIGA = 1 << 20, 1e12, 1e9


class Device(NamedTuple):
    """A GPU model.

    Examples:
      >>> device_named("H100").implementation
      'mosaic_gpu'

    Attributes:
      name: key of the table `DEVICES`.
      memory: device memory in bytes, as the driver reports it.
      implementation: fastest implementation of the loss that the GPU runs.
      cores: number of SMs.
      kind: device kind of JAX, for `peak_flops`.
      bandwidth: bandwidth of HBM or GDDR, in GB/s.
      link: bandwidth to other GPUs of the host in one direction, in GB/s: NVLink, or PCIe 4.0 x16.
      network: bandwidth of the host's network for each GPU in one direction, in GB/s: 400 Gb/s for each GPU of an HGX
        H100 or H200, 200 Gb/s for an HGX A100, and 100 Gb/s for the others, which is an assumption.
    """

    name: str
    memory: int
    implementation: str
    cores: int
    kind: str
    bandwidth: float
    link: float
    network: float

    @property
    def memory_limit(self) -> int:
        """Bytes that JAX preallocates, see `infcl_jax.runtime.distributed.memory_share`."""
        return int(self.memory * memory_share())

    @property
    def mesh(self) -> AbstractMesh:
        """Abstract mesh of this device, for `jax.sharding.use_abstract_mesh`.

        Under it, plans use the kernels of Hopper GPUs on any host.
        """
        return _single_device_mesh(self.name, self.cores)


# Memory as the driver reports it; rates of NVIDIA's data sheets, SXM boards where there are several.
DEVICES = {
    device.name: device
    for device in (
        Device("A10", 23_028 * _MIB, "triton", 72, "NVIDIA A10", 600, 32, 12.5),
        Device("A100-40", 40_960 * _MIB, "triton", 108, "NVIDIA A100", 1555, 300, 25),
        Device("A100-80", 81_920 * _MIB, "triton", 108, "NVIDIA A100", 2039, 300, 25),
        Device("H100-80", 81_559 * _MIB, "mosaic_gpu", 132, "NVIDIA H100", 3350, 450, 50),
        Device("H200-141", 143_771 * _MIB, "mosaic_gpu", 132, "NVIDIA H200", 4800, 450, 50),
        Device("L4", 23_034 * _MIB, "triton", 58, "NVIDIA L4", 300, 32, 12.5),
        Device("L40S", 46_068 * _MIB, "triton", 142, "NVIDIA L40S", 864, 32, 12.5),
        Device("RTX3090", 24_576 * _MIB, "triton", 82, "NVIDIA GeForce RTX 3090", 936, 32, 12.5),
        Device("RTX4090", 24_564 * _MIB, "triton", 128, "NVIDIA GeForce RTX 4090", 1008, 32, 12.5),
        Device("V100-32", 32_768 * _MIB, "xla", 80, "Tesla V100-SXM2-32GB", 900, 150, 12.5),
    )
}


def device_named(name: str) -> Device:
    """Look up a device of `DEVICES` by name.

    Case and spaces are ignored. The memory suffix is optional if it is not needed to tell devices apart, as for "H200".

    Examples:
      >>> device_named("a100-80").memory // 2**30
      80

    Raises:
      ValueError: no device or more than one matches.
    """
    key = name.replace(" ", "").upper()
    matches = [known for known in DEVICES if known == key]
    matches = matches or [known for known in DEVICES if known.split("-")[0] == key]
    if len(matches) != 1:
        raise ValueError(f"expected a device among {', '.join(DEVICES)}, or its memory, got {name!r}")
    return DEVICES[matches[0]]


@contextlib.contextmanager
def planned_device() -> Iterator[None]:
    """Trace for a single GPU of the current kind.

    On several devices without a mesh, ops do not know how rows are sharded and choose no kernels. A single-device mesh
    lets them choose the kernels that a run chooses under its mesh. An abstract device that is already set stays in
    effect.
    """
    if jax.sharding.get_abstract_mesh().abstract_device or jax.default_backend() != "gpu":
        yield
        return
    device = jax.devices()[0]
    with use_abstract_mesh(_single_device_mesh(device.device_kind, device.core_count)):
        yield


def _single_device_mesh(kind: str, cores: int) -> AbstractMesh:
    device = AbstractDevice(device_kind=kind, platform="gpu", num_cores=cores)
    return AbstractMesh((), (), abstract_device=device)


class Kernels(NamedTuple):
    """Rates of kernels that memory bandwidth limits, in bytes per second."""

    forward: float  # LayerNorm, bias with activation, and residual sums
    backward: float  # the same in the backward pass
    # Forward and backward by sequence length, in ascending order. They count 4 tensors forward and 8 backward.
    attention: dict[int, tuple[float, float]]

    def attention_rates(self, positions: int) -> tuple[float, float]:
        """Interpolate the rates of attention, forward and backward.

        Beyond the longest measured sequence, the time grows with the square of the length.
        """
        lengths = list(self.attention)
        scale = min(1.0, lengths[-1] / positions)
        forward, backward = (
            scale * float(np.interp(positions, lengths, rates)) for rates in zip(*self.attention.values(), strict=True)
        )
        return forward, backward

    def scaled(self, factor: float) -> "Kernels":
        """Return all rates times a factor."""
        attention = {length: (f * factor, b * factor) for length, (f, b) in self.attention.items()}
        return Kernels(self.forward * factor, self.backward * factor, attention)


class LossRate(NamedTuple):
    """Rate of the loss with its gradients on one GPU."""

    flops: float  # FLOP/s, counting 8 FLOPs for each pair of features and channel
    overhead: float  # seconds of each call besides, on an H200 and any other GPU


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rates:
    """Rates of one GPU.

    Examples:
      >>> rates_of("H200").measured, rates_of("A100-80").measured
      (True, False)

    Attributes:
      device: GPU.
      measured: whether the rates were measured on this GPU, or scaled from an H200's.
      gemm: FLOP/s of the towers' bf16 GEMMs in a training step, with the gaps between kernels.
      fused: rates of this library's kernels for Hopper GPUs.
      xla: rates of cuDNN's attention and of XLA's elementwise kernels.
      memory: bytes per second of updates and of accumulated gradients.
      losses: rates of the loss by the name of the implementation, for bf16 features.
      fp32_loss: FLOP/s of the loss of fp32 features in the fused kernels.
      ring: FLOP/s of the fused loss in a ring of GPUs, in which CTAs are not persistent.
      copy_overhead: seconds of each block of a ring besides its GEMMs, with copies between the GPUs of one process.
      nccl_overhead: the same with NCCL, for one process per GPU and for several hosts.
      link: bytes per second between the GPUs of one host, as the bus bandwidth of an all-reduce.
      network: bytes per second between the hosts, for each GPU.
      host_link: bytes per second from the memory of one host to all of its GPUs.
    """

    device: Device
    measured: bool
    gemm: float
    fused: Kernels
    xla: Kernels
    memory: float
    losses: dict[str, LossRate]
    fp32_loss: float
    ring: float
    copy_overhead: float
    nccl_overhead: float
    link: float
    network: float
    host_link: float


_H200 = Rates(
    device=DEVICES["H200-141"],
    measured=True,
    # What the kernels below leave of the steps of ViT-B/32, B/16 and L/14 without chunks: 651 to 675 TFLOP/s, 0.92 to
    # 0.97 of the reference GEMM in these processes.
    gemm=660 * _TERA,
    # "How fast are biased activations?" and "How fast is attention in each tower?", 2026-11-22.
    fused=Kernels(
        3.6 * _TERA,
        3.85 * _TERA,
        {
            50: (3.7 * _TERA, 3.8 * _TERA),
            77: (3.2 * _TERA, 2.4 * _TERA),
            197: (2.6 * _TERA, 1.8 * _TERA),
            257: (1.9 * _TERA, 1.5 * _TERA),
        },
    ),
    # The same tables. cuDNN was timed over both passes.
    xla=Kernels(
        2.6 * _TERA,
        1.64 * _TERA,
        {
            50: (1.03 * _TERA, 1.03 * _TERA),
            77: (1.12 * _TERA, 1.12 * _TERA),
            197: (1.04 * _TERA, 1.04 * _TERA),
            257: (0.83 * _TERA, 0.83 * _TERA),
        },
    ),
    memory=3.6 * _TERA,  # elementwise, as above
    # "How fast is the loss?" and "How do time and memory grow with the batch?", 2026-11-21. The overheads are what is
    # left at 2,048 and 8,192 pairs.
    losses={
        "mosaic_gpu": LossRate(590 * _TERA, 0.14e-3),
        "triton": LossRate(530 * _TERA, 0.14e-3),
        "xla": LossRate(245 * _TERA, 0.3e-3),
        "dense": LossRate(62 * _TERA, 0.1e-3),
    },
    fp32_loss=96 * _TERA,  # "How fast are fp32 features?", 2026-11-21
    # "How much communication is exposed?", 2026-11-22: blocks of 8,192 and 32,768 rows, on two to eight GPUs.
    ring=570 * _TERA,
    copy_overhead=0.16e-3,
    nccl_overhead=0.4e-3,  # "Copies or NCCL, cuBLAS or XLA's GEMMs?", 2026-11-21, one process per GPU
    link=360 * _GIGA,  # 0.8 of NVLink's data sheet; no all-reduce was timed on an H200
    network=40 * _GIGA,  # 0.8 of the data sheet
    host_link=10 * _GIGA,  # "How large can a batch be?", 2026-11-22, eight GPUs
)


def rates_of(device: str | Device) -> Rates:
    """Return the rates of a GPU, measured or scaled from an H200's.

    Examples:
      >>> h100, h200 = rates_of("H100"), rates_of("H200")
      >>> h100.gemm == h200.gemm, round(h100.memory / h200.memory, 2)
      (True, 0.7)

    Args:
      device: name of a GPU, see `device_named`, or the GPU.

    Raises:
      ValueError: the GPU is unknown.
    """
    device = device_named(device) if isinstance(device, str) else device
    if device == _H200.device:
        return _H200
    reference = _H200.device
    compute = (peak_flops(device.kind) or 0.0) / (peak_flops(reference.kind) or 1.0)
    memory = device.bandwidth / reference.bandwidth
    return dataclasses.replace(
        _H200,
        device=device,
        measured=False,
        gemm=_H200.gemm * compute,
        fused=_H200.fused.scaled(memory),
        xla=_H200.xla.scaled(memory),
        memory=_H200.memory * memory,
        losses={name: LossRate(rate.flops * compute, rate.overhead) for name, rate in _H200.losses.items()},
        fp32_loss=_H200.fp32_loss * compute,
        ring=_H200.ring * compute,
        link=_H200.link * device.link / reference.link,
        network=_H200.network * device.network / reference.network,
    )
