"""How the state of a run is spread over the devices."""

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

PARAMETER_SHARDINGS = ("replicated", "fsdp")
# Arrays of fewer elements (gains, biases, scalars) stay whole on every device: there is little to save.
MIN_SIZE = 1 << 14


def sharded_axis(shape: Sequence[int], devices: int, parameter_sharding: str) -> int | None:
    """The axis over which an array of the state is sharded; None if every device has all of it.

    Args:
      shape: of the array.
      devices: n, how many there are.
      parameter_sharding: "replicated", or "fsdp" (ZeRO, Rajbhandari et al. 2020) for the largest axis that n divides,
        of arrays with at least `MIN_SIZE` elements.
    """
    even = [axis for axis, size in enumerate(shape) if size % devices == 0]
    if parameter_sharding == "replicated" or devices == 1 or not even or math.prod(shape) < MIN_SIZE:
        return None
    return max(even, key=lambda axis: shape[axis])


def shardings(tree: Any, mesh: Mesh, parameter_sharding: str) -> Any:
    """The sharding of every array, or shape, of a state. An array and its optimizer moments have the same."""

    def of(leaf: Any) -> NamedSharding:
        axis = sharded_axis(leaf.shape, mesh.size, parameter_sharding)
        spec = PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, mesh.axis_names)
        return NamedSharding(mesh, spec)

    return jax.tree.map(of, tree)


def constrain(tree: Any, mesh: Mesh | None, parameter_sharding: str) -> Any:
    """Within a compiled function: the same numbers, in these `shardings`; as they are without a mesh."""
    if mesh is None:
        return tree
    return jax.lax.with_sharding_constraint(tree, shardings(tree, mesh, parameter_sharding))


def bytes_per_device(tree: Any, devices: int, parameter_sharding: str) -> int:
    """Bytes that each device holds of the arrays, or shapes, of a state."""

    def of(leaf: Any) -> int:
        axis = sharded_axis(leaf.shape, devices, parameter_sharding)
        return math.prod(leaf.shape) * leaf.dtype.itemsize // (1 if axis is None else devices)

    return sum(map(of, jax.tree.leaves(tree)))
