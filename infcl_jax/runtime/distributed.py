"""Process startup, the device mesh, and transfers between hosts and devices."""

import hashlib
import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from infcl_jax.ops.common.checks import check_choice
from infcl_jax.runtime import jax_start, process_watch, rendezvous

DATA_AXIS = "data"
# Axes of the two-level mesh, slowest links first: the ring rotates within a host between two transfers across hosts.
HOST_AXES = ("host", "device")
MESHES = ("flat", "hosts")
# Seconds. A scheduler starts the tasks of a job within seconds; containers and network file systems add a minute or so.
START_TIMEOUT = 120
# Seconds. Longer than the pauses of virtual machines and networks, shorter than the start of a run.
LOST_PROCESS_TIMEOUT = 30


def initialize(
    environ: Mapping[str, str] | None = None,
    *,
    gpu_decode: bool = False,
    start_timeout: int = START_TIMEOUT,
    lost_process_timeout: int = LOST_PROCESS_TIMEOUT,
    log_dir: str | os.PathLike[str] | None = None,
) -> None:
    """Set XLA flags and the memory fraction, and join a multi-process run.

    Call this before JAX initializes its devices; otherwise a warning names the settings that came too late. Flags that
    the environment variable `XLA_FLAGS` already sets keep their values. JAX then preallocates
    `infcl_jax.runtime.jax_start.memory_share()` of GPU memory. A process that has joined does not join again.

    The environment variables `COORDINATOR_ADDRESS` (host:port of process 0), `NUM_PROCESSES` and `PROCESS_ID` take
    precedence. Otherwise, if SLURM or Open MPI has started more than one task, `jax.distributed.initialize` detects
    the cluster.

    Examples:
      >>> infcl_jax.distributed.initialize()  # before the first use of a device
      >>> jax.process_count()  # of the cluster's environment variables; one without any
      1

    Args:
      environ: environment variables that describe the cluster; `os.environ` by default.
      gpu_decode: whether the GPUs may decode images; sets `CUDA_DEVICE_MAX_CONNECTIONS` if it is unset, and turns off
        CUDA graphs if `XLA_FLAGS` says nothing about them.
      start_timeout: seconds until all processes must have joined.
      lost_process_timeout: seconds without a heartbeat after which JAX considers a process lost.
      log_dir: folder for the logs of native code, `process-RANK.err`. With it, a process that is lost, fails or never
        starts ends every other one with one line and status `infcl_jax.exit_codes.RESUME`, or 1 after a failure. None:
        JAX aborts the other processes with native stack traces.

    Raises:
      ValueError: some but not all of the three variables are set, `PROCESS_ID` and `NUM_PROCESSES` are not integers
        with `0 <= PROCESS_ID < NUM_PROCESSES`, or `COORDINATOR_ADDRESS` is not HOST:PORT. Also if its port is in use
        by another run or program, or its host has no address.
      TimeoutError: not all processes have started in time, and `log_dir` is None.
    """
    jax_start.set_variables(gpu_decode=gpu_decode)
    if jax.distributed.is_initialized():
        return
    environ = os.environ if environ is None else environ
    names = ("COORDINATOR_ADDRESS", "NUM_PROCESSES", "PROCESS_ID")
    given = {name: environ[name] for name in names if environ.get(name)}
    cluster: dict[str, Any] = {}
    if given:
        text, count, rank = _explicit_cluster(names, given)
        cluster = {"coordinator_address": text, "num_processes": count, "process_id": rank}
    else:
        count, rank = _cluster_tasks(environ)
    if count == 1:
        return
    address = rendezvous.parse_address(text) if given else None
    timeouts = {"start_timeout": start_timeout, "lost_process_timeout": lost_process_timeout}
    watch = None if log_dir is None else process_watch.start(Path(log_dir), rank, count, **timeouts)
    with process_watch.failures():
        address = address or _detected_address(start_timeout)
        if address is not None:  # JAX says why it finds none
            rendezvous.meet(address, rank, count, watch=watch, **timeouts)
        jax.distributed.initialize(
            **cluster, initialization_timeout=start_timeout, heartbeat_timeout_seconds=lost_process_timeout
        )
        if watch is not None:
            watch.joined(coordination_client())


def _detected_address(start_timeout: int) -> rendezvous.Address | None:
    """Return the address of the coordinator that JAX chooses on SLURM and Open MPI."""
    from jax._src.clusters import ClusterEnv

    text = os.environ.get("JAX_COORDINATOR_ADDRESS")
    text, *_ = ClusterEnv.auto_detect_unset_distributed_params(text, None, None, None, None, start_timeout)
    return None if text is None else rendezvous.parse_address(text, "JAX_COORDINATOR_PORT")


