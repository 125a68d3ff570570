"""Sharding of device code that the compiler cannot partition.

This holds for kernels and for sums in a fixed order.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType

from infcl_jax.ops.common import gpu


def automatic_axes() -> tuple[str, ...]:
    """Return the mesh axes over which the compiler shards arrays (`AxisType.Auto`).

    The batch is assumed to be sharded over all of them.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return tuple(name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Auto)


def on_each_device(function: Callable, in_specs: Any, out_specs: Any) -> Callable:
    """Apply `function` to each device's shards over `automatic_axes`.

    Args:
      function: function of arrays.
      in_specs: `PartitionSpec`s of its arguments, as for `jax.shard_map`.
      out_specs: `PartitionSpec`s of its results, as for `jax.shard_map`.

    Returns:
      The mapped function, or `function` itself if the compiler shards over no axis.
    """
    axes = automatic_axes()
    if not axes:
        return function
    return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, axis_names=set(axes))


def rows_for_kernels(shape: tuple[int, ...]) -> int | None:
    """Return the number of rows that a Hopper kernel gets on each device.

    Args:
      shape: global shape `[..., width]`; the leading axis is sharded over the devices.

    Returns:
      Rows of one device. None without a Hopper GPU, for a one-dimensional array, or if the sharding is not known to
      give each device whole rows. It is known on one device, inside `shard_map`, and under the abstract mesh
      (`jax.sharding.use_abstract_mesh`) over which the leading axis is sharded.
    """
    if gpu.compute_capability() != gpu.HOPPER or len(shape) < 2:
        return None
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.axis_names:
        known = mesh.abstract_device is not None or jax.device_count() == 1
    else:
        known = AxisType.Explicit not in mesh.axis_types
    devices = math.prod(mesh.shape[axis] for axis in automatic_axes())
    rows = math.prod(shape[1:-1]) * (shape[0] // devices)
    return rows if known and shape[0] % devices == 0 else None
