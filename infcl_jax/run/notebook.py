"""Live curves of a training run in a Jupyter or Colab notebook."""

import io
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infcl_jax.evaluation.plots import draw_curves
from infcl_jax.run.callbacks import Callback
from infcl_jax.runtime.console import in_notebook
from infcl_jax.runtime.processes import is_lead
from infcl_jax.settings import RunConfig
from infcl_jax.training import METRICS_FILE, read_metrics

_BATCH_LOSS, _SPLIT_LOSS = "validation/batch_loss", "validation/loss"
_POINTS = 1000  # of the training loss; as many as the panel has pixels
_LEAST_SHARE = 20  # drawing takes at most 1/20 of the time, also with short steps


class LiveCurves(Callback):
    """Plot losses and evaluation results below the cell, updated in place.

    The panels are as in `curves.png`, with chance levels. Of the validation losses, the panel has that of batches of
    the training's size, which compares with the training loss, if there is one. A resumed run starts with the curves of
    its earlier steps.

    Examples:
      >>> curves = infcl_jax.run.notebook.LiveCurves(seconds=5)  # draws at most every five seconds
      >>> results = infcl_jax.train({"dataset": "digits", "model": "tiny"}, "runs/curves", callbacks=[curves])
      <IPython.core.display.Image object>
    """

    def __init__(self, seconds: float = 2.0) -> None:
        """Check that a notebook runs this code.

        Args:
          seconds: least time between two updates, which evaluations and the end do not wait for.

        Raises:
          ValueError: no notebook runs this code.
        """
        if not in_notebook():
            raise ValueError(
                "expected LiveCurves in a Jupyter or Colab notebook, got another Python process; leave it out, "
                "curves.png in the work directory has the same curves"
            )
        self._seconds = seconds
        self._losses: list[Mapping[str, Any]] = []
        self._results: list[Mapping[str, Any]] = []
        self._chance: Mapping[str, float] = {}
        self._handle: Any = None
        self._next = 0.0  # monotonic time of the next update

    def on_chance(self, levels: Mapping[str, float]) -> None:
        """Keep the chance levels for the plot."""
        self._chance = levels

    def on_start(self, config: RunConfig, workdir: Path, step: int) -> None:
        """Read the metrics of earlier steps and start an empty plot."""
        path = workdir / METRICS_FILE
        lines = read_metrics(path) if step and path.exists() else []
        self._losses = [line for line in lines if "loss" in line]
        self._results = [line for line in lines if "loss" not in line]
        self._handle, self._next = None, 0.0
        self._draw()

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add the loss of a step; update the plot if that is due."""
        self._losses.append({"step": step, "loss": metrics["loss"]})
        if time.monotonic() >= self._next:
            self._draw()

    def on_evaluation(self, step: int, results: Mapping[str, float]) -> None:
        """Add the results of an evaluation and update the plot."""
        self._results.append({"step": step, **results})
        self._draw()

    def on_end(self, step: int, results: Mapping[str, float]) -> None:
        """Draw the last steps."""
        self._draw()

    def _draw(self) -> None:
        """Show the curves, in place of those shown before."""
        if not is_lead():
            return
        start = time.monotonic()
        stride = -(-len(self._losses) // _POINTS) or 1
        results = self._results
        if any(_BATCH_LOSS in line for line in results):
            results = [{name: value for name, value in line.items() if name != _SPLIT_LOSS} for line in results]
        figure = draw_curves([*self._losses[::-stride][::-1], *results], self._chance)  # always with the latest step
        if figure is not None:
            self._show(figure)
        end = time.monotonic()
        self._next = end + max(self._seconds, _LEAST_SHARE * (end - start))

    def _show(self, figure: Any) -> None:
        # Pictures instead of figures, which a notebook shows only after `%matplotlib inline`.
        from IPython.display import Image, display

        png = io.BytesIO()
        figure.savefig(png, format="png")
        picture = Image(data=png.getvalue())
        if self._handle is None:
            self._handle = display(picture, display_id=True)
        else:
            self._handle.update(picture)
