"""Targets of Inf-CL with training runs: accuracy, ablation, training losses."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial

from experiments.reproduction.inf_cl import INF_CL, NAMES, K, planned_step
from experiments.reproduction.recipes import (
    ALL_SETS,
    DIGITS,
    IMAGENET,
    SEEDS,
    TINY_TOWERS,
    WIDER_TOWERS,
    digits,
    paper_run,
    shapes,
)
from experiments.reproduction.target import NOT_LEGIBLE, Cell, Entry, Target, cell

# Method, batch size in thousands, then ImageNet, v2, ObjectNet, OOD, image to text and text to image R@1 in percent.
_TABLE_3 = (
    ("dense", 64, (74.74, 65.30, 46.31, 66.13, 25.71, 44.31)),
    ("local", 64, (74.86, 65.22, 46.29, 66.75, 25.98, 44.02)),
    ("xla", 64, (74.93, 65.27, 46.13, 66.77, 26.01, 43.95)),
    ("xla", 256, (75.12, 65.12, 46.44, 67.15, 25.90, 44.61)),
    ("xla", 1024, (73.58, 63.87, 44.55, 64.60, 24.53, 41.58)),
)
# Further columns, with the values of a run at the scale "paper". The paper does not say which set ImageNet OOD is.
_SETS = {
    "ImageNet v2": "imagenet_v2_top1",
    "ObjectNet": "objectnet_top1",
    "ImageNet OOD": "",
    "COCO image to text R@1": "coco_image_to_text_r1",
    "COCO text to image R@1": "coco_text_to_image_r1",
}


def accuracy_run(scale: str, implementation: str | None, thousands: int, gpus: int = 8) -> Cell:
    """Return the run of a method at a batch size.

    Args:
      scale: one of `SCALES`.
      implementation: implementation of the loss.
      thousands: batch size of the paper in thousands; as many digits, or 16 times as many shapes.
      gpus: GPUs of the paper, on which the chunks of a recipe depend.
    """
    if scale == "tiny":
        return digits(thousands, devices=8, implementation=implementation)
    best = None if implementation == "xla" else implementation
    if scale == "small":
        return shapes(16 * thousands, implementation=best)
    arguments = {"batch_size": thousands * K, "gpus": gpus}
    return paper_run("inf_cl:laion400m", arguments=arguments, sets=ALL_SETS, implementation=best)


def _top1(scale: str) -> str:
    """Return the name of a run's main accuracy."""
    return "imagenet_top1" if scale == "paper" else "top1"


def table_3(scale: str) -> list[Entry]:
    """Accuracy by strategy and batch size."""
    entries = []
    for implementation, thousands, (imagenet, *others) in _TABLE_3:
        run = accuracy_run(scale, implementation, thousands)
        row = f"{NAMES[implementation]}, batch {_here(scale, thousands)} (paper: {thousands}k)"
        entries.append(Entry(row, "zero-shot top-1", (run,), _top1(scale), imagenet))
        for (column, value), paper in zip(_SETS.items(), others, strict=True):
            entries.append(Entry(row, column, (run,) if scale == "paper" and value else (), value, paper))
    return entries


def _here(scale: str, thousands: int) -> str:
    return {"tiny": str(thousands), "small": str(16 * thousands), "paper": f"{thousands}k"}[scale]


# Cross-GPU and in-GPU tiling: loss memory and peak in GB, ImageNet accuracy in percent.
_TABLE_4 = {
    "dense": (66.21, 69.24, 74.82),
    "local": (16.96, 20.79, 74.86),
    "ring": (4.81, 12.30, 74.78),
    "xla": (0.81, 12.30, 74.93),
}
_TILING = {
    "dense": "no tiling",
    "local": "rows of a GPU",
    "ring": "cross-GPU tiling",
    "xla": "cross- and in-GPU tiling",
}


