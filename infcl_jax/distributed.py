"""Process startup, the device mesh, and transfers between hosts and devices."""

import hashlib
import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

DATA_AXIS = "data"
XLA_FLAGS = {
    # Ring transfers within a process are peer-to-peer copies, which occupy no SMs.
    "xla_gpu_collective_permute_mode": "peer",
    # Bytes (8 GiB): combines all transfers of one rotation around the ring into one.
    "xla_gpu_collective_permute_combine_threshold_bytes": str(1 << 33),
    # Disables Triton GEMMs in favor of cuBLAS, which accumulates into its output in place.
    "xla_gpu_enable_triton_gemm": "false",
    # MiB: 0 disables merging of GEMMs, whose merged result would have to be sliced.
    "xla_gpu_dot_merger_threshold_mb": "0",
}
# Fraction of GPU memory that JAX preallocates. The rest is for NCCL, libraries and CUDA modules.
MEMORY_SHARE = 0.9
# Hardware queues of a GPU. With fewer, decoding waits for the queued training programs: 233 instead of 9,830 images/s
# beside GEMMs on an H200, 2026-11-23.
DECODE_CONNECTIONS = 32
_SHARE_NAMES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")


def initialize(environ: Mapping[str, str] | None = None, *, gpu_decode: bool = False) -> None:
    """Set XLA flags and the memory fraction, and join a multi-process run.

    Call this before JAX initializes its devices. Flags that the environment variable `XLA_FLAGS` already sets keep
    their values. JAX then preallocates `memory_share()` of GPU memory. A process that has joined does not join again.

    The environment variables `COORDINATOR_ADDRESS` (host:port of process 0), `NUM_PROCESSES` and `PROCESS_ID` take
    precedence. Otherwise, if SLURM or Open MPI has started more than one task, `jax.distributed.initialize` detects
    the cluster.

    Args:
      environ: environment variables that describe the cluster; `os.environ` by default.
      gpu_decode: whether the GPUs may decode images; sets `CUDA_DEVICE_MAX_CONNECTIONS` if it is unset.

    Raises:
      ValueError: some but not all of the three variables are set, or `PROCESS_ID` and `NUM_PROCESSES` are not integers
        with `0 <= PROCESS_ID < NUM_PROCESSES`.
    """
    flags = os.environ.get("XLA_FLAGS", "").split()
    present = {flag.split("=")[0] for flag in flags}
    missing = [f"--{name}={value}" for name, value in XLA_FLAGS.items() if f"--{name}" not in present]
    os.environ["XLA_FLAGS"] = " ".join([*flags, *missing])
    if not _given_share():
        os.environ[_SHARE_NAMES[0]] = str(MEMORY_SHARE)
    if gpu_decode:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", str(DECODE_CONNECTIONS))
    if jax.distributed.is_initialized():
        return
    environ = os.environ if environ is None else environ
    names = ("COORDINATOR_ADDRESS", "NUM_PROCESSES", "PROCESS_ID")
    given = {name: environ[name] for name in names if environ.get(name)}
    if given:
        address, count, rank = _explicit_cluster(names, given)
        if count > 1:
            jax.distributed.initialize(coordinator_address=address, num_processes=count, process_id=rank)
    elif _cluster_tasks(environ) > 1:
        jax.distributed.initialize()


def memory_share() -> float:
    """Fraction of GPU memory that JAX preallocates.

    Read from `XLA_CLIENT_MEM_FRACTION` or `XLA_PYTHON_CLIENT_MEM_FRACTION`; 0.9 by default.
    """
    return float(_given_share() or MEMORY_SHARE)


def _given_share() -> str | None:
    """Return the memory fraction set in the environment, if any."""
    return next(filter(None, map(os.environ.get, _SHARE_NAMES)), None)


def _explicit_cluster(names: Sequence[str], given: Mapping[str, str]) -> tuple[str, int, int]:
    """Return coordinator address, number of processes and process ID."""
    missing = [name for name in names if name not in given]
    if missing:
        raise ValueError(f"expected all of {', '.join(names)} or none of them; missing: {', '.join(missing)}")
    address, count, rank = (given[name] for name in names)
    if not count.isdecimal() or not rank.isdecimal() or int(rank) >= int(count):
        raise ValueError(f"expected 0 <= PROCESS_ID < NUM_PROCESSES, got PROCESS_ID={rank}, NUM_PROCESSES={count}")
    return address, int(count), int(rank)


def _cluster_tasks(environ: Mapping[str, str]) -> int:
    """Return the number of tasks that the cluster announces; 1 without a cluster."""
    for name in ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"):
        # An interactive SLURM shell sets SLURM_NTASKS but is not a task. Only srun sets SLURM_STEP_ID.
        if environ.get(name, "").isdecimal() and (name != "SLURM_NTASKS" or "SLURM_STEP_ID" in environ):
            return int(environ[name])
    return 1


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

    Args:
      devices: devices of the mesh; by default all devices of all processes.
    """
    devices = jax.devices() if devices is None else devices
    return Mesh(np.asarray(devices), (DATA_AXIS,), axis_types=(AxisType.Auto,))


def shard_batch(mesh: Mesh, tree: Any) -> Any:
    """Assemble process-local rows into global arrays sharded over the mesh.

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
    """
    sharding = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(lambda a: jax.make_array_from_callback(np.shape(a), sharding, lambda i: np.asarray(a)[i]), tree)


def to_host(tree: Any) -> Any:
    """Gather global arrays of any sharding into NumPy arrays on every process."""
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
    """Return whether this is process 0, which writes logs and images."""
    return jax.process_index() == 0
