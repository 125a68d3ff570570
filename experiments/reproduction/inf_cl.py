"""Targets of Inf-CL: memory, largest batches, speed, accuracy and the ablation of the tiling."""

from experiments.reproduction.recipes import (
    DIGITS,
    SEEDS,
    TINY_TOWERS,
    WIDER_TOWERS,
    digits,
    inf_cl_run,
    shapes,
)
from experiments.reproduction.target import NOT_LEGIBLE, Cell, Entry, Paper, Target, cell

INF_CL = Paper(
    "Inf-CL",
    'Cheng et al., "Breaking the Memory Barrier: Near Infinite Batch Size Scaling for Contrastive Loss" (2024)',
    "8 or 32 A800 GPUs of 80 GB (Table 4: 4, Table S1 also: 1)",
)

_K = 1024
_OOM = "out of memory"
_CHUNK = 128  # "accumulation batch size" of a GPU
_NAMES = {"dense": "CLIP (`dense`)", "local": "OpenCLIP (`local`)", "xla": "Inf-CL (`xla`)"}
_SAMPLES = {"cc3m": 2_700_000, "cc12m": 9_100_000, "laion400m": 280_000_000}

# Loss memory of a GPU in GB by GPUs, implementation and batch size in thousands; the text has no entry where the
# baseline ran out of memory.
_TABLE_1: dict[int, dict[str, dict[int, float | str]]] = {
    8: {
        "dense": {32: 16.67, 64: 66.11, 128: _OOM, 256: _OOM, 1024: _OOM},
        "local": {32: 2.27, 64: 8.63, 128: 33.64, 256: _OOM, 1024: _OOM},
        "xla": {32: 0.18, 64: 0.36, 128: 0.72, 256: 1.45, 1024: 6.53},
    },
    32: {
        "dense": {32: 16.66, 64: 66.11, 128: _OOM, 256: _OOM, 1024: _OOM},
        "local": {32: 0.71, 64: 2.45, 128: 8.98, 256: 34.35, 1024: _OOM},
        "xla": {32: 0.05, 64: 0.09, 128: 0.18, 256: 0.35, 1024: 1.44},
    },
}
# Peak memory of Inf-CL in GB on 8 and 32 GPUs.
_PEAKS = {
    (8, "device"): {32: 44.20, 64: 46.63, 128: 51.46, 256: 61.13},
    (8, "host"): {32: 42.40, 64: 42.49, 128: 42.69, 256: 43.07, 1024: 45.40},
    (32, "device"): {32: 42.48, 64: 43.08, 128: 44.30, 256: 46.71, 1024: 61.20},
}


def _step(model: str, devices: int, batch: int, residency: str = "device") -> dict:
    return {
        "model": model,
        "model_overrides": "dtype=bfloat16",
        "batch_size": batch,
        "grad_cache.chunk_size": _CHUNK * devices,
        "grad_cache.residency": residency,
    }


def table_1(scale: str) -> list[Entry]:
    """Memory of the loss by strategy and batch size, and the peak of the step."""
    entries = []
    if scale == "small":
        for implementation in ("dense", "xla", None):
            for thousands in (8, 16, 32, 64, 128):
                row = "the best here" if implementation is None else _NAMES[implementation]
                dim = {"batch": thousands * _K, "dim": 768, "devices": 1, "dtype": "bfloat16"}
                one = cell("loss_time", implementation=implementation, **dim)
                entries.append(Entry(f"{row}, 1 GPU", f"{thousands}k", (one,), "gib"))
        return entries
    for devices, rows in _TABLE_1.items():
        for implementation, figures in rows.items():
            for thousands, paper in figures.items():
                shape = {"batch": thousands * _K, "dim": 768, "devices": devices}
                one = cell("loss_memory", implementation=implementation, **shape)
                row = f"{_NAMES[implementation]}, {devices} devices"
                entries.append(Entry(row, f"{thousands}k", (one,), "gib", paper))
    for (devices, residency), figures in _PEAKS.items():
        for thousands, paper in figures.items():
            changes = _step("ViT-L/14", devices, thousands * _K, residency)
            one = cell("planned_memory", changes=changes, devices=devices, device="A100-80", implementation="triton")
            offload = ", data offload" if residency == "host" else ""
            entries.append(Entry(f"Inf-CL, peak{offload}, {devices} GPUs", f"{thousands}k", (one,), "peak_gib", paper))
    return entries


