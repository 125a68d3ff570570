"""Start-up on one or many hosts, the device mesh, and moving arrays between processes and devices."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

DATA_AXIS = "data"
# On GPUs: the ring's transfers between those of a process as plain copies, which take no multiprocessors, one for each
# hop; products by cuBLAS, which adds to what is there in place, and none of them joined to one whose result is cut up.
XLA_FLAGS = {
    "xla_gpu_collective_permute_mode": "peer",
    "xla_gpu_collective_permute_combine_threshold_bytes": str(1 << 33),
    "xla_gpu_enable_triton_gemm": "false",
    "xla_gpu_dot_merger_threshold_mb": "0",
}
# Of a GPU's memory, what JAX takes; the rest is for NCCL, libraries and programs.
MEMORY_SHARE = 0.9
_SHARE_NAMES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")


def initialize(environ: Mapping[str, str] | None = None) -> None:
    """Prepares this process: to be called before anything asks JAX for its devices.

    Adds what makes the loss fast on GPUs to `XLA_FLAGS`, where that does not say otherwise already, lets JAX take
    `memory_share()` of their memory, and joins this process to the others of a multi-process run, once.

    The cluster is read from the environment. Explicit settings come first:
    `COORDINATOR_ADDRESS` (host:port of process 0), `NUM_PROCESSES` and `PROCESS_ID`. Otherwise SLURM, Open MPI and the
    other clusters that `jax.distributed.initialize` detects by itself are used when they announce more than one task.

    Args:
      environ: the environment variables to read; those of the process by default.

    Raises:
      ValueError: only some of the three explicit settings are present, or a number among them is not one.
    """
    flags = os.environ.get("XLA_FLAGS", "").split()
    present = {flag.split("=")[0] for flag in flags}
    missing = [f"--{name}={value}" for name, value in XLA_FLAGS.items() if f"--{name}" not in present]
    os.environ["XLA_FLAGS"] = " ".join([*flags, *missing])
    if not _given_share():
        os.environ[_SHARE_NAMES[0]] = str(MEMORY_SHARE)
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
    """The share of a GPU's memory that JAX takes: what `XLA_CLIENT_MEM_FRACTION` says, else nine tenths."""
    return float(_given_share() or MEMORY_SHARE)


def _given_share() -> str | None:
    return next(filter(None, map(os.environ.get, _SHARE_NAMES)), None)


def _explicit_cluster(names: Sequence[str], given: Mapping[str, str]) -> tuple[str, int, int]:
    missing = [name for name in names if name not in given]
    if missing:
        raise ValueError(f"expected all of {', '.join(names)} or none of them; missing: {', '.join(missing)}")
    address, count, rank = (given[name] for name in names)
    if not count.isdecimal() or not rank.isdecimal() or int(rank) >= int(count):
        raise ValueError(f"expected 0 <= PROCESS_ID < NUM_PROCESSES, got PROCESS_ID={rank}, NUM_PROCESSES={count}")
    return address, int(count), int(rank)


def _cluster_tasks(environ: Mapping[str, str]) -> int:
    for name in ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"):
        # An interactive SLURM shell sets SLURM_NTASKS without being one of the tasks; srun adds SLURM_STEP_ID.
        if environ.get(name, "").isdecimal() and (name != "SLURM_NTASKS" or "SLURM_STEP_ID" in environ):
            return int(environ[name])
    return 1


def data_mesh(devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh with the single axis `"data"` over `devices` (all devices of all processes by default)."""
    devices = jax.devices() if devices is None else devices
    return Mesh(np.asarray(devices), (DATA_AXIS,), axis_types=(AxisType.Auto,))


def shard_batch(mesh: Mesh, tree: Any) -> Any:
    """Process-local arrays `[b_local, ...]` to global arrays `[b, ...]`, sharded over the mesh on their first axis.

    Raises:
      ValueError: the rows of this process cannot be divided evenly over its devices.
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
    """The same host arrays on every device of the mesh; every process must pass the same values."""
    sharding = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(lambda a: jax.make_array_from_callback(np.shape(a), sharding, lambda i: np.asarray(a)[i]), tree)


def to_host(tree: Any) -> Any:
    """Global arrays, however sharded, to whole NumPy arrays on every process."""
    return jax.tree.map(lambda a: np.asarray(multihost_utils.process_allgather(a, tiled=True)), tree)


def is_lead() -> bool:
    """True on the one process that writes logs and pictures."""
    return jax.process_index() == 0
