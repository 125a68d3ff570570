"""Sharding of the train state over devices."""

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

PARAMETER_SHARDINGS = ("replicated", "fsdp")
# Arrays with fewer elements (gains, biases, scalars) stay replicated: sharding saves less than 64 KiB of fp32 each.
MIN_SIZE = 1 << 14


def sharded_axis(shape: Sequence[int], devices: int, parameter_sharding: str) -> int | None:
    """Choose the axis along which to shard an array over n devices; None for a replicated array.

    "fsdp" (ZeRO, Rajbhandari et al. 2020) shards arrays of at least `MIN_SIZE` elements along their largest axis that n
    divides.
    """
    divisible = [axis for axis, size in enumerate(shape) if size % devices == 0]
    if parameter_sharding == "replicated" or devices == 1 or not divisible or math.prod(shape) < MIN_SIZE:
        return None
    return max(divisible, key=lambda axis: shape[axis])


def shardings(tree: Any, mesh: Mesh, parameter_sharding: str) -> Any:
    """Map each array (or shape) of a state to its sharding.

    The sharding depends on the shape alone, so a parameter and its optimizer moments have the same.
    """

    def leaf_sharding(leaf: Any) -> NamedSharding:
        axis = sharded_axis(leaf.shape, mesh.size, parameter_sharding)
        spec = PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, mesh.axis_names)
        return NamedSharding(mesh, spec)

    return jax.tree.map(leaf_sharding, tree)


def constrain(tree: Any, mesh: Mesh | None, parameter_sharding: str) -> Any:
    """Constrain a tree to its `shardings` inside jit, if there is a mesh."""
    if mesh is None:
        return tree
    return jax.lax.with_sharding_constraint(tree, shardings(tree, mesh, parameter_sharding))


def bytes_per_device(tree: Any, devices: int, parameter_sharding: str) -> int:
    """Count the bytes of a state (arrays or shapes) on each device."""

    def leaf_bytes(leaf: Any) -> int:
        axis = sharded_axis(leaf.shape, devices, parameter_sharding)
        return math.prod(leaf.shape) * leaf.dtype.itemsize // (1 if axis is None else devices)

    return sum(map(leaf_bytes, jax.tree.leaves(tree)))
