"""Devices by name, and the memory that JAX takes of them."""

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from infcl_jax.distributed import memory_share

_MIB = 1 << 20


class Device(NamedTuple):
    """An accelerator.

    Attributes:
      name: of the table `DEVICES`.
      memory: bytes, as its driver reports them.
      implementation: of the loss, the fastest one that it runs.
      cores: multiprocessors.
    """

    name: str
    memory: int
    implementation: str
    cores: int

    @property
    def usable(self) -> int:
        """Bytes that JAX takes, see `infcl_jax.distributed.memory_share`."""
        return int(self.memory * memory_share())

    @property
    def mesh(self) -> AbstractMesh:
        """For `jax.sharding.use_abstract_mesh`: kernels of Hopper GPUs are planned under it, wherever it runs."""
        return _alone(self.name, self.cores)


_KNOWN = (
    Device("A10", 23_028 * _MIB, "triton", 72),
    Device("A100-40", 40_960 * _MIB, "triton", 108),
    Device("A100-80", 81_920 * _MIB, "triton", 108),
    Device("H100-80", 81_559 * _MIB, "mosaic_gpu", 132),
    Device("H200-141", 143_771 * _MIB, "mosaic_gpu", 132),
    Device("L4", 23_034 * _MIB, "triton", 58),
    Device("L40S", 46_068 * _MIB, "triton", 142),
    Device("RTX3090", 24_576 * _MIB, "triton", 82),
    Device("RTX4090", 24_564 * _MIB, "triton", 128),
    Device("V100-32", 32_768 * _MIB, "xla", 80),
)
DEVICES = {device.name: device for device in _KNOWN}


def device_named(name: str) -> Device:
    """A device of `DEVICES`: its name in any case and without spaces; "H200" for the only one that starts so.

    Raises:
      ValueError: there is none, or more than one.
    """
    wanted = name.replace(" ", "").upper()
    found = [known for known in DEVICES if known == wanted]
    found = found or [known for known in DEVICES if known.split("-")[0] == wanted]
    if len(found) != 1:
        raise ValueError(f"expected a device among {', '.join(DEVICES)}, or its memory, got {name!r}")
    return DEVICES[found[0]]


def memory_at_hand() -> int | None:
    """Bytes that JAX may use of each process's first device, the least of them; None where it does not say (a CPU)."""
    memory = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    if memory is None or jax.process_count() == 1:
        return memory
    return int(multihost_utils.process_allgather(np.int32(memory // _MIB)).min()) * _MIB


@contextlib.contextmanager
def planned_device() -> Iterator[None]:
    """Traces for one device like those at hand, or for the one that is described already.

    Kernels are chosen where each device is known to have whole rows: so they are with one device, and in a run on
    several under its mesh.
    """
    if jax.sharding.get_abstract_mesh().abstract_device or jax.default_backend() != "gpu":
        yield
        return
    device = jax.devices()[0]
    with use_abstract_mesh(_alone(device.device_kind, device.core_count)):
        yield


def _alone(kind: str, cores: int) -> AbstractMesh:
    device = AbstractDevice(device_kind=kind, platform="gpu", num_cores=cores)
    return AbstractMesh((), (), abstract_device=device)
