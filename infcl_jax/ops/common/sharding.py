"""How the devices share a batch, for what the compiler cannot split: kernels, and sums in a fixed order."""

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType

from infcl_jax.ops.common import gpu


def automatic_axes() -> tuple[str, ...]:
    """Axes of the mesh in use over which the compiler shards arrays; the batch is taken to be sharded over all."""
    mesh = jax.sharding.get_abstract_mesh()
    return tuple(name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Auto)


def on_each_device(function: Callable, in_specs: Any, out_specs: Any) -> Callable:
    """The function, applied to what each device has over `automatic_axes`.

    Args:
      function: of arrays.
      in_specs: `PartitionSpec`s of its arguments, as for `jax.shard_map`.
      out_specs: of its results.

    Returns:
      The function itself where the compiler shards over no axis.
    """
    axes = automatic_axes()
    if not axes:
        return function
    return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, axis_names=set(axes))


def rows_for_kernels(shape: tuple[int, ...]) -> int | None:
    """How many rows of an array each device gives to a kernel for Hopper GPUs.

    Args:
      shape: of the array, [..., width], whose leading axis the devices share.

    Returns:
      Their share; None without such a GPU or for a single row, or if it is not known that each device has whole rows.
      It is if there is one device, or inside `shard_map`, or under the mesh (`jax.sharding.use_abstract_mesh`) over
      which the leading axis is sharded.
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
