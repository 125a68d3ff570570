"""Start of the processes of a run."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from infcl_jax.runtime import jax_start, process_watch, rendezvous
from infcl_jax.runtime.processes import channel

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
        if watch is not None and (messages := channel()) is not None:
            watch.joined(messages)


def _detected_address(start_timeout: int) -> rendezvous.Address | None:
    """Return the address of the coordinator that JAX chooses on SLURM and Open MPI."""
    from jax._src.clusters import ClusterEnv

    text = os.environ.get("JAX_COORDINATOR_ADDRESS")
    text, *_ = ClusterEnv.auto_detect_unset_distributed_params(text, None, None, None, None, start_timeout)
    return None if text is None else rendezvous.parse_address(text, "JAX_COORDINATOR_PORT")


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
