"""Targets of Inf-CL with training runs: accuracy, ablation, training losses."""

from experiments.reproduction.inf_cl import INF_CL, NAMES, K, planned_step
from experiments.reproduction.recipes import DIGITS, SEEDS, TINY_TOWERS, WIDER_TOWERS, digits, inf_cl_run, shapes
from experiments.reproduction.target import NOT_LEGIBLE, Cell, Entry, Target, cell

_SAMPLES = {"cc3m": 2_700_000, "cc12m": 9_100_000, "laion400m": 280_000_000}

# Method, batch size in thousands, then ImageNet, v2, ObjectNet, OOD, image to text and text to image R@1 in percent.
_TABLE_3 = (
    ("dense", 64, (74.74, 65.30, 46.31, 66.13, 25.71, 44.31)),
    ("local", 64, (74.86, 65.22, 46.29, 66.75, 25.98, 44.02)),
    ("xla", 64, (74.93, 65.27, 46.13, 66.77, 26.01, 43.95)),
    ("xla", 256, (75.12, 65.12, 46.44, 67.15, 25.90, 44.61)),
    ("xla", 1024, (73.58, 63.87, 44.55, 64.60, 24.53, 41.58)),
)
_SETS = ("ImageNet v2", "ObjectNet", "ImageNet OOD", "COCO image to text R@1", "COCO text to image R@1")


def accuracy_run(scale: str, implementation: str | None, thousands: int) -> Cell:
    """Return the run of a method at a batch size.

    Args:
      scale: one of `SCALES`.
      implementation: implementation of the loss.
      thousands: batch size of the paper in thousands; as many digits, or 16 times as many shapes.
    """
    if scale == "tiny":
        return digits(thousands, devices=8, implementation=implementation)
    best = None if implementation == "xla" else implementation
    if scale == "small":
        return shapes(16 * thousands, implementation=best)
    lit = {"frozen": ("image",), "init__image": "data/vit_b_16"}
    return inf_cl_run("ViT-B/16", "laion400m", _SAMPLES["laion400m"], thousands * K, implementation=best, **lit)


def table_3(scale: str) -> list[Entry]:
    """Accuracy by strategy and batch size."""
    entries = []
    for implementation, thousands, figures in _TABLE_3:
        one = accuracy_run(scale, implementation, thousands)
        row = f"{NAMES[implementation]}, batch {_here(scale, thousands)} (paper: {thousands}k)"
        values = {"paper": "imagenet_top1"}.get(scale, "top1")
        entries.append(Entry(row, "zero-shot top-1", (one,), values, figures[0]))
        entries += [Entry(row, name, (), "", paper) for name, paper in zip(_SETS, figures[1:], strict=True)]
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
        run = accuracy_run(scale, implementation, 64)
        entries.append(Entry(row, "zero-shot top-1, %", (run,), "top1", accuracy))
    return entries


