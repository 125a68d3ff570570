"""Common code of the losses: dispatch over a mesh, global reductions, argument checks."""

import functools
import math
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Bool, Float, Num

from infcl_jax.ops.pairwise.base import Array, AxisName, accumulation_dtype, zero_masked


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
    """Call `loss(settings, axis_name, sharded, shared)` on each device's rows.

    Args:
      loss: module-level function to run inside `shard_map`.
      settings: static, hashable settings. Eager calls with equal settings share one compiled program.
      sharded: pytree of arrays `[b, ...]`; None for absent arrays.
      shared: pytree of replicated arrays.
      axis_name: axes of the batch, see `clip_loss`.
      mesh: device mesh when called outside `shard_map`; None inside it.
      sharded_result: whether the result, or each of a tuple, is sharded over rows instead of equal on all devices.
    """
    if mesh is None:
        return loss(settings, axis_name, sharded, shared)
    axis_name, devices = axis_and_devices(mesh, axis_name)
    axes = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    if manual := set(axes) & set(jax.sharding.get_abstract_mesh().manual_axes):
        raise ValueError(
            f"expected axis_name inside shard_map over the mesh axes {sorted(manual)}, got mesh; pass "
            f"axis_name={axes[0] if len(axes) == 1 else axes!r} without a mesh"
        )
    for array in jax.tree.leaves(sharded):
        if array.shape[0] % devices:
            raise ValueError(
                f"expected a batch that {devices} devices can share evenly, got {array.shape[0]} rows; pad it and pass "
                "a mask that is False for the padding"
            )
    if AxisType.Explicit in mesh.axis_types:  # then shard_map rejects arrays of another sharding
        rows = NamedSharding(mesh, PartitionSpec(axis_name))
        sharded = jax.tree.map(lambda a: jax.sharding.reshard(a, rows), sharded)
    return _mapped(loss, settings, axis_name, mesh, sharded_result)(sharded, shared)


@functools.cache
def _mapped(loss: Callable[..., Any], settings: Hashable, axis_name: AxisName, mesh: Mesh, sharded_result: Any) -> Any:
    """Map `loss` over the mesh, under `jit`: an eager `shard_map` cannot run a `custom_vjp`."""
    rows = PartitionSpec(axis_name)
    mapped = jax.shard_map(
        functools.partial(loss, settings, axis_name),
        mesh=mesh,
        in_specs=(rows, PartitionSpec()),
        out_specs=jax.tree.map(lambda is_rows: rows if is_rows else PartitionSpec(), sharded_result),
    )
    return jax.jit(mapped, inline=True)


def axis_and_devices(mesh: Mesh, axis_name: AxisName | None) -> tuple[AxisName, int]:
    """Return the batch axis (or axes) of a mesh, by default the first, and its device count."""
    axis_name = mesh.axis_names[0] if axis_name is None else axis_name
    axes = (axis_name,) if isinstance(axis_name, str) else axis_name
    if unknown := set(axes) - set(mesh.axis_names):
        raise ValueError(f"expected axis_name to be among the mesh's axes {mesh.axis_names}, got {sorted(unknown)}")
    return axis_name, math.prod(mesh.shape[axis] for axis in axes)


def global_mean(
    values: Float[Array, "b"],
    mask: Bool[Array, "b"] | None,
    axis_name: AxisName | None,
    weights: Float[Array, "b"] | None = None,
) -> Float[Array, ""]:
    """Weighted mean of unmasked `[b/n]` values over all devices; 0 if all are masked."""
    if weights is not None:
        weights = zero_masked(weights, mask)
        value_sum, count = (weights * zero_masked(values, mask)).sum(), weights.sum()
    elif mask is None:
        value_sum, count = values.sum(), jnp.asarray(values.size, values.dtype)
    else:
        value_sum = jnp.where(mask, values, jnp.zeros_like(values)).sum()
        count = mask.sum().astype(values.dtype)
    value_sum, count = global_sum(value_sum, axis_name), global_sum(count, axis_name)
    if weights is not None:
        return value_sum / jnp.where(count == 0, jnp.ones_like(count), count)
    return value_sum / jnp.maximum(count, jnp.ones_like(count))


def global_sum(value: Array, axis_name: AxisName | None) -> Array:
    """Sum `value` over all devices."""
    return lax.psum(value, axis_name) if axis_name else value


def checked_scalar(name: str, value: Num[Array, ""] | float, like: Float[Array, "..."]) -> Float[Array, ""]:
    """Cast `value` to at least fp32; raise `ValueError` unless it is a scalar."""
    value = jnp.asarray(value)
    if value.shape != ():
        raise ValueError(f"expected {name} to be a scalar, got shape {value.shape}")
    return value.astype(accumulation_dtype(like.dtype))


def checked_weights(weights: Num[Array, "b"] | None, features: Float[Array, "b d"]) -> Float[Array, "b"] | None:
    """Cast weights to at least fp32; raise `ValueError` unless they are one per row."""
    if weights is None:
        return None
    if weights.shape != features.shape[:1]:
        raise ValueError(f"expected weights of shape ({features.shape[0]},), got {weights.shape}")
    return jnp.asarray(weights).astype(accumulation_dtype(features.dtype))


def cross_entropy(negative_lse: Float[Array, "b"], positive: Float[Array, "b"]) -> Float[Array, "b"]:
    """Elementwise `log(exp(negative_lse) + exp(positive)) - positive`, in nats.

    Softplus keeps full relative precision for a confident row. In fp32, the direct difference of two logits near 100
    has a rounding error of 8e-6, however small the loss is. Its gradient has one of 1e-7.
    """
    return jax.nn.softplus(negative_lse - positive)


def check_pairs(image: Float[Array, "b d"], text: Float[Array, "b d"]) -> None:
    """Raise `ValueError` unless image and text have equal shapes `[b, D]`."""
    if image.ndim != 2 or image.shape != text.shape:
        raise ValueError(f"expected image and text features of the same shape [b, D], got {image.shape}, {text.shape}")
