"""Compilation of the training step while the run is prepared, and its memory."""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax

from infcl_jax.runtime.processes import gather
from infcl_jax.training.step import TrainStep

THREAD = "compile the training step"
_MIB = 1 << 20


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
