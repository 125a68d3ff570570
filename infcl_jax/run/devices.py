"""Devices of a run: simulated devices, `jax.distributed`, the mesh and the compilation cache."""

from pathlib import Path

import jax
from jax.sharding import Mesh

from infcl_jax.data.decode import gpu_decoder_installed
from infcl_jax.runtime import compilation_cache, distributed, jax_start
from infcl_jax.runtime.console import say
from infcl_jax.runtime.mesh import training_mesh
from infcl_jax.runtime.process_watch import LOGS
from infcl_jax.settings import RunConfig


def start_devices(config: RunConfig, workdir: str | Path | None = None) -> Mesh:
    """Initialize JAX over all processes, enable the compilation cache, and return the mesh of all devices.

    With a work directory, the native logs of several processes go there, otherwise to the terminal.
    """
    if config.cpu_devices > 1:
        _simulate_devices(config.cpu_devices)
    distributed.initialize(
        gpu_decode=config.decode != "pillow" and gpu_decoder_installed(),
        start_timeout=config.start_timeout,
        lost_process_timeout=config.lost_process_timeout,
        log_dir=None if workdir is None else Path(workdir, LOGS),
    )
    jax_start.start_platforms()
    mesh = training_mesh(config.mesh)
    for name, size in (("batch_size", config.batch_size), ("evaluation.batch_size", config.evaluation.batch_size)):
        if size < 1 or size % mesh.size:
            raise ValueError(f"expected {name} to be a multiple of the {mesh.size} devices, got {size}")
    compilation_cache.enable(config.compilation_cache, say)
    return mesh


def start_processes() -> None:
    """Initialize JAX over all processes and enable the compilation cache, without the settings of a run."""
    distributed.initialize()
    compilation_cache.enable(None, say)


def _simulate_devices(count: int) -> None:
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError as error:
        if jax.default_backend() == "cpu":
            raise ValueError(
                f"expected to set cpu_devices={count} before JAX is first used; restart this Python process (or "
                "notebook)"
            ) from error
