"""Device meshes, and transfers between hosts and devices."""

import socket
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from infcl_jax.runtime import processes

DATA_AXIS = "data"
# Axes of the two-level mesh, slowest links first: the ring rotates within a host between two transfers across hosts.
HOST_AXES = ("host", "device")
MESHES = ("flat", "hosts")


def data_mesh(devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Create a mesh with the single axis `"data"`.

    Examples:
      >>> data_mesh().axis_names
      ('data',)

    Args:
      devices: devices of the mesh; by default all devices of all processes.
    """
    devices = jax.devices() if devices is None else devices
    return Mesh(np.asarray(devices), (DATA_AXIS,), axis_types=(AxisType.Auto,))


def training_mesh(layout: str | None = None) -> Mesh:
    """Create the mesh of all devices for a training run.

    All processes must call this function.

    Examples:
      >>> training_mesh("flat").axis_names
      ('data',)

    Args:
      layout: "flat": the single axis `"data"`. "hosts": the axes `("host", "device")`, where the processes of a host
        form a row; if all processes share one host, each process forms a row. None: "hosts" with several hosts of the
        same number of devices, more than one, else "flat".

    Raises:
      ValueError: the layout is unknown, or is "hosts" and the hosts have different numbers of devices.
    """
    if layout not in (None, *MESHES):
        raise ValueError(f"expected mesh to be one of {MESHES}, got {layout!r}")
    rows = _mesh_rows(layout, jax.devices(), processes.gather(socket.gethostname()))
    if rows is None:
        return data_mesh()
    return Mesh(np.asarray(rows), HOST_AXES, axis_types=(AxisType.Auto,) * len(HOST_AXES))


def _mesh_rows(
    layout: str | None, devices: Sequence[jax.Device], hosts: Sequence[str]
) -> list[list[jax.Device]] | None:
    """Return the rows of the two-level mesh; None for a flat mesh. `hosts` has the host of each process."""
    several = len(set(hosts)) > 1
    if layout == "flat" or (layout is None and not several):
        return None
    rows: dict[str | int, list[jax.Device]] = {}
    for device in devices:
        rows.setdefault(hosts[device.process_index] if several else device.process_index, []).append(device)
    sizes = [len(row) for row in rows.values()]
    if len(set(sizes)) == 1 and (layout == "hosts" or sizes[0] > 1):
        return list(rows.values())
    if layout == "hosts":
        raise ValueError(f"expected the same number of devices on each host with mesh 'hosts', got {sizes}; set 'flat'")
    return None


def flat_mesh(mesh: Mesh) -> Mesh:
    """Return the mesh of the same devices with the single axis `"data"`.

    Examples:
      >>> flat_mesh(training_mesh("hosts")).axis_names
      ('data',)
    """
    return mesh if mesh.axis_names == (DATA_AXIS,) else data_mesh(mesh.devices.ravel().tolist())


def shard_batch(mesh: Mesh, tree: Any) -> Any:
    """Assemble process-local rows into global arrays sharded over the mesh.

    Examples:
      >>> batch = shard_batch(mesh, {"image": np.zeros((8, 4)), "text": np.zeros((8, 4))})
      >>> batch["image"].shape, batch["image"].sharding.spec
      ((8, 4), P('data',))

    Args:
      mesh: device mesh; the leading axis is sharded over all its axes.
      tree: pytree of process-local arrays `[b_local, ...]`.

    Returns:
      Pytree of global arrays `[b, ...]`.

    Raises:
      ValueError: the rows of this process are not divisible by its device count.
    """
    sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    local_devices = len(mesh.local_devices)

    def put(array: Any) -> jax.Array:
        if array.shape[0] % local_devices:
            raise ValueError(
                f"expected a batch that the {local_devices} devices of this process can share evenly, got "
                f"{array.shape[0]} rows; choose a batch_size that is a multiple of the device count ({mesh.size})"
            )
        return jax.make_array_from_process_local_data(sharding, np.asarray(array))

    return jax.tree.map(put, tree)


def replicate(mesh: Mesh, tree: Any) -> Any:
    """Copy host arrays to every device of the mesh.

    Every process must pass the same values.

    Examples:
      >>> params = replicate(mesh, {"scale": np.float32(14.3)})
      >>> params["scale"].sharding.is_fully_replicated
      True
    """
    sharding = NamedSharding(mesh, PartitionSpec())

    def copy(array: Any) -> jax.Array:
        if jnp.issubdtype(jax.dtypes.result_type(array), jax.dtypes.prng_key):
            return jax.random.wrap_key_data(copy(jax.random.key_data(array)), impl=jax.random.key_impl(array))
        return jax.make_array_from_callback(np.shape(array), sharding, lambda i: np.asarray(array)[i])

    return jax.tree.map(copy, tree)


def to_host(tree: Any) -> Any:
    """Gather global arrays of any sharding into NumPy arrays on every process.

    Examples:
      >>> to_host(shard_batch(mesh, np.arange(8)))
      array([0, 1, 2, 3, 4, 5, 6, 7], dtype=int32)
    """
    return jax.tree.map(lambda a: np.asarray(multihost_utils.process_allgather(a, tiled=True)), tree)
