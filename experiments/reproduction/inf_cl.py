"""Targets of Inf-CL: memory, largest batches and speed. `inf_cl_accuracy` has the others."""

import functools
from typing import Any

from experiments.reproduction.recipes import TINY_TOWERS
from experiments.reproduction.target import NOT_LEGIBLE, Cell, Entry, Paper, Target, cell

INF_CL = Paper(
    "Inf-CL",
    'Cheng et al., "Breaking the Memory Barrier: Near Infinite Batch Size Scaling for Contrastive Loss" (2024)',
    "8 or 32 A800 GPUs of 80 GB (Table 4: 4, Table S1 also: 1)",
)

K = 1024
_OOM = "out of memory"
_CHUNK = 128  # "accumulation batch size" of a GPU
NAMES = {"dense": "CLIP (`dense`)", "local": "OpenCLIP (`local`)", "xla": "Inf-CL (`xla`)"}

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
_PEAKS: dict[tuple[int, str], dict[int, float | str]] = {
    (8, "none"): {32: 44.20, 64: 46.63, 128: 51.46, 256: 61.13},
    (8, "host"): {32: 42.40, 64: 42.49, 128: 42.69, 256: 43.07, 1024: 45.40},
    (32, "none"): {32: 42.48, 64: 43.08, 128: 44.30, 256: 46.71, 1024: 61.20},
}


def planned_step(model: str, devices: int, batch: int, offload: str = "none") -> dict[str, Any]:
    """Return the settings of a step with gradient caching, for the planner."""
    return {
        "model": model,
        "model_overrides": "dtype=bfloat16",
        "batch_size": batch,
        "grad_cache.chunk_size": _CHUNK * devices,
        "grad_cache.offload": offload,
    }


def table_1(scale: str) -> list[Entry]:
    """Memory of the loss by strategy and batch size, and the peak of the step."""
    entries = []
    if scale == "small":
        for implementation in ("dense", "xla", None):
            for thousands in (8, 16, 32, 64, 128):
                row = "the best here" if implementation is None else NAMES[implementation]
                dim = {"batch": thousands * K, "dim": 768, "devices": 1, "dtype": "bfloat16"}
                one = cell("loss_time", implementation=implementation, **dim)
                entries.append(Entry(f"{row}, 1 GPU", f"{thousands}k", (one,), "gib"))
        return entries
    for devices, rows in _TABLE_1.items():
        for implementation, figures in rows.items():
            for thousands, paper in figures.items():
                shape = {"batch": thousands * K, "dim": 768, "devices": devices}
                one = cell("loss_memory", implementation=implementation, **shape)
                row = f"{NAMES[implementation]}, {devices} devices"
                entries.append(Entry(row, f"{thousands}k", (one,), "gib", paper))
    for (devices, offload), figures in _PEAKS.items():
        for thousands, paper in figures.items():
            changes = planned_step("ViT-L/14", devices, thousands * K, offload)
            one = cell("planned_memory", changes=changes, devices=devices, device="A100-80", implementation="triton")
            title = ", data offload" if offload == "host" else ""
            entries.append(Entry(f"Inf-CL, peak{title}, {devices} GPUs", f"{thousands}k", (one,), "peak_gib", paper))
    return entries


# Largest batch in thousands: CLIP, OpenCLIP, Inf-CL.
_TABLE_2 = {
    ("ViT-B/16", 8, "none"): (68, 172, 800),
    ("ViT-B/16", 32, "none"): (68, 360, 3456),
    ("ViT-L/14", 8, "none"): (64, 152, 448),
    ("ViT-L/14", 32, "none"): (64, 352, 2048),
    ("ViT-L/14", 8, "host"): (64, 184, 4096),
    ("ViT-L/14", 32, "host"): (64, 368, 12288),
}


def table_2(scale: str) -> list[Entry]:
    """Largest batch by model, GPUs and strategy, from the planner; on one GPU, also by running steps."""
    entries = []
    for (model, devices, offload), figures in _TABLE_2.items():
        for implementation, paper in zip(("dense", "local", "triton"), figures, strict=True):
            changes = planned_step(model, devices, _CHUNK * devices, offload)
            gpu = {"devices": devices, "device": "A100-80", "implementation": implementation}
            one = cell("planned_batch", changes=changes, **gpu)
            row = f"{model}, {devices} GPUs{', data offload' if offload == 'host' else ''}"
            column = {"dense": "CLIP", "local": "OpenCLIP", "triton": "Inf-CL"}[implementation]
            entries.append(Entry(row, f"{column}, thousands", (one,), "batch_k", paper))
    values = {"planned": "planned_k", "largest that ran": "batch_k", "smallest that did not": "refused_k"}
    for implementation, column in (("dense", "CLIP"), (None, "Inf-CL")) if scale == "small" else ():
        step = {"model": "ViT-B/32", "model_overrides": "dtype=bfloat16", "chunk_size": 512, "devices": 1}
        one = cell("measured_batch", implementation=implementation, **step)
        for row, value in values.items():
            entries.append(Entry(f"ViT-B/32, 1 GPU, {row}", f"{column}, thousands", (one,), value))
    return entries


def _scaled(scale: str, thousands: int) -> int:
    """Return the batch size of a scale for one of the paper, in thousands."""
    return {"tiny": 8 * thousands, "small": 128 * thousands, "paper": K * thousands}[scale]


