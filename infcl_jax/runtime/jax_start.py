"""Settings that JAX and CUDA read when they start: XLA flags, memory fraction and hardware queues."""

import os
import warnings

import jax

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
