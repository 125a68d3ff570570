"""Targets of FastCLIP: schedules of gamma, temperatures, optimizers and the scaling over nodes."""

from typing import Any

from experiments.reproduction.recipes import SEEDS, TINY_TOWERS, digits
from experiments.reproduction.target import NOT_LEGIBLE, Cell, Entry, Paper, Target, cell

FASTCLIP = Paper(
    "FastCLIP",
    'Wei et al., "FastCLIP: A Suite of Optimization Techniques to Accelerate CLIP Training with Limited Resources" '
    "(2024)",
    "2 nodes of 4 Tesla T4 (Figures 2 to 5: 1 to 8 nodes)",
)

_SMALL_BATCH = 16  # of the digits: the losses are for small batches
_NODES = (1, 2, 4, 8)
_SIZES = ("medium", "large")
# Settings of `configs/fastclip.py:quickstart` for each loss.
_LOSSES: dict[str, dict[str, Any]] = {
    "clip": {},
    "sogclr": {"gamma_min": 0.8, "gamma_schedule": "constant"},
    "isogclr": {"gamma_min": 0.8, "gamma_schedule": "constant"},
    "fastclip_v0": {"gamma_min": 0.8, "gamma_epochs": 4},
    "fastclip_v1": {"gamma_min": 0.8, "gamma_epochs": 4},
    "fastclip_v2": {"gamma_min": 0.8, "gamma_epochs": 4},
    "fastclip_v3": {"gamma_min": 0.8, "gamma_epochs": 4, "rho": 3.0},
    "fastclip_v3_const": {"gamma_min": 0.8, "gamma_schedule": "constant", "rho": 3.0},
}


def _digits_run(loss: str, batch: int = _SMALL_BATCH, seed: int = 0, **changes: Any) -> Cell:
    gcl = {f"global_contrastive.{name}": value for name, value in _LOSSES[loss].items()}
    gcl |= {} if loss == "clip" else {"global_contrastive.eps": 3e-3, "global_contrastive.mode": "reference"}
    if loss.startswith("fastclip_v3"):
        gcl |= {"optimizer.temperature_learning_rate": 1e-4}
    return digits(batch, epochs=8, seed=seed, loss=loss.removesuffix("_const"), **(gcl | changes))


def _run(scale: str, size: str, loss: str, experiment: str, optimizer: str = "adamw") -> Cell:
    """Return the run of a loss in one of the paper's experiments, or in their place on digits or shapes."""
    if scale == "paper":
        argument = f"{size},experiment={experiment},loss={loss},optimizer={optimizer}"
        return cell("full_run", config=f"fastclip:{argument}")
    rates = {"sgd": (0.5, 3e-6), "lamb": (1e-2, 0.1), "lion": (2e-4, 0.3), "adamw": (2e-3, 0.2)}
    rate, decay = rates[optimizer]
    changes: dict[str, Any] = (
        {} if optimizer == "adamw" else {"optimizer.name": optimizer, "optimizer.weight_decay": decay}
    )
    changes |= {"optimizer.learning_rate": rate} if optimizer != "adamw" else {}
    if scale == "tiny":
        return _digits_run(loss, **changes)
    return cell("full_run", config=f"fastclip:quickstart,loss={loss}", changes={"cpu_devices": 1} | changes)


# Datacomp, retrieval, ImageNet and variants, in percent, at medium and large scale.
_TABLE_4 = {
    "sogclr": ((23.41, 27.48, 16.90), (29.91, 30.16, 22.98)),
    "fastclip_v1": ((24.87, 29.28, 18.86), (30.65, 32.66, 24.26)),
    "isogclr": ((23.35, 27.92, 17.05), (30.32, 30.27, 24.96)),
    "fastclip_v2": ((24.10, 29.32, 18.52), (30.94, 31.84, 25.52)),
    "fastclip_v3_const": ((23.60, 27.68, 17.33), (29.46, 30.33, 23.69)),
    "fastclip_v3": ((24.76, 30.36, 19.08), (31.60, 34.88, 24.78)),
}
_TABLE_5 = {
    "fastclip_v0": ((24.71, 30.36, 17.50), (31.47, 34.86, 24.55)),
    "fastclip_v1": ((24.87, 29.28, 18.86), (30.65, 32.66, 24.26)),
    "fastclip_v2": ((24.21, 30.35, 17.86), (30.95, 33.71, 24.94)),
    "fastclip_v3": ((24.76, 30.36, 19.08), (31.60, 34.88, 24.78)),
}
_TABLE_6 = {
    "sgd": ((22.25, 26.06, 16.32), (30.15, 33.09, 22.95)),
    "lamb": ((22.63, 24.87, 16.43), (30.54, 34.02, 24.11)),
    "lion": ((24.50, 29.41, 18.03), (30.99, 33.78, 25.01)),
    "adamw": ((24.76, 30.36, 19.08), (31.60, 34.88, 24.78)),
}
_GROUPS = ("Datacomp", "retrieval", "ImageNet & variants")


