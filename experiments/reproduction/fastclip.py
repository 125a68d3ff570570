"""Targets of FastCLIP: schedules of gamma, temperatures, optimizers. `fastclip_scaling` has those over the nodes.

The text copy of the paper lost the captions. Its sentences name Tables 2, 6 to 10 and 12 to 16, and Figure 5. The three
tables between 2 and 6 are 3 to 5 in their order, and the figures of section 6 are 2 to 4.
"""

from typing import Any

from experiments.reproduction.recipes import ALL_SETS, IMAGENET, SEEDS, digits, paper_run
from experiments.reproduction.target import Cell, Entry, Paper, Target, cell

FASTCLIP = Paper(
    "FastCLIP",
    'Wei et al., "FastCLIP: A Suite of Optimization Techniques to Accelerate CLIP Training with Limited Resources" '
    "(2024)",
    "8 Tesla T4 (Figures 2 to 5: 4 to 32; Table 6: 8 H100)",
)
SIZES = ("medium", "large")
ACCURACY = "accuracy, %"
# Value of a run at the scale "paper" in each column. The paper's two other means include WinoGAViL, which cannot be
# evaluated here.
IMAGENET_AND_VARIANTS = "imagenet_and_variants"
RETRIEVAL_HERE = {"Flickr30k and COCO": "flickr_and_coco_r1"}

_SMALL_BATCH = 16  # of the digits: the losses are for small batches
_QUICKSTART_BATCH, _QUICKSTART_SAMPLES = 64, 8192 * 24  # of `configs/fastclip.py:quickstart`, samples of all epochs
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


