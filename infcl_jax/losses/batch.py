"""What every loss shares: running where the batch is sharded, and means over the global batch."""

import functools
import math
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from infcl_jax.ops.pairwise_lse.base import Array, AxisName, accumulation_dtype


def over_mesh(
    loss: Callable[..., Any],
    settings: Hashable,
    sharded: Any,
    shared: Any,
    *,
    axis_name: AxisName | None,
    mesh: Mesh | None,
    sharded_result: Any = False,
) -> Any:
    """Calls `loss(settings, axis_name, sharded, shared)` on each device's rows of the batch.

    Args:
      loss: module-level function that computes the loss inside `shard_map`, with the same scalar on every device.
      settings: static, hashable settings. Eager calls with equal settings share one compiled program.
      sharded: pytree of arrays `[b, ...]`; None for what is absent.
      shared: pytree of arrays that all devices share.
      axis_name: with a mesh, its axis (or axes) over which the batch is sharded, the first by default; without one, the
        axis of the enclosing `shard_map`, or None for one device.
      mesh: given outside `shard_map`; None otherwise.
      sharded_result: whether the result has rows of each device instead of being the same everywhere, or a tuple of
        such for a tuple of results.

    Raises:
      ValueError: the mesh has no such axis, or its devices cannot share the batch evenly.
    """
    if mesh is None:
        return loss(settings, axis_name, sharded, shared)
    axis_name, devices = axis_and_devices(mesh, axis_name)
    for array in jax.tree.leaves(sharded):
        if array.shape[0] % devices:
            raise ValueError(
                f"expected a batch that {devices} devices can share evenly, got {array.shape[0]} rows; pad it and pass "
                "a mask that is False for the padding"
            )
    if AxisType.Explicit in mesh.axis_types:  # there a sharding is part of the type, and must be the one asked for
        rows = NamedSharding(mesh, PartitionSpec(axis_name))
        sharded = jax.tree.map(lambda a: jax.sharding.reshard(a, rows), sharded)
    return _mapped(loss, settings, axis_name, mesh, sharded_result)(sharded, shared)


@functools.cache
def _mapped(loss: Callable[..., Any], settings: Hashable, axis_name: AxisName, mesh: Mesh, sharded_result: Any) -> Any:
    """`loss` over the mesh. Compiled even when called eagerly: `shard_map` alone cannot run a `custom_vjp` there."""
    rows = PartitionSpec(axis_name)
    mapped = jax.shard_map(
        functools.partial(loss, settings, axis_name),
        mesh=mesh,
        in_specs=(rows, PartitionSpec()),
        out_specs=jax.tree.map(lambda is_rows: rows if is_rows else PartitionSpec(), sharded_result),
    )
    return jax.jit(mapped, inline=True)


def axis_and_devices(mesh: Mesh, axis_name: AxisName | None) -> tuple[AxisName, int]:
    """The axis (or axes) over which a batch is sharded, the mesh's first by default, and the number of its devices.

    Raises:
      ValueError: the mesh has no such axis.
    """
    axis_name = mesh.axis_names[0] if axis_name is None else axis_name
    axes = (axis_name,) if isinstance(axis_name, str) else axis_name
    if unknown := set(axes) - set(mesh.axis_names):
        raise ValueError(f"expected axis_name to be among the mesh's axes {mesh.axis_names}, got {sorted(unknown)}")
    return axis_name, math.prod(mesh.shape[axis] for axis in axes)


def global_mean(values: Array, mask: Array | None, axis_name: AxisName | None) -> Array:
    """Mean of `[b/n]` values over all devices, over those whose mask is True; 0 if there are none."""
    if mask is None:
        total, count = values.sum(), jnp.asarray(values.size, values.dtype)
    else:
        total = jnp.where(mask, values, jnp.zeros_like(values)).sum()
        count = mask.sum().astype(values.dtype)
    total, count = global_sum(total, axis_name), global_sum(count, axis_name)
    return total / jnp.maximum(count, jnp.ones_like(count))


def global_sum(value: Array, axis_name: AxisName | None) -> Array:
    """Sum over all devices."""
    return lax.psum(value, axis_name) if axis_name else value


def checked_scalar(name: str, value: Array | float, like: Array) -> Array:
    """`value` as a scalar of at least fp32.

    Raises:
      ValueError: it is not a scalar.
    """
    value = jnp.asarray(value)
    if value.shape != ():
        raise ValueError(f"expected {name} to be a scalar, got shape {value.shape}")
    return value.astype(accumulation_dtype(like.dtype))


def cross_entropy(negative_lse: Array, positive: Array) -> Array:
    """`log(exp(negative_lse) + exp(positive)) - positive` in nats, elementwise.

    Keeps full relative precision for a confident row: the difference of two logits near 100 would be rounded to 8e-6 in
    fp32, and its gradient to 1e-7, however small they are.
    """
    return jax.nn.softplus(negative_lse - positive)


def check_pairs(image: Array, text: Array) -> None:
    """Checks that row i of one side can be the positive of row i of the other.

    Raises:
      ValueError: shapes differ or are not `[b, D]`.
    """
    if image.ndim != 2 or image.shape != text.shape:
        raise ValueError(f"expected image and text features of the same shape [b, D], got {image.shape}, {text.shape}")
