"""Draw data.svg, the rate at which files feed a training step.

    python docs/figures/make_data.py

The bars are measurements on machines with 16 CPU cores (docs/archive/measurements.md, 2026-11-23 to 26).
"""

from pathlib import Path

import matplotlib.pyplot as plt
from make_memory import COLORS, FOLDER, GRAY

# Images per second of ViT-B/32, lowest and highest measurement.
RATES = {
    "OpenCLIP, from files (H200)": (2_730, 2_730, COLORS["local"]),
    "infcl_jax's data pipeline, decoding on the CPU (H200)": (4_123, 4_689, COLORS["mosaic_gpu"]),
    "infcl_jax, from files, decoding on the GPU (H100)": (10_391, 10_391, COLORS["mosaic_gpu"]),
    "infcl_jax, images in GPU memory (H100)": (10_884, 10_884, GRAY),
}


def main(path: Path = FOLDER / "data.svg") -> None:
    """Write the figure with a transparent background."""
    style = {"font.size": 9, "axes.titlesize": 9, "svg.hashsalt": "data"}
    style |= {f"{name}.color": GRAY for name in ("text", "xtick", "ytick")}
    with plt.rc_context(style):
        figure, axes = plt.subplots(figsize=(7.5, 1.9), layout="constrained")
        for row, (low, high, color) in enumerate(reversed(RATES.values())):
            axes.barh(row, low, color=color, height=0.6)
            axes.barh(row, high - low, left=low, color=color, alpha=0.4, height=0.6)
            label = f"{low:,}" if low == high else f"{low:,} to {high:,}"
            axes.text(high + 120, row, label, va="center")
        axes.set_yticks(range(len(RATES)), list(reversed(RATES)))
        axes.set(xlim=(0, 14_000), xticks=[])
        axes.set_title("ViT-B/32 on one GPU with 16 CPU cores, images/s", color=GRAY, weight="bold")
        axes.spines[["top", "right", "bottom", "left"]].set_visible(False)
        axes.tick_params(length=0)
        figure.savefig(path, transparent=True, metadata={"Date": None})


if __name__ == "__main__":
    main()
