"""Plots of training curves and retrieval results, by matplotlib, which is imported on first use."""

import itertools
import math
import os
import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from infcl_jax.runtime.file_io import replacing
from infcl_jax.training.metrics import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Series = dict[str, tuple[list[int], list[float]]]

_DPI = 100  # pixels per inch
_PANEL_INCHES = (6.0, 4.0)  # width and height of a panel of curves
_CELL_INCHES = 1.2  # side of an image cell in the retrieval plot
_CAPTION_INCHES = 2.6  # width of the caption column
_MARGIN = 0.06  # inches around an image
_LEGEND_INCHES = 0.4  # height of the legend above the retrieval plot
_FRAME_COLOR = "limegreen"
_LOSS = re.compile(r"(^|[/_])loss$")
_SCORE = re.compile(r"(^|[/_])(top\d+|(?<!mean_)r\d+|accuracy|(?<!class_)recall|average)$")
_MAIN_SCORE = re.compile(r"(^|[/_])(top1|r1|average)$")
_MAX_CURVES = 12  # in a panel; more are not told apart


def plot_curves(
    metrics_path: str | os.PathLike[str],
    png_path: str | os.PathLike[str],
    *,
    chance: Mapping[str, float] | None = None,
) -> None:
    """Plot the losses, accuracies and recalls of a run over its steps.

    The last word of a metric's name decides its panel; "/" and "_" separate words. `loss` makes it a loss (`loss`,
    `val/loss`). `accuracy`, `recall`, `average`, `top<k>` and `r<k>` make it a score (`zero_shot/top1`). Losses and
    scores have one panel each, of 600 x 400 pixels. A panel without metrics is omitted. Non-finite values leave gaps.
    Of more than 12 scores, the panel has the first 12 averages and scores at k = 1.

    A contrastive loss grows with the number of pairs that it compares. A dashed or dotted line marks each chance level:
    ln(pairs) of losses, 1 / classes of accuracies. Losses with the same chance level are comparable.

    Examples:
      >>> with MetricWriter("runs/plotted") as writer:
      ...     writer.write(1, {"loss": 4.1})
      ...     writer.write(2, {"loss": 3.9})
      >>> plot_curves("runs/plotted/metrics.jsonl", "curves.png")

    Args:
        metrics_path: `metrics.jsonl` file of `infcl_jax.training.metrics.MetricWriter`.
        png_path: output file, replaced if it exists; its directory is created if missing.
        chance: chance levels by name of the metric; None: none are drawn.

    Raises:
        FileNotFoundError: the metrics file does not exist.
        ValueError: the metrics file contains no loss or score.
    """
    lines = read_metrics(metrics_path)
    figure = draw_curves(lines, chance)
    if figure is None:
        raise ValueError(f"expected losses or scores in {os.fspath(metrics_path)}, got none in {len(lines)} lines")
    _save(figure, png_path)


def draw_curves(
    lines: Sequence[Mapping[str, int | float]], chance: Mapping[str, float] | None = None
) -> "Figure | None":
    """Draw the figure of `plot_curves` from lines of `read_metrics`; None without a loss or score."""
    from matplotlib.figure import Figure

    losses, scores = _series(lines, _LOSS), _series(lines, _SCORE)
    if len(scores) > _MAX_CURVES:
        scores = dict(itertools.islice(_series(lines, _MAIN_SCORE).items(), _MAX_CURVES))
    panels = [(series, label) for series, label in ((losses, "loss"), (scores, "accuracy, recall")) if series]
    if not panels:
        return None
    figure = Figure((_PANEL_INCHES[0] * len(panels), _PANEL_INCHES[1]), _DPI)
    for axes, (series, label) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        _draw_series(axes, series, label, chance or {})
        if series is scores:
            axes.set_ylim(0, 1.02)  # a curve at 1 stays visible
    figure.tight_layout()
    return figure


