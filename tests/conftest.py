"""Eight CPU devices, strict dtype and rank promotion, for every test; `-m gpu` runs on the GPU."""

import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jax

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_configure(config):
    """Chooses the platform, for this process and those it starts, unless it has been chosen."""
    chosen = config.option.markexpr
    if chosen == "gpu" or os.environ.get("JAX_PLATFORMS", "cpu") != "cpu":
        return
    os.environ["JAX_PLATFORMS"] = "cpu"
    jax.config.update("jax_platforms", "cpu")
    if chosen != "slow":  # small programs: compiling them takes longer than running them
        os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0"
