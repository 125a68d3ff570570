"""Devices by name, and the memory that JAX takes of them."""

import os
from typing import NamedTuple

import jax

_MIB = 1 << 20


class Device(NamedTuple):
    """An accelerator.

    Attributes:
      memory: bytes, as its driver reports them.
      implementation: of the loss, the fastest one that it runs.
    """

    memory: int
    implementation: str

    @property
    def usable(self) -> int:
        """Bytes that JAX takes: three quarters, or the share that `XLA_PYTHON_CLIENT_MEM_FRACTION` says."""
        return int(self.memory * float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION") or 0.75))


DEVICES = {
    "A10": Device(23_028 * _MIB, "triton"),
    "A100-40": Device(40_960 * _MIB, "triton"),
    "A100-80": Device(81_920 * _MIB, "triton"),
    "H100-80": Device(81_559 * _MIB, "mosaic_gpu"),
    "H200-141": Device(143_771 * _MIB, "mosaic_gpu"),
    "L4": Device(23_034 * _MIB, "triton"),
    "L40S": Device(46_068 * _MIB, "triton"),
    "RTX3090": Device(24_576 * _MIB, "triton"),
    "RTX4090": Device(24_564 * _MIB, "triton"),
    "V100-32": Device(32_768 * _MIB, "xla"),
}


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
