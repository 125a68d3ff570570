"""Draw memory.svg, memory of the loss, and blocks.svg, the ring that makes it linear.

    python docs/figures/make_memory.py

Lines are the planner's formulas (`infcl_jax.planner.loss_workspace`) for eight GPUs and 768 features in bf16. Dots are
measurements on eight H200s (docs/archive/measurements.md, 2026-11-22). The figures are side by side on a wide screen,
and stacked on a phone.
"""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Circle, FancyArrowPatch, Rectangle

from infcl_jax.planner import loss_workspace

GPUS, WIDTH = 8, 768
MEASURED = {32_768: 84, 65_536: 169, 4_194_304: 5_436}  # batch size: MiB per GPU
CAPACITY = 141e9 / 2**30  # GiB of an H200
COLORS = {"dense": "#d6455d", "local": "#c27c0e", "mosaic_gpu": "#2f81f7"}
BLOCKS = ("#2f81f7", "#2da44e", "#c27c0e", "#a475f9")
GRAY = "#7d838a"  # about the same contrast on white and on GitHub's dark background
FOLDER = Path(__file__).parent


def draw_memory(axes: Axes) -> None:
    """Plot memory per GPU over the batch size on logarithmic axes."""
    batch = 2 ** np.arange(13, 23)
    for name, color in COLORS.items():
        gib = np.array([loss_workspace(name, int(b), WIDTH, "bfloat16", GPUS) for b in batch]) / 2**30
        axes.plot(batch, gib, color=color, linewidth=2, solid_capstyle="round")
    axes.plot([*MEASURED], np.array([*MEASURED.values()]) / 2**10, "o", color=COLORS["mosaic_gpu"], markersize=5)
    axes.axhline(CAPACITY, color=GRAY, linestyle=(0, (4, 3)), linewidth=1.2)
    axes.text(2**13, 1.25 * CAPACITY, "memory of an H200", color=GRAY)
    axes.text(2**15.5, 22, "CLIP\n$O(b^2)$", color=COLORS["dense"], ha="right", weight="bold")
    axes.text(2**17.8, 30, "OpenCLIP\n$O(b^2/n)$", color=COLORS["local"], weight="bold", va="top")
    axes.text(2**19.5, 0.75, "infcl_jax\n$O(b/n)$", color=COLORS["mosaic_gpu"], weight="bold", va="top")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set(ylim=(0.02, 1000), xlim=(2**12.8, 2**22.3))
    axes.set_xticks([2**k for k in (13, 15, 17, 19, 21)], ["8k", "32k", "128k", "512k", "2M"])
    axes.set_yticks([100 / 1024, 1, 10, 100], ["100 MiB", "1 GiB", "10 GiB", "100 GiB"])
    axes.minorticks_off()
    axes.set_xlabel("batch size b")
    axes.set_title("Loss memory per GPU, 8 GPUs", color=GRAY, weight="bold")
    axes.grid(color=GRAY, alpha=0.2)
    axes.spines[["top", "right"]].set_visible(False)


def draw_ring(axes: Axes) -> None:
    """Draw four devices, each with its row block, and the column blocks that rotate."""
    angles = np.pi / 2 - np.arange(4) * np.pi / 2
    centers = 1.45 * np.stack([np.cos(angles), np.sin(angles)], axis=1)
    for rank, (x, y) in enumerate(centers):
        column = (rank - 1) % 4
        axes.add_patch(Rectangle((x - 0.72, y - 0.48), 1.44, 0.96, fill=False, edgecolor=GRAY, linewidth=1.5))
        axes.text(x, y + 0.21, f"GPU {rank}", ha="center", va="center", color=GRAY, weight="bold", fontsize=8)
        axes.text(x - 0.55, y - 0.2, f"$x_{rank}$", ha="left", va="center", color=GRAY, fontsize=10)
        axes.add_patch(Circle((x + 0.32, y - 0.17), 0.25, color=BLOCKS[column]))
        axes.text(x + 0.32, y - 0.18, f"$y_{column}$", ha="center", va="center", color="white", fontsize=8)
        start, end = angles[rank] - 0.42, angles[rank] - np.pi / 2 + 0.38
        points = [(1.62 * np.cos(a), 1.62 * np.sin(a)) for a in (start, end)]
        axes.add_patch(
            FancyArrowPatch(
                *points,
                connectionstyle="arc3,rad=-0.3",
                arrowstyle="-|>",
                mutation_scale=11,
                color=BLOCKS[column],
                lw=1.4,
            )
        )
    axes.set(xlim=(-2.25, 2.25), ylim=(-2.85, 2.28), aspect="equal")
    axes.set_title("Column blocks rotate", color=GRAY, weight="bold")
    axes.axis("off")


def draw_pairs(axes: Axes) -> None:
    """Draw the pair matrix with the blocks of the second ring step."""
    for row in range(4):
        for column in range(4):
            color = BLOCKS[column] if column == (row - 1) % 4 else "none"
            axes.add_patch(Rectangle((column, 3 - row), 1, 1, facecolor=color, edgecolor=GRAY, linewidth=1))
    for index in range(4):
        axes.text(-0.15, 3.5 - index, f"$x_{index}$", ha="right", va="center", color=GRAY, fontsize=10)
        axes.text(index + 0.5, 4.12, f"$y_{index}$", ha="center", va="bottom", color=BLOCKS[index], fontsize=10)
    axes.text(
        2,
        -0.2,
        "none is stored; the backward\npass recomputes them",
        color=GRAY,
        ha="center",
        va="top",
    )
    axes.set(xlim=(-0.6, 4.4), ylim=(-1.0, 4.7), aspect="equal")
    axes.set_title("Blocks of one step", color=GRAY, weight="bold")
    axes.axis("off")


def main() -> None:
    """Write the figures with a transparent background."""
    style = {"font.size": 9, "axes.titlesize": 9, "svg.hashsalt": "memory", "axes.edgecolor": GRAY}
    style |= {f"{name}.color": GRAY for name in ("text", "xtick", "ytick")} | {"axes.labelcolor": GRAY}
    with plt.rc_context(style):
        figure, axis = plt.subplots(figsize=(3.7, 2.7), layout="constrained")
        draw_memory(axis)
        figure.savefig(FOLDER / "memory.svg", transparent=True, metadata={"Date": None})
        figure, axes = plt.subplots(1, 2, figsize=(3.85, 2.7), layout="constrained")
        for draw, axis in zip((draw_ring, draw_pairs), axes, strict=True):
            draw(axis)
        figure.savefig(FOLDER / "blocks.svg", transparent=True, metadata={"Date": None})


if __name__ == "__main__":
    main()
