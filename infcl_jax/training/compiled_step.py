"""Compilation of the training step ahead of its use, its memory and its MFU."""

import re
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax

from infcl_jax.models import CLIPConfig, TextPairConfig
from infcl_jax.models.flops import step_flops
from infcl_jax.runtime.processes import gather
from infcl_jax.training.step import TrainStep

THREAD = "compile the training step"
_MIB = 1 << 20
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


class OutOfMemory(RuntimeError):
    """Out-of-memory error of a training step.

    The message names the setting to change and ends with the table of the plan.

    Examples:
      >>> plan = plan_memory(Workload(model=model, optimizer=optax.adamw(1e-3), batch_size=64))
      >>> error = explain_out_of_memory(jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED"), plan)
      >>> isinstance(error, OutOfMemory)
      True
    """


def is_out_of_memory(error: Exception) -> bool:
    """Return whether a device has run out of memory."""
    return isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)


class StepMemory(NamedTuple):
    """Memory of a compiled step in bytes on each device, from XLA's memory analysis.

    Attributes:
      arguments: train state and batch, and results that do not take the place of a donated argument.
      temporaries: activations, gradients and workspaces at their peak.
      limit: bytes that JAX may use; None if unknown.
    """

    arguments: int
    temporaries: int
    limit: int | None = None

    @classmethod
    def of(cls, compiled: jax.stages.Compiled, limit: int | None = None) -> "StepMemory":
        """Read the memory of a compiled program."""
        memory = compiled.memory_analysis()
        results = memory.output_size_in_bytes - memory.alias_size_in_bytes
        return cls(memory.argument_size_in_bytes + results, memory.temp_size_in_bytes, limit)

    @property
    def peak(self) -> int:
        """Sum of both."""
        return self.arguments + self.temporaries

    @property
    def components(self) -> dict[str, int]:
        """Bytes of each part by its label."""
        return {"state and batch": self.arguments, "temporaries": self.temporaries}

    def __str__(self) -> str:
        """Format as one line, such as "memory per device: 100.0 MiB (state and batch 20.0, temporaries 80.0)"."""
        share = "" if self.limit is None else f", {100 * self.peak / self.limit:.1f} % of the limit"
        parts = ", ".join(f"{label} {size / _MIB:,.1f}" for label, size in self.components.items())
        return f"memory per device: {self.peak / _MIB:,.1f} MiB{share} ({parts})"


def compile_ahead(step: TrainStep, state: Any, batch: Mapping[str, Any]) -> Future[jax.stages.Compiled]:
    """Trace and lower a step at once for shapes of state and batch, and compile it in a thread.

    Calls of the step after the end of the compilation find the program, if their arguments have these shapes, dtypes
    and shardings. A process that ends earlier waits for the compilation. The future raises its errors.
    """
    pool = ThreadPoolExecutor(1, thread_name_prefix=THREAD)
    compiled = pool.submit(step.lower(state, batch).compile)  # type: ignore[attr-defined]
    pool.shutdown(wait=False)
    return compiled


def compiled_bytes(compiled: jax.stages.Compiled) -> int:
    """Bytes per device of a compiled program, from XLA's memory analysis.

    The sum of arguments, outputs and temporaries; a donated buffer counts once.

    Examples:
      >>> compiled = jax.jit(clip_loss).lower(image, text, 14.3).compile()
      >>> compiled_bytes(compiled) > image.nbytes + text.nbytes
      True
    """
    return StepMemory.of(compiled).peak


def device_memory_limit() -> int | None:
    """Bytes that JAX may use on each device of this run.

    The minimum over the first device of each process; None if the platform reports no limit (CPU).

    Examples:
      >>> limit = device_memory_limit()
      >>> print("unlimited" if limit is None else f"{limit / 2**30:.0f} GiB")
      unlimited
    """
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    return None if limit is None else min(gather(limit))


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
    text_tokens: int | None = None,
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
      text_tokens: mean tokens of a text that count; None for the context length.

    Returns:
      Function from pairs per second, over all devices, to the MFU in [0, 1]; to None if the devices' peak is unknown
      or the model is a `TextPairConfig`.
    """
    peak = peak_flops(device_kind)
    if peak is None or isinstance(config, TextPairConfig):
        return lambda rate: None
    per_pair = step_flops(config, unlocked, precomputed, text_tokens) + 6 * batch_size * config.embed_dim
    return lambda rate: rate * per_pair / (devices * peak)
