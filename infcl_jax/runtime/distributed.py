"""Start of JAX: the settings that it reads, and the processes of a run."""

import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from infcl_jax.runtime import process_watch, rendezvous
from infcl_jax.runtime.processes import channel

# Seconds. A scheduler starts the tasks of a job within seconds; containers and network file systems add a minute or so.
START_TIMEOUT = 120
# Seconds. Longer than the pauses of virtual machines and networks, shorter than the start of a run.
LOST_PROCESS_TIMEOUT = 30
XLA_FLAGS = {
    # Ring transfers within a process are peer-to-peer copies, which occupy no SMs.
    "xla_gpu_collective_permute_mode": "peer",
    # Bytes (8 GiB): combines all transfers of one rotation around the ring into one.
    "xla_gpu_collective_permute_combine_threshold_bytes": str(1 << 33),
    # Disables Triton GEMMs in favor of cuBLAS, which accumulates into its output in place.
    "xla_gpu_enable_triton_gemm": "false",
    # MiB: 0 disables merging of GEMMs, whose merged result would have to be sliced.
    "xla_gpu_dot_merger_threshold_mb": "0",
    # With it, several losses in one program (Matryoshka) read memory before it is written: NaN, or the gradients of the
    # step before. JAX 0.12.0.1, on simulated devices. Steps take the same time without it.
    "xla_cpu_enable_concurrency_optimized_scheduler": "false",
}
# Set too if the GPUs decode images. Without CUDA graphs, the decoder's kernels start sooner: with 16 chunks of 2,048
# images, files give 89 instead of 63 % of the synthetic rate on an H100, 2026-11-26.
DECODE_XLA_FLAGS = {"xla_gpu_enable_command_buffer": ""}
# Fraction of GPU memory that JAX preallocates. The rest is for NCCL, libraries and CUDA modules.
MEMORY_SHARE = 0.9
# Hardware queues of a GPU. With fewer, decoding waits for the queued training programs: 233 instead of 9,830 images/s
# during GEMMs on an H200, 2026-11-23.
DECODE_CONNECTIONS = 32
_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
_SHARE_NAMES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
_PACKAGE = os.path.dirname(__file__)


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
    `infcl_jax.runtime.distributed.memory_share()` of GPU memory. A process that has joined does not join again.

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
    set_variables(gpu_decode=gpu_decode)
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


def set_variables(*, gpu_decode: bool = False) -> None:
    """Set XLA flags, memory fraction and hardware queues, unless the user has set them.

    Warns if JAX has already started without them. If the GPUs may decode images, sets `CUDA_DEVICE_MAX_CONNECTIONS` and
    turns off CUDA graphs.
    """
    flags = os.environ.get("XLA_FLAGS", "").split()
    present = {flag.split("=")[0] for flag in flags}
    defaults = XLA_FLAGS | (DECODE_XLA_FLAGS if gpu_decode else {})
    missing = [f"--{name}={value}" for name, value in defaults.items() if f"--{name}" not in present]
    os.environ["XLA_FLAGS"] = " ".join([*flags, *missing])
    variables: dict[str, str] = {}
    if not _given_share():
        variables[_SHARE_NAMES[0]] = str(MEMORY_SHARE)
    if gpu_decode and _CONNECTIONS not in os.environ:
        variables[_CONNECTIONS] = str(DECODE_CONNECTIONS)
    os.environ.update(variables)
    platform = _started_platform()
    late = [flag for flag in missing if flag.startswith(f"--xla_{platform}_")]
    if platform == "gpu":
        late += [f"{name}={value}" for name, value in variables.items()]
    if late:
        warnings.warn(
            f"JAX started before these settings, which have no effect now: {' '.join(late)}. Restart this Python "
            f"process (or notebook), and call infcl_jax.distributed.initialize({'gpu_decode=True' * gpu_decode}) "
            "before the first use of JAX",
            skip_file_prefixes=(_PACKAGE,),
        )


def start_platforms() -> None:
    """Start JAX's devices.

    Raises:
      ValueError: `JAX_PLATFORMS` names a platform that JAX does not know, or one without a device.
    """
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # JAX asserts that some platform has started
        platforms = jax.config.jax_platforms
        if not platforms:
            raise
        reason = str(error).partition("(set JAX_PLATFORMS=")[0].strip() or "no such device"
        raise ValueError(
            f"expected JAX_PLATFORMS to name a platform of this machine, got {platforms!r}: {reason.rstrip('.')}; "
            "cpu is always available, and JAX chooses if the variable is unset"
        ) from error


def memory_share() -> float:
    """Fraction of GPU memory that JAX preallocates, 0.9 by default."""
    return float(_given_share() or MEMORY_SHARE)


def _given_share() -> str | None:
    """Return the memory fraction set in the environment, if any."""
    return next(filter(None, map(os.environ.get, _SHARE_NAMES)), None)


def _started_platform() -> str | None:
    """Return JAX's platform, or None if it has not started."""
    try:
        from jax._src.xla_bridge import backends_are_initialized
    except ImportError:  # a private name; without it, there is no warning
        return None
    return jax.default_backend() if backends_are_initialized() else None