_TABLE_S2 = {
    "cc3m": {4: 47.60, 8: 51.36, 16: 53.01, 32: 52.57, 64: 51.08},
    "cc12m": {8: 54.25, 16: 54.90, 32: 56.10, 64: 55.70, 128: 54.89},
    "laion400m": {32: 63.99, 64: 66.62, 128: 66.77, 256: 65.28},
}
_BATCHES = (16, 64, 256, 1024)  # of the digits
_SHAPE_BATCHES = (64, 256, 1024, 4096)
_DATA = {"a quarter": DIGITS // 4, "half": DIGITS // 2, "all": DIGITS}  # stand-ins for CC3M, CC12M and LAION-400M


def table_s2(scale: str) -> list[Entry]:
    """Accuracy by batch size and size of the dataset."""
    if scale == "paper":
        return [
            Entry(
                dataset,
                f"{thousands}k",
                (inf_cl_run("ViT-B/32", dataset, _SAMPLES[dataset], thousands * K, frozen=("image",)),),
                "imagenet_top1",
                paper,
            )
            for dataset, figures in _TABLE_S2.items()
            for thousands, paper in figures.items()
        ]
    entries = [
        Entry(f"paper: {dataset}", f"paper: {thousands}k", (), "", paper)
        for dataset, figures in _TABLE_S2.items()
        for thousands, paper in figures.items()
    ]
    if scale == "small":
        for split in ("train[:8192]", "train"):
            entries += [
                Entry(f"shapes, {split}", f"{batch:,}", (shapes(batch, split=split),), "top1")
                for batch in _SHAPE_BATCHES
            ]
        return entries
    for name, samples in _DATA.items():
        for batch in (b for b in _BATCHES if b <= samples):
            one = digits(batch) if samples == DIGITS else digits(batch, samples=samples)
            entries.append(Entry(f"{name} of the digits", f"{batch:,}", (one,), "top1"))
    return entries


_TABLE_S3 = {
    "ViT-B/32": {4: 47.60, 8: 51.36, 16: 53.01, 32: 52.57, 64: 51.08},
    "ViT-B/16": {4: 60.49, 8: 62.99, 16: 64.66, 32: 64.89, 64: 64.01},
}


def table_s3(scale: str) -> list[Entry]:
    """Accuracy by batch size and size of the model."""
    if scale == "paper":
        return [
            Entry(
                model,
                f"{thousands}k",
                (inf_cl_run(model, "cc3m", _SAMPLES["cc3m"], thousands * K, frozen=("image",)),),
                "imagenet_top1",
                paper,
            )
            for model, figures in _TABLE_S3.items()
            for thousands, paper in figures.items()
        ]
    entries = [
        Entry(f"paper: {model}", f"paper: {thousands}k", (), "", paper)
        for model, figures in _TABLE_S3.items()
        for thousands, paper in figures.items()
    ]
    if scale == "small":
        for overrides in ("", "vision.layers=6"):
            row = f"tiny-shapes {overrides}".strip()
            entries += [
                Entry(row, f"{batch:,}", (shapes(batch, model_overrides=overrides),), "top1")
                for batch in _SHAPE_BATCHES
            ]
        return entries
    for name, towers in (("1 layer of 32", TINY_TOWERS), ("2 layers of 64", WIDER_TOWERS)):
        entries += [
            Entry(f"image tower of {name}", f"{batch:,}", (digits(batch, towers=towers),), "top1") for batch in _BATCHES
        ]
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


_ACCURACY = "zero-shot top-1, %"
TARGETS = (
    Target(
        name="inf-cl-table-3",
        paper=INF_CL,
        title="Table 3: accuracy by strategy and batch size",
        shows="Tiny: digits on 8 simulated devices, 8 epochs. Small: built-in shapes. The strategies agree; a very "
        "large batch with the same learning rate and epochs is worse.",
        entries=table_3,
        unit=_ACCURACY,
        style=".2f",
        devices=8,
        costs=("2 min", "10 min"),
    ),
    Target(
        name="inf-cl-table-4",
        paper=INF_CL,
        title="Table 4: ablation of the tiling",
        shows="Loss memory from XLA's plan at the paper's 64k on 4 devices (CPU), peak from the planner for LiT of "
        "ViT-B/16, accuracy on digits or shapes.",
        entries=table_4,
        unit="GiB, or %",
        devices=8,
        costs=("2 min", "10 min"),
    ),
    Target(
        name="inf-cl-table-s2",
        paper=INF_CL,
        title="Table S2: accuracy by batch and dataset size",
        shows="Tiny: parts of the digits, 8 epochs. Small: 8,192 and all of the shapes, the same samples seen.",
        entries=table_s2,
        unit=_ACCURACY,
        style=".2f",
        axis="batch size",
        costs=("2 min", "15 min"),
    ),
    Target(
        name="inf-cl-table-s3",
        paper=INF_CL,
        title="Table S3: accuracy by batch and model size",
        shows="Tiny: two sizes of the image tower on digits. Small: 3 and 6 layers on the built-in shapes.",
        entries=table_s3,
        unit=_ACCURACY,
        style=".2f",
        axis="batch size",
        costs=("2 min", "15 min"),
    ),
    Target(
        name="inf-cl-figure-5",
        paper=INF_CL,
        title="Figure 5 (S1 in the supplement): accuracy over the batch size",
        shows="The batch scaling curve with three seeds: mean (range). Everything but the batch stays the same, also "
        "learning rate and epochs; the warm-up is at most half the steps. Tiny: digits, 8 epochs. Small: shapes.",
        entries=figure_5,
        unit=_ACCURACY,
        style=".2f",
        axis="batch size",
        costs=("2 min", "15 min"),
    ),
    Target(
        name="inf-cl-figure-s2",
        paper=INF_CL,
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