def table_4(scale: str) -> list[Entry]:
    """Ablation of the tiling at a batch of 64k on 4 GPUs."""
    entries = []
    for implementation, (memory, peak, accuracy) in _TABLE_4.items():
        row = f"{_TILING[implementation]} (`{implementation}`)"
        shape = {"batch": 64 * K if scale != "small" else 16 * K, "dim": 512, "devices": 4 if scale != "small" else 1}
        one = cell("loss_memory", implementation=implementation, **shape)
        entries.append(Entry(row, "loss memory, GiB", (one,), "gib", memory))
        step = planned_step("ViT-B/16", 4, 64 * K) | {"frozen": ("image",), "grad_cache.chunk_size": 1024}
        gpu = {"devices": 4, "device": "A100-80", "implementation": implementation}
        planned = cell("planned_memory", changes=step, **gpu)
        entries.append(Entry(row, "peak (planner), GiB", (planned,), "peak_gib", peak))
        run = accuracy_run(scale, implementation, 64, gpus=4)
        entries.append(Entry(row, "zero-shot top-1, %", (run,), _top1(scale), accuracy))
    return entries


_TABLE_S2 = {
    "cc3m": {4: 47.60, 8: 51.36, 16: 53.01, 32: 52.57, 64: 51.08},
    "cc12m": {8: 54.25, 16: 54.90, 32: 56.10, 64: 55.70, 128: 54.89},
    "laion400m": {32: 63.99, 64: 66.62, 128: 66.77, 256: 65.28},
}
_TABLE_S3 = {
    "ViT-B/32": {4: 47.60, 8: 51.36, 16: 53.01, 32: 52.57, 64: 51.08},
    "ViT-B/16": {4: 60.49, 8: 62.99, 16: 64.66, 32: 64.89, 64: 64.01},
}
_BATCHES = (16, 64, 256, 1024)  # of the digits
_SHAPE_BATCHES = (64, 256, 1024, 4096)
_DATA = {"a quarter": DIGITS // 4, "half": DIGITS // 2, "all": None}  # stand-ins for CC3M, CC12M and LAION-400M


def _lit(dataset: str, model: str, thousands: int) -> Cell:
    """Return a run of the paper with a frozen image tower."""
    arguments = {"model": model, "batch_size": thousands * K}
    return paper_run(f"inf_cl:{dataset}", arguments=arguments, sets=IMAGENET)


def _paper_entries(
    scale: str, figures: Mapping[str, Mapping[int, float]], run: Callable[[str, int], Cell]
) -> list[Entry]:
    """Return the paper's figures by row and batch size.

    They have runs at the scale "paper" alone.
    """
    label, measures = ("", True) if scale == "paper" else ("paper: ", False)
    return [
        Entry(f"{label}{row}", f"{label}{k}k", (run(row, k),) if measures else (), "imagenet_top1", paper)
        for row, by_batch in figures.items()
        for k, paper in by_batch.items()
    ]


def _here_entries(runs: Mapping[str, Callable[[int], Cell]], batches: Iterable[int]) -> list[Entry]:
    """Return the runs of each row by batch size."""
    sizes = tuple(batches)
    return [Entry(row, f"{batch:,}", (run(batch),), "top1") for row, run in runs.items() for batch in sizes]


def table_s2(scale: str) -> list[Entry]:
    """Accuracy by batch size and size of the dataset."""
    entries = _paper_entries(scale, _TABLE_S2, lambda dataset, k: _lit(dataset, "ViT-B/32", k))
    if scale == "small":
        runs = {f"shapes, {split}": partial(shapes, split=split) for split in ("train[:8192]", "train")}
        entries += _here_entries(runs, _SHAPE_BATCHES)
    elif scale == "tiny":
        for name, samples in _DATA.items():
            fitting = [batch for batch in _BATCHES if batch <= (samples or DIGITS)]
            entries += _here_entries({f"{name} of the digits": partial(digits, samples=samples)}, fitting)
    return entries


def table_s3(scale: str) -> list[Entry]:
    """Accuracy by batch size and size of the model."""
    entries = _paper_entries(scale, _TABLE_S3, lambda model, k: _lit("cc3m", model, k))
    if scale == "small":
        runs = {
            f"tiny-shapes {changes}".strip(): partial(shapes, model_overrides=changes)
            for changes in ("", "vision.layers=6")
        }
        entries += _here_entries(runs, _SHAPE_BATCHES)
    elif scale == "tiny":
        towers = {"1 layer of 32": TINY_TOWERS, "2 layers of 64": WIDER_TOWERS}
        runs = {f"image tower of {name}": partial(digits, towers=tower) for name, tower in towers.items()}
        entries += _here_entries(runs, _BATCHES)
    return entries


def figure_5(scale: str) -> list[Entry]:
    """Accuracy over the batch size, with three seeds."""
    if scale == "paper":
        return table_s2(scale)
    row = "digits" if scale == "tiny" else "shapes"
    batches, run = (_BATCHES, digits) if scale == "tiny" else (_SHAPE_BATCHES, shapes)
    return [Entry(row, f"{b:,}", tuple(run(b, seed=seed) for seed in SEEDS), "top1", NOT_LEGIBLE) for b in batches]


def figure_s2(scale: str) -> list[Entry]:
    """Training losses with CLIP's, OpenCLIP's and Inf-CL's loss."""
    return [
        Entry(name, f"batch {_here(scale, 64)}", (accuracy_run(scale, implementation, 64),), "loss", NOT_LEGIBLE)
        for implementation, name in NAMES.items()
    ]


_target = partial(Target, paper=INF_CL)
_accuracy = partial(_target, unit="zero-shot top-1, %", style=".2f")
TARGETS = (
    _accuracy(
        name="inf-cl-table-3",
        title="Table 3: accuracy by strategy and batch size",
        shows="Tiny: digits on 8 simulated devices, 8 epochs. Small: built-in shapes. The strategies agree; a very "
        "large batch with the same learning rate and epochs is worse. Paper: all columns but ImageNet OOD, because the "
        "paper does not say which set that is.",
        entries=table_3,
        devices=8,
        costs=("2 min", "10 min"),
    ),
    _target(
        name="inf-cl-table-4",
        title="Table 4: ablation of the tiling",
        shows="Loss memory from XLA's plan at the paper's 64k on 4 devices (CPU), peak from the planner for LiT of "
        "ViT-B/16, accuracy on digits or shapes.",
        entries=table_4,
        unit="GiB, or %",
        devices=8,
        costs=("2 min", "10 min"),
    ),
    _accuracy(
        name="inf-cl-table-s2",
        title="Table S2: accuracy by batch and dataset size",
        shows="Tiny: parts of the digits, 8 epochs. Small: 8,192 and all of the shapes, the same samples seen.",
        entries=table_s2,
        axis="batch size",
        costs=("2 min", "15 min"),
    ),
    _accuracy(
        name="inf-cl-table-s3",
        title="Table S3: accuracy by batch and model size",
        shows="Tiny: two sizes of the image tower on digits. Small: 3 and 6 layers on the built-in shapes.",
        entries=table_s3,
        axis="batch size",
        costs=("2 min", "15 min"),
    ),
    _accuracy(
        name="inf-cl-figure-5",
        title="Figure 5 (S1 in the supplement): accuracy over the batch size",
        shows="The batch scaling curve with three seeds: mean (range). Everything but the batch stays the same, also "
        "learning rate and epochs; the warm-up is at most half the steps. Tiny: digits, 8 epochs. Small: shapes.",
        entries=figure_5,
        axis="batch size",
        costs=("2 min", "15 min"),
    ),
    _target(
        name="inf-cl-figure-s2",
        title="Figure S2: training losses by strategy",
        shows="Mean of the last 20 losses; the picture has the losses of all steps. Tiny: digits on 8 simulated "
        "devices. Small: built-in shapes.",
        entries=figure_s2,
        unit="training loss",
        style=".4f",
        devices=8,
        curve="losses",
        costs=("1 min", "5 min"),
    ),
)
