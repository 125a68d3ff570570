"""Targets of FastCLIP over the nodes: accuracy, time and throughput, and the final gamma."""

import functools
from typing import Any

from configs import fastclip as recipe
from experiments.reproduction.fastclip import (
    ACCURACY,
    FASTCLIP,
    IMAGENET_AND_VARIANTS,
    RETRIEVAL_HERE,
    here_run,
)
from experiments.reproduction.recipes import ALL_SETS, IMAGENET, TINY_TOWERS, paper_run
from experiments.reproduction.target import NOT_LEGIBLE, Cell, Entry, Target, cell

_NODES = (1, 2, 4, 8)
_RECIPE_NODES = 2  # of `configs/fastclip.py`
_PER_NODE = {"medium": 512, "large": 1024}  # pairs
_HERE = {"tiny": 8, "small": 32}  # digits or shapes for each node of the paper
_HERE_RATE = 5e-4  # learning rate for each node


def _on_nodes(size: str, loss: str, nodes: int, sets: tuple[str, ...], **changes: Any) -> Cell:
    """Return the paper's run on a number of nodes.

    The epochs are the same, and both learning rates are linear in the batch (appendix B).
    """
    config = recipe.get_config(f"{size},loss={loss}")
    factor = nodes / _RECIPE_NODES
    own: dict[str, Any] = {
        "batch_size": int(config.batch_size * factor),
        "total_steps": int(config.total_steps / factor),
        "optimizer.learning_rate": config.optimizer.learning_rate * factor,
    }
    if (rate := config.optimizer.temperature_learning_rate) is not None:
        own["optimizer.temperature_learning_rate"] = rate * factor
    return paper_run(f"fastclip:{size}", arguments={"loss": loss}, sets=sets, **(own | changes))


# ImageNet and variants, and retrieval, in percent by nodes.
_FIGURE_2 = {
    "clip": {
        "medium": ((14.16, 14.73, 15.24, 16.03), (24.07, 25.20, 25.07, 26.20)),
        "large": ((20.51, 21.08, 22.32, 22.77), (29.17, 29.58, 30.25, 30.87)),
    },
    "fastclip_v3": {
        "medium": ((18.37, 19.08, 19.21, 19.20), (30.02, 30.36, 30.42, 30.42)),
        "large": ((23.76, 24.78, 24.79, 24.93), (33.90, 34.88, 34.91, 34.74)),
    },
}


def figure_2(scale: str) -> list[Entry]:
    """Accuracy over the nodes, with a batch in proportion to them."""
    entries = []
    for loss, sizes in _FIGURE_2.items():
        for position, nodes in enumerate(_NODES):
            column = f"{nodes} nodes"
            if scale != "paper":
                rate: dict[str, Any] = {"optimizer.learning_rate": _HERE_RATE * nodes}
                run = here_run(scale, loss, batch=_HERE[scale] * nodes, **rate)
                entries.append(Entry(f"{loss}, here", column, (run,), "top1"))
            for size, (variants, retrieval) in sizes.items():
                runs = (_on_nodes(size, loss, nodes, ALL_SETS),) if scale == "paper" else ()
                row = f"{loss}, {size}"
                entries.append(
                    Entry(f"{row}: ImageNet & variants", column, runs, IMAGENET_AND_VARIANTS, variants[position])
                )
                entries.append(Entry(f"{row}: retrieval", column, (), "", retrieval[position]))
                if runs:
                    entries += [Entry(f"{row}: {group}", column, runs, name) for group, name in RETRIEVAL_HERE.items()]
    return entries


# Milliseconds of a step by nodes, OpenCLIP and FastCLIP-v3 at medium and large scale, on InfiniBand.
_FIGURE_3 = {
    ("clip", "medium"): (867.85, 880.19, 925.47, 1049.90),
    ("fastclip_v3", "medium"): (866.36, 879.91, 917.54, 1028.06),
    ("clip", "large"): (1125.29, 1234.06, 1396.76, 1564.46),
    ("fastclip_v3", "large"): (1128.75, 1234.82, 1394.91, 1542.32),
}


