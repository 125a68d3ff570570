"""Hooks of a training run for code of the user."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from etils import epath

from infcl_jax.settings import RunConfig


class Callback:
    """Base class of callbacks, whose hooks do nothing.

    `infcl_jax.train` calls the hooks of each callback in the order of the list, on every process with the same steps.
    A hook that prints or writes files should do so where `infcl_jax.distributed.is_lead()` is true. An exception of a
    hook ends the run. If `on_step`, `on_evaluation` or `on_checkpoint` raises on all processes, the last step is saved
    first, and the same call continues after it. The hook is not called again for the same step.

    The devices compute the next step while `on_step` runs, so a fast hook costs no time. If `on_step` raises at step k,
    step k + 1 is saved, and no hook is called for step k + 1. `on_evaluation` and `on_checkpoint` run between two
    steps.

    Examples:
      >>> class Losses(infcl_jax.Callback):
      ...     def __init__(self):
      ...         self.values = {}
      ...
      ...     def on_step(self, step, metrics):
      ...         self.values[step] = metrics["loss"]
      >>> losses = Losses()
      >>> results = infcl_jax.train({"dataset": "digits", "model": "tiny"}, "runs/losses", callbacks=[losses])
    """

    def on_start(self, config: RunConfig, workdir: Path, step: int) -> None:
        """Handle the start, before the first step of this process.

        Args:
          config: all settings of the run, with its length in `total_steps`.
          workdir: directory of the run.
          step: number of completed steps; 0 unless the run is resumed.
        """

    def on_chance(self, levels: Mapping[str, float]) -> None:
        """Handle the chance levels of losses and accuracies, before `on_start`.

        Args:
          levels: values by metric, such as ln(pairs) of "loss" and 1 / classes of "zero_shot/top1".
        """

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Handle a finished step, while the devices compute the next one.

        Args:
          step: finished step, from 1 on.
          metrics: `loss`, `logit_scale`, `grad_norm`, `grad_norm/image` and `grad_norm/text`; every `log_every` steps
            all of its line in `metrics.jsonl`.
        """

    def on_evaluation(self, step: int, results: Mapping[str, float]) -> None:
        """Handle the results of an evaluation.

        Args:
          step: step of the evaluated state.
          results: results by name, see `infcl_jax.evaluation.Suite`.
        """

    def on_checkpoint(self, step: int, path: epath.Path) -> None:
        """Handle a complete checkpoint.

        Checkpoints are written in the background. This hook is called after an evaluation of the same step, before the
        next checkpoint is saved, or at the end.

        Args:
          step: step of the checkpoint.
          path: its folder.
        """

    def on_end(self, step: int, results: Mapping[str, float]) -> None:
        """Handle the end of the run, after its last checkpoint and evaluation.

        Not called after an error or a stop.

        Args:
          step: last step of the run.
          results: results of the final evaluation.
        """


def _on_each(name: str) -> Callable[..., None]:
    def call(self: "Callbacks", *args: Any) -> None:
        for callback in self._callbacks:
            getattr(callback, name)(*args)

    return call


class Callbacks(Callback):
    """Callbacks called one after the other."""

    def __init__(self, callbacks: Sequence[Callback] = ()) -> None:
        """Check that the callbacks are a list or tuple of objects of subclasses of `Callback`."""
        if not isinstance(callbacks, list | tuple):
            raise ValueError(f"expected a list of callbacks, got {callbacks!r}; write callbacks=[...]")
        for callback in callbacks:
            if not isinstance(callback, Callback):
                raise ValueError(f"expected callbacks that are objects of infcl_jax.Callback, got {callback!r}")
        self._callbacks = tuple(callbacks)

    on_start, on_chance, on_step = map(_on_each, ("on_start", "on_chance", "on_step"))
    on_evaluation, on_checkpoint, on_end = map(_on_each, ("on_evaluation", "on_checkpoint", "on_end"))
