"""Devices by name, and the memory that JAX takes of them."""

import os
from typing import NamedTuple

import jax
from jax.sharding import AbstractDevice, AbstractMesh

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
        """Bytes that JAX takes: three quarters, or the share that `XLA_PYTHON_CLIENT_MEM_FRACTION` says."""
        return int(self.memory * float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION") or 0.75))

    @property
    def mesh(self) -> AbstractMesh:
        """For `jax.sharding.use_abstract_mesh`: kernels of Hopper GPUs are planned under it, wherever it runs."""
        device = AbstractDevice(device_kind=self.name, platform="gpu", num_cores=self.cores)
        return AbstractMesh((), (), abstract_device=device)


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
    """Bytes that JAX may use of this process's first device; None where it does not say, as on the CPU."""
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