def _step(scale: str, model: str, implementation: str, batch: int, devices: int, chunk: int = K) -> Cell:
    """Return the time of a step in chunks of `chunk` pairs for each device; tiny towers at the scale "tiny"."""
    if scale == "tiny":
        setting: dict[str, Any] = {"model": "tiny", "model_overrides": TINY_TOWERS, "cache": {"chunk_size": 128}}
    else:
        setting = {"model": model, "model_overrides": "dtype=bfloat16", "cache": {"chunk_size": chunk * devices}}
    return cell("step_time", batch=batch, devices=devices, implementation=_best(scale, implementation), **setting)


def _best(scale: str, implementation: str) -> str | None:
    """Return the implementation of a strategy: on GPUs the best one of Inf-CL, which is None."""
    return None if implementation == "xla" and scale != "tiny" else implementation


def _step_name(scale: str, implementation: str) -> str:
    """Name a strategy of `_step`."""
    return "Inf-CL (the best here)" if _best(scale, implementation) is None else NAMES[implementation]


def _milliseconds(figure: float | str) -> float | str:
    """Convert a figure of the paper in seconds; a remark in its place stays."""
    return figure if isinstance(figure, str) else 1e3 * figure


def figure_4(scale: str) -> list[Entry]:
    """Time of a step by strategy and batch size."""
    entries = []
    # The text gives 49.4 and 220.3 s for Inf-CL's steps at 64k and 256k.
    figures: dict[tuple[str, int], float] = {("xla", 64): 49.4, ("xla", 256): 220.3}
    for implementation in NAMES:
        if scale == "small" and implementation == "local":
            continue  # on one GPU it is `dense`
        for thousands in (32, 64, 128, 256):
            paper = figures.get((implementation, thousands), NOT_LEGIBLE)
            batch = _scaled(scale, thousands)
            if scale == "paper":
                one = _step(scale, "ViT-L/14", implementation, batch, devices=8, chunk=_CHUNK)
            else:  # cells of Table S1 at "small"
                one = _step(scale, "ViT-B/32", implementation, batch, devices=8 if scale == "tiny" else 1)
            column = f"{batch:,} (paper: {thousands}k)"
            name = _step_name(scale, implementation)
            entries.append(Entry(name, column, (one,), "step_ms", _milliseconds(paper)))
    return entries


# Seconds of a step of ViT-B/32: GPUs, then vanilla and Inf-CL by batch size in thousands.
_TABLE_S1: dict[int, dict[int, tuple[float | str, float | str]]] = {
    1: {32: (28.73, 28.17), 64: (_OOM, 58.50), 128: (_OOM, 156.72), 256: (_OOM, 332.13)},
    8: {32: (6.53, 5.01), 64: (15.85, 10.56), 128: (_OOM, 20.71), 256: (_OOM, 45.98)},
    32: {32: (3.10, 1.49), 64: (8.38, 2.76), 128: (_OOM, 5.27), 256: (_OOM, 11.27)},
}


def table_s1(scale: str) -> list[Entry]:
    """Time of a step of ViT-B/32 by GPUs, strategy and batch size."""
    entries = []
    for devices, rows in _TABLE_S1.items():
        for thousands, figures in rows.items():
            batch = _scaled(scale, thousands)
            for implementation, paper in zip(("dense", "xla"), figures, strict=True):
                one = _step(scale, "ViT-B/32", implementation, batch, devices)
                available = {"tiny": devices <= 8, "small": devices == 1, "paper": True}[scale]
                row = f"{_step_name(scale, implementation)}, {devices} device(s)"
                column = f"{batch:,} (paper: {thousands}k)"
                cells = (one,) if available else ()
                entries.append(Entry(row, column, cells, "step_ms", _milliseconds(paper)))
    return entries


_target = functools.partial(Target, paper=INF_CL)
TARGETS = (
    _target(
        name="inf-cl-table-1",
        title="Table 1: memory of the loss and of the step",
        shows="Tiny: XLA's plan of the loss in float32, D = 768, at the paper's batch sizes and numbers of devices, "
        "compiled for simulated CPU devices and not executed (XLA keeps more on the CPU than on a GPU); the peak of "
        "ViT-L/14's step from the planner, for an A100 of 80 GB. Small: XLA's plan on one GPU, bf16.",
        entries=table_1,
        comparable=True,
        unit="GiB per device",
        axis="global batch size",
        log=True,
        devices=32,
        costs=("2 min", "5 min"),
    ),
    _target(
        name="inf-cl-table-2",
        title="Table 2: largest batch",
        shows="At every scale the planner's largest batch for A100 GPUs of 80 GB, chunks of 128 pairs per GPU, AdamW. "
        "With data offload, host memory is not counted. Small: also ViT-B/32 in chunks of 512 on one GPU, found "
        "by running steps.",
        entries=table_2,
        comparable=True,
        unit="largest batch, thousands",
        style=",.0f",
        log=True,
        costs=("1 min", "5 min"),
    ),
    _target(
        name="inf-cl-table-s1",
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
    _target(
        name="inf-cl-figure-4",
        title="Figure 4: step time over the batch size",
        shows="Tiny: tiny towers on 8 simulated devices. Small: ViT-B/32 on one GPU at 1/8 of the paper's batch. The "
        "time is linear in the batch; the loss is a small part of it. Milliseconds.",
        entries=figure_4,
        unit="ms per step",
        style=",.0f",
        axis="global batch size",
        log=True,
        devices=8,
        costs=("3 min", "5 min"),
    ),
)
