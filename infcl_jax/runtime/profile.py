"""Profile of a few training steps."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax

from infcl_jax.runtime.outputs import print_line, reason

PROFILE_FOLDER = "profile"


class Profile:
    """Trace some training steps with `jax.profiler`, on the leading process.

    The trace has the local devices and the host threads. Tracing slows these steps down.

    Examples:
      >>> loss_fn = jax.jit(clip_loss)
      >>> with Profile((2, 3), prepare_workdir("runs/profiled"), say=lambda line: None) as profile:
      ...     for step in range(1, 5):
      ...         profile.start(step)
      ...         metrics = {"loss": loss_fn(image, text, 14.3)}  # the training step
      ...         profile.stop(step, metrics)

    Args:
      steps: first and last step of the trace; empty: none.
      workdir: directory of the run; the trace is in its folder `profile`.
      lead: whether this process traces.
      say: function that prints a line.
    """

    def __init__(
        self,
        steps: Sequence[int] = (),
        workdir: str | os.PathLike[str] = ".",
        *,
        lead: bool = True,
        say: Callable[[str], None] = print_line,
    ) -> None:
        self._steps = range(steps[0], steps[1] + 1) if steps and lead else range(0)
        self._folder = Path(workdir, PROFILE_FOLDER)
        self._say = say
        self._first: int | None = None  # first traced step, while tracing

    def start(self, step: int) -> None:
        """Start the trace before its first step; a resumed run may start inside."""
        if step not in self._steps or self._first is not None:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            jax.profiler.start_trace(self._folder)
        except (OSError, RuntimeError) as error:  # RuntimeError: another profiler is active
            self._fail(error)
        else:
            self._first = step

    def stop(self, step: int, metrics: Any) -> None:
        """End the trace after its last step.

        Args:
          step: training step.
          metrics: device results of the step; the call waits for them.
        """
        if self._first is not None and step == self._steps[-1]:
            jax.block_until_ready(metrics)
            self._end(f"{self._first} to {step}")

    def _end(self, steps: str) -> None:
        self._first, self._steps = None, range(0)
        try:
            jax.profiler.stop_trace()
        except (OSError, RuntimeError) as error:
            self._fail(error)
            return
        self._say(
            f"profile of steps {steps}: tensorboard --logdir={self._folder} (pip install tensorboard xprof), or open "
            "its trace.json.gz in https://ui.perfetto.dev"
        )

    def _fail(self, error: Exception) -> None:
        self._steps = range(0)
        why = reason(error) if isinstance(error, OSError) else " ".join(str(error).split())
        self._say(f"warning: no profile in {self._folder}: {why}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """End a trace that the run did not finish."""
        if self._first is not None:
            self._end(f"from {self._first} on")