# Largest batch in thousands: CLIP, OpenCLIP, Inf-CL.
_TABLE_2 = {
    ("ViT-B/16", 8, "device"): (68, 172, 800),
    ("ViT-B/16", 32, "device"): (68, 360, 3456),
    ("ViT-L/14", 8, "device"): (64, 152, 448),
    ("ViT-L/14", 32, "device"): (64, 352, 2048),
    ("ViT-L/14", 8, "host"): (64, 184, 4096),
    ("ViT-L/14", 32, "host"): (64, 368, 12288),
}


def table_2(scale: str) -> list[Entry]:
    """Largest batch by model, GPUs and strategy, from the planner."""
    entries = []
    for (model, devices, residency), figures in _TABLE_2.items():
        for implementation, paper in zip(("dense", "local", "triton"), figures, strict=True):
            changes = _step(model, devices, _CHUNK * devices, residency)
            gpu = {"devices": devices, "device": "A100-80", "implementation": implementation}
            one = cell("planned_batch", changes=changes, **gpu)
            row = f"{model}, {devices} GPUs{', data offload' if residency == 'host' else ''}"
            column = {"dense": "CLIP", "local": "OpenCLIP", "triton": "Inf-CL"}[implementation]
            entries.append(Entry(row, f"{column}, thousands", (one,), "batch_k", paper))
    return entries


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
    """Return the run of a method at a batch size: in thousands for the paper, of as many digits or shapes here."""
    if scale == "tiny":
        return digits(thousands, devices=8, implementation=implementation)
    best = None if implementation == "xla" else implementation
    if scale == "small":
        return shapes(16 * thousands, implementation=best)
    lit = {"frozen": ("image",), "init__image": "data/vit_b_16"}
    return inf_cl_run("ViT-B/16", "laion400m", _SAMPLES["laion400m"], thousands * _K, implementation=best, **lit)


def table_3(scale: str) -> list[Entry]:
    """Accuracy by strategy and batch size."""
    entries = []
    for implementation, thousands, figures in _TABLE_3:
        one = accuracy_run(scale, implementation, thousands)
        row = f"{_NAMES[implementation]}, batch {_here(scale, thousands)} (paper: {thousands}k)"
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
    """Ablation of the tiling: memory and accuracy at a batch of 64k on 4 GPUs."""
    entries = []
    for implementation, (memory, peak, accuracy) in _TABLE_4.items():
        row = f"{_TILING[implementation]} (`{implementation}`)"
        shape = {"batch": 64 * _K if scale != "small" else 16 * _K, "dim": 512, "devices": 4 if scale != "small" else 1}
        one = cell("loss_memory", implementation=implementation, **shape)
        entries.append(Entry(row, "loss memory, GiB", (one,), "gib", memory))
        step = _step("ViT-B/16", 4, 64 * _K) | {"frozen": ("image",), "grad_cache.chunk_size": 1024}
        gpu = {"devices": 4, "device": "A100-80", "implementation": implementation}
        planned = cell("planned_memory", changes=step, **gpu)
        entries.append(Entry(row, "peak (planner), GiB", (planned,), "peak_gib", peak))
        run = accuracy_run(scale, implementation, 64)
        entries.append(Entry(row, "zero-shot top-1, %", (run,), "top1", accuracy))
    return entries


def figure_4(scale: str) -> list[Entry]:
    """Time of a step by strategy and batch size."""
    entries = []
    # The text gives 49.4 and 220.3 s for Inf-CL's steps at 64k and 256k.
    figures: dict[tuple[str, int], float] = {("xla", 64): 49.4, ("xla", 256): 220.3}
    for implementation, name in _NAMES.items():
        for thousands in (32, 64, 128, 256):
            paper = figures.get((implementation, thousands), NOT_LEGIBLE)
            if scale == "tiny":
                batch = 8 * thousands
                setting = {"model": "tiny", "model_overrides": TINY_TOWERS, "devices": 8}
                chunk = {"chunk_size": 128}
            else:
                batch = thousands * _K // (32 if scale == "small" else 1)
                setting = {"model": "ViT-L/14", "model_overrides": "dtype=bfloat16", "devices": 1}
                chunk = {"chunk_size": 128}
            best = None if implementation == "xla" and scale != "tiny" else implementation
            one = cell("step_time", batch=batch, implementation=best, cache=chunk, **setting)
            column = f"{batch:,} (paper: {thousands}k)"
            entries.append(Entry(name, column, (one,), "step_ms", paper if isinstance(paper, str) else 1e3 * paper))
    return entries