def plot_retrieval_grid(
    captions: Sequence[str],
    images: Sequence[np.ndarray] | np.ndarray,
    similarities: np.ndarray,
    png_path: str | os.PathLike[str],
    *,
    correct: Sequence[int] | np.ndarray | None = None,
    columns: int = 5,
) -> None:
    """Plot the most similar images of each caption.

    Each row shows a caption, the rank of its correct image, and the most similar images. A frame marks the correct
    image. The plot is 260 + 120 * columns pixels wide and 40 + 120 * Q pixels high.

    Examples:
      >>> images = np.zeros((6, 16, 16, 3), np.uint8)
      >>> similarities = np.arange(12, dtype=np.float32).reshape(2, 6)
      >>> plot_retrieval_grid(["a cat", "a dog"], images, similarities, "grid.png", correct=[5, 2])

    Args:
        captions: Q query captions.
        images: G images, uint8 [H, W, 3]; only displayed images are read.
        similarities: [Q, G], any float dtype. Images are sorted by decreasing similarity, with NaN last.
        png_path: output file, replaced if it exists; its directory is created if missing.
        correct: int [Q], index of the correct image of each caption; None: image i for caption i.
        columns: images per row, limited to G.

    Raises:
        ValueError: the shapes do not match, `correct` is outside [0, G), or columns < 1.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    similarities = np.asarray(similarities, np.float32)
    target = np.arange(len(captions)) if correct is None else np.asarray(correct)
    _check_grid(captions, images, similarities, target, columns)
    columns = min(columns, len(images))
    width, height = _CAPTION_INCHES + _CELL_INCHES * columns, _LEGEND_INCHES + _CELL_INCHES * len(captions)
    figure = Figure((width, height), _DPI)
    frame = Patch(fill=False, edgecolor=_FRAME_COLOR, linewidth=3, label="correct image")
    center = 1 - 0.5 * _LEGEND_INCHES / height
    anchor = _CAPTION_INCHES / width, center
    figure.legend(handles=[frame], loc="center left", bbox_to_anchor=anchor, frameon=False, fontsize=8, borderaxespad=0)
    figure.text(0.05 / width, center, "caption, then the most similar images", fontsize=8, va="center")
    edges = {"left": (_CAPTION_INCHES + _MARGIN) / width, "right": 1 - _MARGIN / width, "bottom": _MARGIN / height}
    space = 2 * _MARGIN / (_CELL_INCHES - 2 * _MARGIN)  # as a fraction of an image
    edges |= {"top": 1 - (_LEGEND_INCHES + _MARGIN) / height, "wspace": space, "hspace": space}
    cells = figure.subplots(len(captions), columns, squeeze=False, gridspec_kw=edges)
    order = np.argsort(np.where(np.isnan(similarities), np.inf, -similarities), axis=1, kind="stable")
    for row, caption in enumerate(captions):
        rank = int(np.flatnonzero(order[row] == target[row])[0]) + 1
        text = textwrap.fill(caption, 34, max_lines=5, placeholder=" ...") + f"\n(correct image: rank {rank})"
        center = 1 - (_LEGEND_INCHES + _CELL_INCHES * (row + 0.5)) / height
        # parse_math=False, because matplotlib renders text between two dollar signs as a formula.
        figure.text(0.05 / width, center, text, fontsize=8, va="center", parse_math=False)
        for axes, index in zip(cells[row], order[row, :columns], strict=True):
            axes.imshow(np.asarray(images[int(index)]), interpolation="nearest")
            axes.set(xticks=[], yticks=[])
            for spine in axes.spines.values():
                spine.set(visible=bool(index == target[row]), color=_FRAME_COLOR, linewidth=4)
    _save(figure, png_path)


def is_score(name: str) -> bool:
    """Return whether a metric is a main score: an average, or an accuracy or recall at k = 1."""
    return _MAIN_SCORE.search(name) is not None


def _series(lines: Sequence[Mapping[str, int | float]], pattern: re.Pattern[str]) -> Series:
    """Collect steps and values of matching metrics, with non-finite values as NaN."""
    series: Series = {}
    for line in lines:
        for name in filter(pattern.search, line):
            steps, values = series.setdefault(name, ([], []))
            steps.append(int(line["step"]))
            values.append(float(line[name]) if math.isfinite(line[name]) else math.nan)
    return series


def _draw_series(axes: "Axes", series: Series, label: str, chance: Mapping[str, float]) -> None:
    is_loss = label == "loss"
    for name, (steps, values) in series.items():
        # Markers make a metric with a single value visible.
        marker = "o" if len(steps) < 30 else None
        pairs = f" ({math.exp(chance[name]):.0f} pairs)" if is_loss and name in chance else ""
        axes.plot(steps, values, label=name + pairs, linewidth=1.2, marker=marker, markersize=3)
    for index, level in enumerate(sorted({chance[name] for name in series if name in chance})):
        text = (
            f"{math.exp(level):.0f} pairs: {level:.2f}" if is_loss else f"{1 / level:.0f} classes: {100 * level:.1f} %"
        )
        axes.axhline(level, label=f"chance of {text}", linewidth=1.0, linestyle=("--", ":")[index % 2], color="gray")
    axes.set_xlabel("step")
    axes.set_ylabel(label)
    axes.grid(alpha=0.3)
    # Below the axes: curves can fill every corner, and loc="best" is slow with many points.
    axes.legend(fontsize=7, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.18), ncol=2)


def _save(figure: "Figure", png_path: str | os.PathLike[str]) -> None:
    path = Path(png_path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=_DPI, format="png")


def _check_grid(
    captions: Sequence[str],
    images: Sequence[np.ndarray] | np.ndarray,
    similarities: np.ndarray,
    target: np.ndarray,
    columns: int,
) -> None:
    """Validate the arguments of `plot_retrieval_grid`."""
    if len(captions) == 0 or similarities.shape != (len(captions), len(images)):
        raise ValueError(
            f"expected similarities of shape ({len(captions)}, {len(images)}) (captions, images), neither empty, "
            f"got {similarities.shape}"
        )
    if target.shape != (len(captions),) or not np.issubdtype(target.dtype, np.integer):
        raise ValueError(f"expected {len(captions)} integers in correct, got {target.dtype} {target.shape}")
    if target.min() < 0 or target.max() >= len(images):
        raise ValueError(f"expected correct in [0, {len(images)}), got values in [{target.min()}, {target.max()}]")
    if columns < 1:
        raise ValueError(f"expected columns >= 1, got {columns}")