def here_run(scale: str, loss: str, *, seed: int = 0, batch: int | None = None, **changes: Any) -> Cell:
    """Return a run on built-in data: digits at the scale "tiny", otherwise shapes.

    Args:
      scale: one of `SCALES`.
      loss: loss of `configs/fastclip.py`.
      seed: training seed.
      batch: batch size, of the same number of samples; None: 16 digits or 64 shapes.
      **changes: further settings by name.
    """
    if scale == "tiny":
        gcl = {f"global_contrastive.{name}": value for name, value in _LOSSES[loss].items()}
        gcl |= {} if loss == "clip" else {"global_contrastive.eps": 3e-3, "global_contrastive.mode": "reference"}
        if loss.startswith("fastclip_v3"):
            gcl |= {"optimizer.temperature_learning_rate": 1e-4}
        return digits(batch or _SMALL_BATCH, seed=seed, loss=loss.removesuffix("_const"), **(gcl | changes))
    own: dict[str, Any] = {"cpu_devices": 1} | ({"seed": seed} if seed else {})
    if batch not in (None, _QUICKSTART_BATCH):
        own |= {"batch_size": batch, "total_steps": _QUICKSTART_SAMPLES // batch}
    return cell("full_run", config=f"fastclip:quickstart,loss={loss}", changes=own | changes)


# Datacomp, retrieval, ImageNet and variants, in percent, at medium and large scale.
_TABLE_3 = {
    "sogclr": ((23.41, 27.48, 16.90), (29.91, 30.16, 22.98)),
    "fastclip_v1": ((24.87, 29.28, 18.86), (30.65, 32.66, 24.26)),
    "isogclr": ((23.35, 27.92, 17.05), (30.32, 30.27, 24.96)),
    "fastclip_v2": ((24.10, 29.32, 18.52), (30.94, 31.84, 25.52)),
    "fastclip_v3_const": ((23.60, 27.68, 17.33), (29.46, 30.33, 23.69)),
    "fastclip_v3": ((24.76, 30.36, 19.08), (31.60, 34.88, 24.78)),
}
_TABLE_4 = {
    "fastclip_v0": ((24.71, 30.36, 17.50), (31.47, 34.86, 24.55)),
    "fastclip_v1": ((24.87, 29.28, 18.86), (30.65, 32.66, 24.26)),
    "fastclip_v2": ((24.21, 30.35, 17.86), (30.95, 33.71, 24.94)),
    "fastclip_v3": ((24.76, 30.36, 19.08), (31.60, 34.88, 24.78)),
}
_TABLE_5 = {
    "sgd": ((22.25, 26.06, 16.32), (30.15, 33.09, 22.95)),
    "lamb": ((22.63, 24.87, 16.43), (30.54, 34.02, 24.11)),
    "lion": ((24.50, 29.41, 18.03), (30.99, 33.78, 25.01)),
    "adamw": ((24.76, 30.36, 19.08), (31.60, 34.88, 24.78)),
}
_GROUPS = ("Datacomp", "retrieval", "ImageNet & variants")
# Learning rate and weight decay of each optimizer on built-in data; AdamW has those of the run.
_OPTIMIZERS: dict[str, tuple[float, float] | None] = {
    "sgd": (0.5, 3e-6),
    "lamb": (1e-2, 0.1),
    "lion": (2e-4, 0.3),
    "adamw": None,
}


def _with_optimizer(name: str) -> dict[str, Any]:
    """Return the changes for an optimizer on built-in data."""
    if (setting := _OPTIMIZERS[name]) is None:
        return {}
    rate, decay = setting
    return {"optimizer.name": name, "optimizer.weight_decay": decay, "optimizer.learning_rate": rate}


def _table(scale: str, figures: dict[str, Any], experiment: str) -> list[Entry]:
    entries = []
    for name, sizes in figures.items():
        loss, optimizer = ("fastclip_v3", name) if experiment == "optimizer" else (name, "adamw")
        if scale != "paper":
            one = here_run(scale, loss, **_with_optimizer(optimizer))
            entries.append(Entry(name, "zero-shot top-1 here", (one,), "top1"))
            if scale == "small":
                entries.append(Entry(name, "text to image R@1 here", (one,), "text_to_image_r1"))
        for size, row in zip(SIZES, sizes, strict=True):
            arguments = {"experiment": experiment, "loss": loss, "optimizer": optimizer}
            runs = (
                (paper_run(f"fastclip:{size}", arguments=arguments, sets=ALL_SETS, precision="fp32"),)
                if scale == "paper"
                else ()
            )
            for group, paper in zip(_GROUPS, row, strict=True):
                measured = runs if group == _GROUPS[2] else ()
                entries.append(Entry(name, f"{size}: {group}", measured, IMAGENET_AND_VARIANTS, paper))
            if runs:
                entries += [Entry(name, f"{size}: {group}", runs, value) for group, value in RETRIEVAL_HERE.items()]
    return entries


def table_3(scale: str) -> list[Entry]:
    """Accuracy with a constant and a cosine schedule of gamma."""
    return _table(scale, _TABLE_3, "schedule")


def table_4(scale: str) -> list[Entry]:
    """Accuracy by the update of the temperature."""
    return _table(scale, _TABLE_4, "temperature")


def table_5(scale: str) -> list[Entry]:
    """Accuracy by optimizer."""
    return _table(scale, _TABLE_5, "optimizer")


# ImageNet top-1 in percent. The losses have runs here; the other rows are quoted by the paper.
_TABLE_6: dict[str, tuple[str | None, float]] = {
    "Cherti et al. (2023), ViT-B/16, 80 M pairs, batch 90,112": (None, 60.24),
    "Cherti et al. (2023), ViT-B/16, 400 M pairs, batch 33,792": (None, 67.00),
    "Cherti et al. (2023), ViT-B/16, 2,000 M pairs, batch 90,112": (None, 68.13),
    "Chen et al. (2023), ViT-B/32, 400 M pairs, batch 65,536": (None, 64.30),
    "OpenCLIP, ViT-B/16, 315 M pairs, batch 5,120": ("clip", 62.90),
    "FastCLIP-v3, ViT-B/16, 315 M pairs, batch 5,120": ("fastclip_v3", 64.49),
}


# In fp32 the batch does not fit onto 8 H100; the paper has mixed precision. Gradient caching is exact.
_CHUNKS: dict[str, Any] = {"grad_cache.chunk_size": 1280, "precision": "fp32"}


def table_6(scale: str) -> list[Entry]:
    """Accuracy of long runs on LAION."""
    entries = []
    for row, (loss, paper) in _TABLE_6.items():
        runs: tuple[Cell, ...] = ()
        if loss is not None and scale == "paper":
            runs = (paper_run("fastclip:xlarge", arguments={"loss": loss}, sets=IMAGENET, **_CHUNKS),)
        elif loss is not None:
            entries.append(Entry(row, "zero-shot top-1 here", (here_run(scale, loss),), "top1"))
        entries.append(Entry(row, "ImageNet top-1", runs, "imagenet_top1", paper))
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
        runs = tuple(here_run(scale, loss, seed=seed, **changes) for seed in SEEDS)
        entries.append(Entry(name, "zero-shot top-1", runs, "top1"))
        if scale != "tiny":
            for value in ("image_to_text_r1", "text_to_image_r1"):
                entries.append(Entry(name, value.replace("_", " ").replace(" r1", " R@1"), runs, value))
    return entries


_TABLE = f"Tiny: digits, batch {_SMALL_BATCH}, 8 epochs. Small: built-in shapes, `configs/fastclip.py:quickstart`. "
_PAPER = (
    "Paper: one seed of the paper's three; ImageNet & variants, the mean over ImageNet and its six shifted sets. "
    "Datacomp and retrieval are not measured, because WinoGAViL cannot be evaluated here; the column Flickr30k and "
    "COCO has the other two retrieval sets. `experiments.evaluate --suite=datacomp38` averages 37 of the 38."
)


def _target(number: int, title: str, entries: Any, costs: tuple[str, str], shows: str) -> Target:
    return Target(
        name=f"fastclip-table-{number}",
        paper=FASTCLIP,
        title=f"Table {number}: {title}",
        shows=f"{_TABLE}{shows}",
        entries=entries,
        unit=ACCURACY,
        style=".2f",
        costs=costs,
    )


_SCHEDULES = "SogCLR, iSogCLR and v3 (constant) have a constant gamma, the others a cosine. "
TARGETS = (
    _target(3, "schedule of the inner learning rate", table_3, ("2 min", "20 min"), f"{_SCHEDULES}{_PAPER}"),
    _target(4, "updates of the temperature", table_4, ("1 min", "15 min"), _PAPER),
    _target(5, "optimizers", table_5, ("2 min", "15 min"), f"FastCLIP-v3. {_PAPER}"),
    _target(6, "accuracy of long runs", table_6, ("1 min", "5 min"), "The other rows are quoted by the paper."),
    Target(
        name="fastclip-comparison",
        paper=FASTCLIP,
        title="CLIP and FastCLIP-v3 at a small batch, three seeds",
        shows=f"{_TABLE}Mean (range). No table of the paper: it separates the loss from the learning rate of the "
        "temperature, which is 1e-4 in the last two rows.",
        entries=comparison,
        unit=ACCURACY,
        style=".2f",
        costs=("2 min", "30 min"),
    ),
)
