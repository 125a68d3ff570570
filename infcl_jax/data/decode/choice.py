"""Choice of the decoder of training images."""

from __future__ import annotations

import importlib.util

import jax

DECODERS = ("auto", "pillow", "nvimgcodec")

_INSTALL = "pip install 'infcl_jax[gpu-decode]'"


def choose_decoder(decode: str, residency: str) -> str:
    """Choose the decoder of a run.

    "auto" is "nvimgcodec" on GPUs with the packages of the extra `gpu-decode`, for batches in device memory, and
    "pillow" otherwise.

    Args:
      decode: one of `DECODERS`.
      residency: `grad_cache.residency`, the memory that stores the batch.

    Returns:
      "pillow" or "nvimgcodec".

    Raises:
      ValueError: the decoder is unknown, or "nvimgcodec" is not possible.
    """
    if decode not in DECODERS:
        raise ValueError(f"expected decode to be one of {', '.join(DECODERS)}, got {decode!r}")
    if decode == "pillow":
        return "pillow"
    obstacle = _obstacle(residency)
    if obstacle is None:
        return "nvimgcodec"
    if decode == "nvimgcodec":
        raise ValueError(f"expected {obstacle}, got decode='nvimgcodec'; choose decode='auto' or 'pillow'")
    return "pillow"


def gpu_decoder_installed() -> bool:
    """Return whether nvImageCodec and CuPy are installed, without importing them."""
    packages = ("nvidia", "nvidia.nvimgcodec", "cupy")  # find_spec of a submodule needs its parent
    return all(importlib.util.find_spec(package) is not None for package in packages)


def _obstacle(residency: str) -> str | None:
    """Return the missing condition of the GPU decoder, or None."""
    if residency != "device":
        return f"grad_cache.residency='device' (it is {residency!r})"
    if not gpu_decoder_installed():
        return f"nvImageCodec and CuPy ({_INSTALL})"
    return None if jax.default_backend() == "gpu" else f"GPUs (the devices are {jax.default_backend()})"
