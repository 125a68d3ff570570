"""Compilation of the training step while the run is prepared."""

import contextlib
import threading
from collections.abc import Mapping
from typing import Any

import jax

from infcl_jax.ops.common.mosaic_kernels import compile_kernels, mosaic_kernels
from infcl_jax.training.state import TrainState
from infcl_jax.training.step import Metrics, TrainStep

THREAD = "compile the training step"
# Seconds before the kernels are compiled ahead, if there is a persistent compilation cache. JAX reads a step from it in
# 1 to 2 s (docs/benchmarks.md, 2026-11-27). If that takes longer, the kernels are compiled in vain.
_CACHE_SECONDS = 3.0


class CompiledAhead:
    """Training step that threads compile while the run is prepared.

    JAX traces and lowers the step at once. The first call finds the compiled program again if its arguments have the
    shapes, dtypes and shardings announced here. If they differ, or if the compilation fails, the first call compiles
    the step as usual and raises its errors. A process that ends before its first step waits for the compilation.
    """

    def __init__(self, step: TrainStep, state: TrainState, batch: Mapping[str, Any]) -> None:
        """Start the compilation.

        Args:
          step: compiled step, from `make_train_step` with chunks in device memory.
          state: `StateInit.shapes`.
          batch: shapes of the batch, from `infcl_jax.run.data.batch_shapes`.
        """
        self._step = step
        self._thread: threading.Thread | None = None
        with contextlib.suppress(Exception):
            lowered = step.lower(state, batch)  # type: ignore[attr-defined]
            self._thread = threading.Thread(target=_compile, args=(lowered,), name=THREAD)
            self._thread.start()

    def __call__(self, state: TrainState, batch: Mapping[str, Any]) -> tuple[TrainState, Metrics]:
        """Take a step, the first one after the end of the compilation."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        return self._step(state, batch)


def _compile(lowered: Any) -> None:
    cached = jax.config.jax_enable_compilation_cache and jax.config.jax_compilation_cache_dir
    kernels: list[Any] = []
    with contextlib.suppress(Exception):
        kernels = mosaic_kernels(lowered)
    timer = threading.Timer(_CACHE_SECONDS if cached else 0.0, _compile_kernels, [kernels])
    with contextlib.suppress(Exception):
        timer.start()
    with contextlib.suppress(Exception):
        lowered.compile()
    timer.cancel()


def _compile_kernels(kernels: list[Any]) -> None:
    with contextlib.suppress(Exception):
        compile_kernels(kernels)