# Seconds of a step of ViT-B/32: GPUs, then vanilla and Inf-CL by batch size in thousands.
_TABLE_S1 = {
    1: {32: (28.73, 28.17), 64: (_OOM, 58.50), 128: (_OOM, 156.72), 256: (_OOM, 332.13)},
    8: {32: (6.53, 5.01), 64: (15.85, 10.56), 128: (_OOM, 20.71), 256: (_OOM, 45.98)},
    32: {32: (3.10, 1.49), 64: (8.38, 2.76), 128: (_OOM, 5.27), 256: (_OOM, 11.27)},
}


def table_s1(scale: str) -> list[Entry]:
    """Time of a step of ViT-B/32 by GPUs, strategy and batch size."""
    entries = []
    for devices, rows in _TABLE_S1.items():
        for thousands, figures in rows.items():
            batch = {"tiny": 8 * thousands, "small": 128 * thousands, "paper": thousands * _K}[scale]
            tiny = {"model": "tiny", "model_overrides": TINY_TOWERS, "cache": {"chunk_size": 128}}
            real = {"model": "ViT-B/32", "model_overrides": "dtype=bfloat16", "cache": {"chunk_size": 1024 * devices}}
            for implementation, paper in zip(("dense", "xla"), figures, strict=True):
                best = None if implementation == "xla" and scale != "tiny" else implementation
                setting = {"batch": batch, "devices": devices, "implementation": best}
                one = cell("step_time", **setting, **(tiny if scale == "tiny" else real))
                available = {"tiny": devices <= 8, "small": devices == 1, "paper": True}[scale]
                figure = paper if isinstance(paper, str) else 1e3 * paper
                row = f"{_NAMES[implementation]}, {devices} device(s)"
                entries.append(
                    Entry(row, f"{batch:,} (paper: {thousands}k)", (one,) if available else (), "step_ms", figure)
                )
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
                (inf_cl_run("ViT-B/32", dataset, _SAMPLES[dataset], thousands * _K, frozen=("image",)),),
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
                (inf_cl_run(model, "cc3m", _SAMPLES["cc3m"], thousands * _K, frozen=("image",)),),
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
        for implementation, name in _NAMES.items()
    ]


_ACCURACY = "zero-shot top-1, %"
TARGETS = (
    Target(
        name="inf-cl-table-1",
        paper=INF_CL,
        title="Table 1: memory of the loss and of the step",
        shows="Tiny: XLA's plan of the loss in float32, D = 768, at the paper's batch sizes and numbers of devices, "
        "compiled for simulated CPU devices and not executed (XLA keeps more on the CPU than on a GPU); the peak of "
        "ViT-L/14's step from the planner, for an A100 of 80 GB. Small: XLA's plan on one GPU, bf16.",
        entries=table_1,
        unit="GiB per device",
        axis="global batch size",
        log=True,
        devices=32,
        costs=("2 min", "5 min"),
    ),
    Target(
        name="inf-cl-table-2",
        paper=INF_CL,
        title="Table 2: largest batch",
        shows="At every scale the planner's largest batch for A100 GPUs of 80 GB, chunks of 128 pairs per GPU, AdamW.",
        entries=table_2,
        unit="largest batch, thousands",
        style=",.0f",
        log=True,
        costs=("1 min", "1 min"),
    ),
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
        name="inf-cl-table-s1",
        paper=INF_CL,
        title="Table S1: step time of ViT-B/32",
        shows="Tiny: tiny towers; simulated devices share the cores, so more of them are not faster. Small: ViT-B/32 "
        "on one GPU at 1/8 of the paper's batch. Milliseconds.",
        entries=table_s1,
        unit="ms per step",
        style=",.0f",
        axis="global batch size",
        log=True,
        devices=8,
        costs=("3 min", "5 min"),
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
        name="inf-cl-figure-4",
        paper=INF_CL,
        title="Figure 4: step time over the batch size",
        shows="Tiny: tiny towers on 8 simulated devices. Small: ViT-L/14 on one GPU at 1/32 of the paper's batch. The "
        "time is linear in the batch; the loss is a small part of it. Milliseconds.",
        entries=figure_4,
        unit="ms per step",
        style=",.0f",
        axis="global batch size",
        log=True,
        devices=8,
        costs=("3 min", "10 min"),
    ),
    Target(
        name="inf-cl-figure-5",
        paper=INF_CL,
        title="Figure 5 (S1 in the supplement): accuracy over the batch size",
        shows="The batch scaling curve with three seeds: mean (range). Everything but the batch stays the same, also "
        "learning rate and epochs. Tiny: digits, 8 epochs. Small: built-in shapes.",
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
