"""Draw the figures of docs/concepts.md: sweep.svg, ring.svg, grad_cache.svg and offload.svg.

    python docs/figures/make_concepts.py

The drawings are schematic. Colors are readable on white and on dark backgrounds, and texts at the width of a phone.
"""

from collections.abc import Callable
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, Rectangle

COLORS = ("#2f81f7", "#2da44e", "#c27c0e", "#a475f9")
GRAY = "#7d838a"  # about the same contrast on white and on GitHub's dark background
FOLDER = Path(__file__).parent


def box(axes: Axes, corner: tuple[float, float], size: tuple[float, float], text: str, color: str) -> None:
    """Draw an outlined box with a centered text."""
    axes.add_patch(Rectangle(corner, *size, fill=False, edgecolor=color, linewidth=1.8))
    axes.text(corner[0] + size[0] / 2, corner[1] + size[1] / 2, text, ha="center", va="center", color=color)


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], color: str, bend: float = 0.0) -> None:
    """Draw an arrow between two points."""
    style = f"arc3,rad={bend}"
    axes.add_patch(
        FancyArrowPatch(start, end, connectionstyle=style, arrowstyle="-|>", mutation_scale=14, color=color, lw=1.6)
    )


def draw_sweep(axes: Axes) -> None:
    """Draw the pair matrix with one tile and the two sums that it contributes to."""
    for row in range(4):
        for column in range(5):
            current = (row, column) == (1, 2)
            axes.add_patch(
                Rectangle((column, 3 - row), 1, 1, facecolor=COLORS[0] if current else "none", edgecolor=GRAY)
            )
    axes.text(2.5, 2.5, "tile", color="white", ha="center", va="center", weight="bold")
    axes.add_patch(Rectangle((6.2, 0), 0.5, 4, fill=False, edgecolor=COLORS[1], linewidth=1.8))
    axes.add_patch(Rectangle((6.2, 2), 0.5, 1, facecolor=COLORS[1]))
    axes.add_patch(Rectangle((0, -1.7), 5, 0.5, fill=False, edgecolor=COLORS[2], linewidth=1.8))
    axes.add_patch(Rectangle((2, -1.7), 1, 0.5, facecolor=COLORS[2]))
    arrow(axes, (3.05, 2.5), (6.15, 2.5), COLORS[1])
    arrow(axes, (2.5, 1.95), (2.5, -1.15), COLORS[2])
    axes.text(6.95, 2, "row sums\n→ row_lse", color=COLORS[1], va="center")
    axes.text(5.25, -1.45, "column sums\n→ col_lse", color=COLORS[2], va="center")
    axes.text(-0.2, 2, "images", color=GRAY, ha="right", va="center")
    axes.text(2.5, 4.2, "texts", color=GRAY, ha="center")
    axes.set(xlim=(-1.9, 9.3), ylim=(-2, 4.8))


def draw_ring(axes: Axes) -> None:
    """Draw which column block each of four devices holds in each of the four steps."""
    for step in range(4):
        axes.text(1.6 + 2 * step, 4.25, f"step {step}", ha="center", color=GRAY)
        for device in range(4):
            block = (device - step) % 4
            corner = (0.9 + 2 * step, 3.2 - device)
            axes.add_patch(Rectangle(corner, 1.4, 0.7, color=COLORS[block]))
            axes.text(
                corner[0] + 0.7, corner[1] + 0.34, f"$x_{device} y_{block}$", color="white", ha="center", va="center"
            )
            if step < 3:
                target = 3.55 - (device + 1) % 4
                arrow(axes, (corner[0] + 1.42, corner[1] + 0.35), (corner[0] + 1.98, target), COLORS[block])
    for device in range(4):
        axes.text(0.6, 3.55 - device, f"device {device}", color=GRAY, ha="right", va="center")
    axes.set(xlim=(-1.3, 8.5), ylim=(-0.1, 4.8))


def draw_grad_cache(axes: Axes) -> None:
    """Draw the two passes over four chunks, with the loss of the whole batch in between."""
    for chunk, color in enumerate(COLORS):
        y = 3 - chunk
        box(axes, (0, y), (2.5, 0.75), f"encode {chunk}", color)
        arrow(axes, (2.55, y + 0.37), (3.3, y + 0.37), color)
        box(axes, (7.35, y), (3.1, 0.75), f"encode {chunk},\nbackward", color)
        arrow(axes, (6.55, y + 0.37), (7.3, y + 0.37), color)
        arrow(axes, (10.5, y + 0.37), (11.4, 1.9), GRAY)
    box(
        axes, (3.35, 0), (3.15, 3.75), "features\nof all chunks\n\nloss of the\nwhole batch\n\nfeature\ngradients", GRAY
    )
    box(axes, (11.45, 1.0), (2.7, 1.75), "sum of\nparameter\ngradients", GRAY)
    axes.text(1.25, 4.05, "first pass:\nno activations", color=GRAY, ha="center")
    axes.text(8.9, 4.05, "second pass: activations\nof one chunk", color=GRAY, ha="center")
    axes.set(xlim=(-0.5, 14.3), ylim=(-0.2, 5.2))


def draw_offload(axes: Axes) -> None:
    """Draw where each value of `grad_cache.offload` stores the batch."""
    for row, (name, stored, device) in enumerate(
        (
            ("none", "", "whole batch"),
            ("host", "whole batch", "at most 3 chunks"),
            ("replay", "read twice", "at most 3 chunks"),
        )
    ):
        y = 2.4 - 1.1 * row
        axes.text(-0.3, y + 0.4, name, color=COLORS[row], ha="right", va="center", weight="bold")
        if stored:
            box(axes, (0, y), (3.4, 0.8), stored, COLORS[row])
            arrow(axes, (3.45, y + 0.4), (4.75, y + 0.4), COLORS[row])
        box(axes, (4.8, y), (4.2, 0.8), device, COLORS[row])
    axes.text(1.7, 3.5, "host memory or files", color=GRAY, ha="center")
    axes.text(6.9, 3.5, "device memory", color=GRAY, ha="center")
    axes.set(xlim=(-2.1, 9.2), ylim=(0, 4))


FIGURES: dict[str, tuple[Callable[[Axes], None], tuple[float, float]]] = {
    "sweep": (draw_sweep, (6, 3.7)),
    "ring": (draw_ring, (6, 3.2)),
    "grad_cache": (draw_grad_cache, (6.8, 3.4)),
    "offload": (draw_offload, (6, 2.4)),
}


def main(suffix: str = "svg") -> None:
    """Write the figures with a transparent background."""
    with plt.rc_context({"font.size": 12, "svg.hashsalt": "concepts"}):
        for name, (draw, size) in FIGURES.items():
            figure, axes = plt.subplots(figsize=size, layout="constrained")
            draw(axes)
            axes.axis("off")
            metadata = {"Date": None} if suffix == "svg" else None
            figure.savefig(FOLDER / f"{name}.{suffix}", transparent=suffix == "svg", metadata=metadata)
            plt.close(figure)


if __name__ == "__main__":
    main()