def _table(scale: str, figures: dict[str, Any], experiment: str) -> list[Entry]:
    entries = []
    for name, sizes in figures.items():
        loss, optimizer = ("fastclip_v3", name) if experiment == "optimizer" else (name, "adamw")
        if scale != "paper":
            one = _run(scale, "", loss, experiment, optimizer)
            entries.append(Entry(name, "zero-shot top-1 here", (one,), "top1"))
            if scale == "small":
                entries.append(Entry(name, "text to image R@1 here", (one,), "text_to_image_r1"))
        for size, row in zip(_SIZES, sizes, strict=True):
            cells = (_run(scale, size, loss, experiment, optimizer),) if scale == "paper" else ()
            for group, paper in zip(_GROUPS, row, strict=True):
                measured = cells if group == _GROUPS[2] else ()
                entries.append(Entry(name, f"{size}: {group}", measured, "imagenet_top1", paper))
    return entries


def table_4(scale: str) -> list[Entry]:
    """Accuracy with a constant and a cosine schedule of gamma."""
    return _table(scale, _TABLE_4, "schedule")


def table_5(scale: str) -> list[Entry]:
    """Accuracy by the update of the temperature."""
    return _table(scale, _TABLE_5, "temperature")


def table_6(scale: str) -> list[Entry]:
    """Accuracy by optimizer."""
    return _table(scale, _TABLE_6, "optimizer")


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
    """Accuracy of OpenCLIP and FastCLIP-v3 over the nodes, with a batch in proportion to them."""
    entries = []
    for loss, sizes in _FIGURE_2.items():
        for position, nodes in enumerate(_NODES):
            batch = 8 * nodes  # of the digits
            if scale == "tiny":
                rate: dict[str, Any] = {"optimizer.learning_rate": 1e-3 * nodes / 2}
                entries.append(Entry(f"{loss}, here", f"{nodes} nodes", (_digits_run(loss, batch, **rate),), "top1"))
            elif scale == "small":
                changes = {"batch_size": 32 * nodes, "optimizer.learning_rate": 5e-4 * nodes, "cpu_devices": 1}
                changes["total_steps"] = 8192 * 24 // (32 * nodes)
                one = cell("full_run", config=f"fastclip:quickstart,loss={loss}", changes=changes)
                entries.append(Entry(f"{loss}, here", f"{nodes} nodes", (one,), "top1"))
            for size, figures in sizes.items():
                cells: tuple[Cell, ...] = ()
                if scale == "paper":
                    batch, rate_2 = {"medium": (512, 1e-3), "large": (1024, 4e-4)}[size]
                    changes = {"batch_size": batch * nodes, "optimizer.learning_rate": rate_2 * nodes / 2}
                    cells = (cell("full_run", config=f"fastclip:{size},loss={loss}", changes=changes),)
                row = f"{loss}, {size}: ImageNet & variants"
                entries.append(Entry(row, f"{nodes} nodes", cells, "imagenet_top1", figures[0][position]))
                row = f"{loss}, {size}: retrieval"
                entries.append(Entry(row, f"{nodes} nodes", (), "", figures[1][position]))
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


def figure_3(scale: str) -> list[Entry]:
    """Time of a step over the nodes, with the same rows on each device."""
    entries = []
    for loss in ("clip", "fastclip_v3"):
        for nodes in _NODES[:1] if scale == "small" else _NODES:
            entries.append(Entry(f"{loss}, here", f"{nodes} nodes", (_step(scale, loss, nodes),), "step_ms"))
    for (loss, size), figures in _FIGURE_3.items():
        for nodes, paper in zip(_NODES, figures, strict=True):
            entries.append(Entry(f"{loss}, {size}", f"{nodes} nodes", (), "", paper))
    return entries


