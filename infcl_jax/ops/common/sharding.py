"""Sharding of kernels and of sums in a fixed order.

The compiler cannot partition either over the batch.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType

from infcl_jax.ops.common import gpu


def automatic_axes() -> tuple[str, ...]:
    """Names the mesh axes over which the compiler shards arrays.

    The batch is assumed to be sharded over all of them.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return tuple(name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Auto)


def on_each_device(function: Callable, in_specs: Any, out_specs: Any) -> Callable:
    """Applies `function` to each device's shards over `automatic_axes`.

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
    """Returns the rows per device, as input of a Hopper kernel.

    Args:
      shape: global shape `[..., width]`; the leading axis is sharded over the devices.

    Returns:
      Rows of one device. None without a Hopper GPU, for a one-dimensional array, or if whole rows per device cannot be
      guaranteed. They are guaranteed on one device, inside `shard_map`, and under the mesh
      (`jax.sharding.use_abstract_mesh`) over which the leading axis is sharded.
    """
    if gpu.compute_capability() != gpu.HOPPER or len(shape) < 2:
        return None
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.axis_names:
        known = mesh.abstract_device is not None or jax.device_count() == 1
    else:
        known = AxisType.Explicit not in mesh.axis_types
    shares = math.prod(mesh.shape[axis] for axis in automatic_axes())
    rows = math.prod(shape[1:-1]) * (shape[0] // shares)
    return rows if known and shape[0] % shares == 0 else None
