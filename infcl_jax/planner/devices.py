"""Table of GPUs, their memory limits, and tracing for a GPU."""

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import jax
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from infcl_jax.runtime.distributed import memory_share

_MIB = 1 << 20


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