def coordination_client() -> Any:
    """Return the client of the coordination service, which has a key-value store for small messages.

    `jax.distributed` must be initialized.
    """
    from jax._src.distributed import global_state

    return global_state.client


def _explicit_cluster(names: Sequence[str], given: Mapping[str, str]) -> tuple[str, int, int]:
    """Return coordinator address, number of processes and process ID."""
    missing = [name for name in names if name not in given]
    if missing:
        raise ValueError(f"expected all of {', '.join(names)} or none of them; missing: {', '.join(missing)}")
    address, count, rank = (given[name] for name in names)
    if not count.isdecimal() or not rank.isdecimal() or int(rank) >= int(count):
        raise ValueError(f"expected 0 <= PROCESS_ID < NUM_PROCESSES, got PROCESS_ID={rank}, NUM_PROCESSES={count}")
    return address, int(count), int(rank)


def _cluster_tasks(environ: Mapping[str, str]) -> tuple[int, int]:
    """Return the cluster's number of tasks and the index of this one.

    Without a cluster, they are (1, 0).
    """
    for name, rank in (("SLURM_NTASKS", "SLURM_PROCID"), ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")):
        # An interactive SLURM shell sets SLURM_NTASKS but is not a task. Only srun sets SLURM_STEP_ID.
        if environ.get(name, "").isdecimal() and (name != "SLURM_NTASKS" or "SLURM_STEP_ID" in environ):
            return int(environ[name]), int(environ.get(rank, 0))
    return 1, 0


class LocalProcesses(NamedTuple):
    """Number of processes that share resources with this one, itself included.

    Attributes:
      host: processes of this host.
      cores: those that run on the same CPU cores; processes bound to other cores do not count.
    """

    host: int
    cores: int


def local_processes() -> LocalProcesses:
    """Count the processes of this host and of its cores.

    All processes must call this function.
    """
    if jax.process_count() == 1:
        return LocalProcesses(1, 1)
    host = socket.gethostname()
    own = np.array([_hash(host), _hash(f"{host} {sorted(os.sched_getaffinity(0))}")])
    same = multihost_utils.process_allgather(own) == own
    return LocalProcesses(*map(int, same.sum(axis=0)))


def _hash(text: str) -> np.uint32:
    return np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint32)[0]


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
    if layout is not None:
        check_choice("mesh", layout, MESHES)
    rows = _mesh_rows(layout, jax.devices(), _host_keys())
    if rows is None:
        return data_mesh()
    return Mesh(np.asarray(rows), HOST_AXES, axis_types=(AxisType.Auto,) * len(HOST_AXES))


def _mesh_rows(layout: str | None, devices: Sequence[jax.Device], keys: Sequence[int]) -> list[list[jax.Device]] | None:
    """Return the rows of the two-level mesh; None for a flat mesh.

    Args:
      layout: see `training_mesh`.
      devices: devices of all processes.
      keys: key of the host of each process.
    """
    several = len(set(keys)) > 1
    if layout == "flat" or (layout is None and not several):
        return None
    rows: dict[int, list[jax.Device]] = {}
    for device in devices:
        rows.setdefault(keys[device.process_index] if several else device.process_index, []).append(device)
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


def _host_keys() -> list[int]:
    """Return a hash of the host name of each process."""
    own = np.array([_hash(socket.gethostname())])
    return (multihost_utils.process_allgather(own) if jax.process_count() > 1 else own).ravel().tolist()


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


def union(values: Iterable[int]) -> list[int]:
    """Gather the different integers of all processes.

    Every process must call this. It synchronizes the processes.

    Args:
      values: int64 values of this process.

    Returns:
      The values of all processes in ascending order, the same on each.
    """
    local = np.array(sorted(set(values)), np.int64)
    if jax.process_count() == 1:
        return local.tolist()
    sizes = multihost_utils.process_allgather(np.int32(len(local)))
    # Pairs of int32, because JAX truncates int64 by default.
    padded = np.zeros((int(sizes.max()), 2), np.int32)
    padded[: len(local)] = local.view(np.int32).reshape(-1, 2)
    gathered = np.ascontiguousarray(multihost_utils.process_allgather(padded)).view(np.int64)[..., 0]
    return sorted({int(value) for row, size in zip(gathered, sizes, strict=True) for value in row[:size]})


def is_lead() -> bool:
    """Return whether this is process 0, which writes logs and images.

    Examples:
      >>> if is_lead():
      ...     print("one line for all processes")
      one line for all processes
    """
    return jax.process_index() == 0