def _step(scale: str, loss: str, nodes: int) -> Cell:
    if scale == "tiny":
        setting = {"model": "tiny", "model_overrides": TINY_TOWERS, "batch": 64 * nodes, "devices": nodes}
    elif scale == "small":
        setting = {"model": "RN50", "model_overrides": "dtype=bfloat16", "batch": 128, "devices": nodes}
    else:
        setting = {"model": "RN50", "model_overrides": "dtype=bfloat16", "batch": 512 * nodes, "devices": 4 * nodes}
    return cell("step_time", loss=loss, **setting)


def _over_nodes(scale: str, value: str) -> list[Entry]:
    """Return a value of a step by nodes; each device has as many rows."""
    nodes = _NODES[:1] if scale == "small" else _NODES
    return [Entry(f"{loss}, here", f"{n} nodes", (_step(scale, loss, n),), value) for loss in _FIGURE_2 for n in nodes]


def figure_3(scale: str) -> list[Entry]:
    """Time of a step over the nodes."""
    entries = _over_nodes(scale, "step_ms")
    for (loss, size), figures in _FIGURE_3.items():
        for nodes, paper in zip(_NODES, figures, strict=True):
            entries.append(Entry(f"{loss}, {size}", f"{nodes} nodes", (), "", paper))
    return entries


def figure_4(scale: str) -> list[Entry]:
    """Throughput over the nodes; the paper's follows from the times of Figure 3."""
    entries = _over_nodes(scale, "pairs_per_second")
    for (loss, size), figures in _FIGURE_3.items():
        batch = _PER_NODE[size]
        for nodes, milliseconds in zip(_NODES, figures, strict=True):
            paper = 1e3 * batch * nodes / milliseconds
            entries.append(Entry(f"{loss}, {size}", f"{nodes} nodes", (), "", paper))
    return entries


def figure_5(scale: str) -> list[Entry]:
    """Accuracy of FastCLIP-v3 by its final gamma, at two batch sizes."""
    entries = []
    for gamma in (0.2, 0.8):
        for nodes in (2, 8):
            change: dict[str, Any] = {"global_contrastive.gamma_min": gamma}
            if scale == "paper":
                run, value = _on_nodes("large", "fastclip_v3", nodes, IMAGENET, **change), "imagenet_top1"
            else:
                run, value = here_run(scale, "fastclip_v3", batch=_HERE[scale] * nodes, **change), "top1"
            entries.append(Entry(f"final gamma {gamma}", f"{nodes} nodes", (run,), value, NOT_LEGIBLE))
    return entries


_target = functools.partial(Target, paper=FASTCLIP)
_accuracy = functools.partial(_target, unit=ACCURACY, style=".2f")
TARGETS = (
    _accuracy(
        name="fastclip-figure-2",
        title="Figure 2: accuracy over the nodes",
        shows="Tiny: digits, batch 8 per node, learning rate linear in the nodes. Small: shapes, 32 per node. Paper: "
        "512 or 1,024 pairs per node, as many epochs on all of them. The mean of retrieval includes WinoGAViL, which "
        "cannot be evaluated here; the row Flickr30k and COCO has the other two sets.",
        entries=figure_2,
        axis="nodes",
        costs=("3 min", "30 min"),
    ),
    _target(
        name="fastclip-figure-3",
        title="Figure 3: time of a step over the nodes",
        shows="Milliseconds. Tiny: tiny towers, 64 pairs on each simulated device, which share the cores. Small: "
        "ResNet-50, 128 pairs on one GPU. Paper: medium.",
        entries=figure_3,
        unit="ms per step",
        style=",.0f",
        axis="nodes (here: devices)",
        log=True,
        devices=8,
        costs=("2 min", "3 min"),
    ),
    _target(
        name="fastclip-figure-4",
        title="Figure 4: throughput over the nodes",
        shows="Pairs per second, from the cells of Figure 3. The paper's curves are these over their first value: the "
        "speedup over one node.",
        entries=figure_4,
        unit="pairs/s",
        style=",.0f",
        axis="nodes (here: devices)",
        log=True,
        devices=8,
        costs=("2 min", "3 min"),
    ),
    _accuracy(
        name="fastclip-figure-5",
        title="Figure 5: final gamma and batch size",
        shows="The paper has curves only. Tiny: digits, batch 16 and 64. Small: shapes, batch 64 and 256.",
        entries=figure_5,
        axis="nodes",
        costs=("1 min", "10 min"),
    ),
)
