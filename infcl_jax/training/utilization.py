"""Model FLOPs utilization (MFU) of a training step."""

import re
from collections.abc import Callable, Collection, Mapping

from infcl_jax.models import CLIPConfig, TextPairConfig
from infcl_jax.models.flops import step_flops

# Peak dense GEMM throughput in TFLOP/s, bf16 with fp32 accumulation (fp16 on V100 and T4), by a regular expression of
# JAX's `device_kind`; the first match counts. From NVIDIA's data sheets, without sparsity.
_PEAK_TFLOPS = {
    r"B200": 2250.0,
    r"H[12]00 NVL": 835.0,
    r"H100 PCIe": 756.0,
    r"H100|H200|GH200": 989.4,
    r"A100": 312.0,
    r"A40": 149.7,
    r"A10": 125.0,
    r"A6000": 154.8,
    r"L40S": 362.0,
    r"L40": 181.0,
    r"L4": 121.0,
    r"RTX 4090$": 165.2,
    r"RTX 3090$": 71.0,
    r"V100-PCIE": 112.0,
    r"V100": 125.0,
    r"T4": 65.0,
}


def peak_flops(device_kind: str) -> float | None:
    """Return the peak dense bf16 throughput of a GPU; None if unknown.

    Examples:
      >>> peak_flops("NVIDIA H200")
      989400000000000.0

    Args:
      device_kind: name such as "NVIDIA H200", from `jax.Device.device_kind`.

    Returns:
      FLOP/s.
    """
    matches = (tflops for name, tflops in _PEAK_TFLOPS.items() if re.search(rf"(?<!\w)({name})(?!\w)", device_kind))
    tflops = next(matches, None)
    return None if tflops is None else tflops * 1e12


def utilization(
    config: CLIPConfig | TextPairConfig,
    batch_size: int,
    devices: int,
    device_kind: str,
    unlocked: Mapping[str, int] | None = None,
    precomputed: Collection[str] = (),
) -> Callable[[float], float | None]:
    """Return the MFU as a function of the pairs per second.

    MFU is the throughput in model FLOPs over the peak throughput of the devices (PaLM, Chowdhery et al. 2022, appendix
    B). The model FLOPs of a pair count both towers and the loss, without recomputation. The loss multiplies
    the features of all pairs once forward and twice backward: `6 b D` FLOPs for each of the b pairs.

    Args:
      config: model.
      batch_size: global batch size b.
      devices: number of devices.
      device_kind: name of the devices, from `jax.Device.device_kind`.
      unlocked: number of trained groups of each frozen tower, see `infcl_jax.models.flops.step_flops`.
      precomputed: frozen towers whose features are read in place of their images or texts.

    Returns:
      Function from pairs per second, over all devices, to the MFU in [0, 1]; to None if the devices' peak is unknown
      or the model is a `TextPairConfig`.
    """
    peak = peak_flops(device_kind)
    if peak is None or isinstance(config, TextPairConfig):
        return lambda rate: None
    per_pair = step_flops(config, unlocked, precomputed) + 6 * batch_size * config.embed_dim
    return lambda rate: rate * per_pair / (devices * peak)