def figure_4(scale: str) -> list[Entry]:
    """Pairs per second over the nodes; the paper's from the times of Figure 3 and its batch sizes."""
    entries = []
    for loss in ("clip", "fastclip_v3"):
        for nodes in _NODES[:1] if scale == "small" else _NODES:
            entries.append(Entry(f"{loss}, here", f"{nodes} nodes", (_step(scale, loss, nodes),), "pairs_per_second"))
    for (loss, size), figures in _FIGURE_3.items():
        batch = {"medium": 512, "large": 1024}[size]
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
            if scale == "tiny":
                run = _digits_run("fastclip_v3", 8 * nodes, **change)
            elif scale == "small":
                changes = {"batch_size": 32 * nodes, "total_steps": 8192 * 24 // (32 * nodes), "cpu_devices": 1}
                run = cell("full_run", config="fastclip:quickstart", changes=changes | change)
            else:
                changes = {"batch_size": 1024 * nodes}
                run = cell("full_run", config="fastclip:large", changes=changes | change)
            name = "imagenet_top1" if scale == "paper" else "top1"
            entries.append(Entry(f"final gamma {gamma}", f"{nodes} nodes", (run,), name, NOT_LEGIBLE))
    return entries


def comparison(scale: str) -> list[Entry]:
    """Accuracy of CLIP, CLIP with a slow temperature and FastCLIP-v3, with three seeds."""
    slow: dict[str, Any] = {"optimizer.temperature_learning_rate": 1e-4}
    variants: dict[str, tuple[str, dict[str, Any]]] = {
        "clip": ("clip", {}),
        "clip, slow temperature": ("clip", slow),
        "fastclip_v3": ("fastclip_v3", {}),
    }
    entries = []
    for name, (loss, changes) in variants.items():
        if scale == "tiny":
            runs = tuple(_digits_run(loss, seed=seed, **changes) for seed in SEEDS)
        else:
            runs = tuple(
                cell(
                    "full_run",
                    config=f"fastclip:quickstart,loss={loss}",
                    changes={"seed": seed, "cpu_devices": 1} | changes,
                )
                for seed in SEEDS
            )
        entries.append(Entry(name, "zero-shot top-1", runs, "top1"))
        if scale != "tiny":
            for value in ("image_to_text_r1", "text_to_image_r1"):
                entries.append(Entry(name, value.replace("_", " ").replace(" r1", " R@1"), runs, value))
    return entries


_ORDER = "The text lost the numbers of the paper's tables and figures, so they are taken in their order."
_ACCURACY = "accuracy, %"
_TABLE = f"Tiny: digits, batch {_SMALL_BATCH}, 8 epochs. Small: built-in shapes, `configs/fastclip.py:quickstart`. "
TARGETS = (
    Target(
        name="fastclip-table-4",
        paper=FASTCLIP,
        title="Table 4: schedule of the inner learning rate",
        shows=f"{_TABLE}SogCLR, iSogCLR and v3 (constant) have a constant gamma, the others a cosine. {_ORDER}",
        entries=table_4,
        unit=_ACCURACY,
        style=".2f",
        costs=("2 min", "20 min"),
    ),
    Target(
        name="fastclip-table-5",
        paper=FASTCLIP,
        title="Table 5: updates of the temperature",
        shows=f"{_TABLE}{_ORDER}",
        entries=table_5,
        unit=_ACCURACY,
        style=".2f",
        costs=("1 min", "15 min"),
    ),
    Target(
        name="fastclip-table-6",
        paper=FASTCLIP,
        title="Table 6: optimizers",
        shows=f"{_TABLE}FastCLIP-v3. {_ORDER}",
        entries=table_6,
        unit=_ACCURACY,
        style=".2f",
        costs=("2 min", "15 min"),
    ),
    Target(
        name="fastclip-figure-2",
        paper=FASTCLIP,
        title="Figure 2: accuracy over the nodes",
        shows=f"Tiny: digits, batch 8 per node, learning rate linear in the nodes. Small: shapes, 32 per node. "
        f"{_ORDER}",
        entries=figure_2,
        unit=_ACCURACY,
        style=".2f",
        axis="nodes",
        costs=("3 min", "30 min"),
    ),
    Target(
        name="fastclip-figure-3",
        paper=FASTCLIP,
        title="Figure 3: time of a step over the nodes",
        shows=f"Milliseconds. Tiny: tiny towers, 64 pairs on each simulated device, which share the cores. Small: "
        f"ResNet-50, 128 pairs on one GPU. {_ORDER}",
        entries=figure_3,
        unit="ms per step",
        style=",.0f",
        axis="nodes (here: devices)",
        log=True,
        devices=8,
        costs=("2 min", "3 min"),
    ),
    Target(
        name="fastclip-figure-4",
        paper=FASTCLIP,
        title="Figure 4: throughput over the nodes",
        shows=f"Pairs per second, from the cells of Figure 3. {_ORDER}",
        entries=figure_4,
        unit="pairs/s",
        style=",.0f",
        axis="nodes (here: devices)",
        log=True,
        devices=8,
        costs=("2 min", "3 min"),
    ),
    Target(
        name="fastclip-figure-5",
        paper=FASTCLIP,
        title="Figure 5: final gamma and batch size",
        shows="The paper has curves only. Tiny: digits, batch 16 and 64. Small: shapes, batch 64 and 256.",
        entries=figure_5,
        unit=_ACCURACY,
        style=".2f",
        axis="nodes",
        costs=("1 min", "10 min"),
    ),
    Target(
        name="fastclip-comparison",
        paper=FASTCLIP,
        title="CLIP and FastCLIP-v3 at a small batch, three seeds",
        shows=f"{_TABLE}Mean (range). No table of the paper: it separates the loss from the learning rate of the "
        "temperature, which is 1e-4 in the last two rows.",
        entries=comparison,
        unit=_ACCURACY,
        style=".2f",
        costs=("2 min", "30 min"),
    ),
)
