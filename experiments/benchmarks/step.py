r"""Benchmark of the training step: time of its phases, memory and throughput.

    python -m experiments.benchmarks.step --model=ViT-B/32 --precision=bf16 --batch=1024,4096 \
        --output=runs/benchmark_step [--chunk_size=1024 --offload=host] [--loss=fastclip_v3] \
        [--data='shards-{00000..00041}.tar']

Prints a table, appends JSON lines to `benchmark_step.jsonl` and plots `benchmark_step.png` in the output folder.
docs/performance.md defines the figures. On several hosts, or with one process per GPU, run the same command in every
process, see `infcl_jax.distributed.initialize`.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags
from jax.sharding import Mesh
from matplotlib.figure import Figure

from experiments import command_line
from experiments.benchmarks import harness, photographs
from experiments.benchmarks.step_case import FIGURES, Case, Settings
from infcl_jax.data.decode import gpu_decoder_installed
from infcl_jax.runtime.processes import is_lead
from infcl_jax.settings import resolved_precision
from infcl_jax.training import GradCacheConfig

RECORDS_FILE = "benchmark_step.jsonl"
PICTURE_FILE = "benchmark_step.png"

_PRECISION = command_line.shared_flag("precision")
_from_flags = command_line.define_flags(Settings)


def _define_cache_flag(field: dataclasses.Field) -> flags.FlagHolder:
    """Define the flag of a field of `GradCacheConfig`."""
    default: Any = field.default
    define: Any = {bool: flags.DEFINE_bool, str: flags.DEFINE_string}.get(type(default), flags.DEFINE_integer)
    return define(field.name, default, f"grad_cache.{field.name} of configs/base.py.")


_CACHE = {field.name: _define_cache_flag(field) for field in dataclasses.fields(GradCacheConfig)}

_COLUMNS = (
    ("b", "batch", ",d"),
    ("step ms", "step_ms", ",.2f"),
    ("images/s", "images_per_second", ",.1f"),
    ("images/s/device", "images_per_second_per_device", ",.1f"),
    ("TFLOP/s", "tflops", ".3g"),
    ("% of GEMM", "gemm_fraction", ".1%"),
    ("encode ms", "encode_ms", ",.2f"),
    ("loss ms", "loss_ms", ",.2f"),
    ("backward ms", "backward_ms", ",.2f"),
    ("update ms", "update_ms", ",.2f"),
    ("data ms", "data_ms", ",.2f"),
    ("memory MiB", "memory_mib", ",.1f"),
    ("peak MiB", "peak_memory_mib", ",.1f"),
    ("status", "status", "s"),
)

# Columns with --data.
_FILE_COLUMNS = (
    ("files images/s", "files_images_per_second", ",.1f"),
    ("of synthetic", "files_fraction", ".1%"),
    ("wait for data", "files_wait", ".1%"),
    ("limited by", "files_stage", "s"),
    ("reading", "files_readers", "s"),
)


def benchmark_from_flags() -> None:
    """Run the benchmark with the settings of the flags."""
    settings = _from_flags(
        batch=harness.batch_sizes(),
        cache=GradCacheConfig(**{name: flag.value for name, flag in _CACHE.items()}),
        data=photographs.DATA.value,
        repeats=harness.REPEATS.value,
        precision=_PRECISION.value,
    )
    output = harness.output_folder()
    mesh = harness.start_devices(
        harness.DEVICES.value, gpu_decode=settings.data is not None and gpu_decoder_installed()
    )
    settings = dataclasses.replace(settings, precision=resolved_precision(settings.precision, settings.model_overrides))
    harness.check_even("batch", settings.batch, mesh)
    for b in settings.batch:
        settings.cache.check_batch(b, mesh.size)
    measure_all(settings, mesh, output)


def measure_all(settings: Settings, mesh: Mesh, output: Path) -> list[dict[str, Any]]:
    """Measure, print, record and plot all batch sizes.

    Returns:
      The new records, see docs/performance.md. A case that does not fit into memory has the status "out of memory" and
      None for its missing figures.
    """
    flops = settings.flops
    cases = [Case.create(settings, mesh, b) for b in settings.batch]  # validates all settings before anything is timed
    about = f"{_title(settings)}, {flops / 1e9:.3g} GFLOP a pair"
    columns = _COLUMNS if settings.data is None else _COLUMNS + _FILE_COLUMNS
    gemm = harness.start_table(about, columns, mesh, settings.repeats, output)
    records = []
    for case in cases:
        case_settings = {"batch": case.b, "flops_per_pair": flops}
        case_settings |= {
            name: value for name, value in dataclasses.asdict(settings).items() if name not in ("batch", "cache")
        }
        case_settings |= dataclasses.asdict(settings.cache) | {"matryoshka": list(settings.matryoshka)}
        figures = harness.collect(FIGURES, case.figures(gemm))
        records.append(harness.report(output / RECORDS_FILE, columns, mesh, gemm, case_settings, figures))
    if is_lead():
        plot(records, f"{records[0]['device']}, {mesh.size} device(s), {_title(settings)}", output / PICTURE_FILE)
    return records


def _title(settings: Settings) -> str:
    changes = {
        "ids": settings.ids,
        "caption_lengths": settings.caption_lengths,
        "text_packing": settings.text_packing,
        "matryoshka": settings.matryoshka,
        "teacher's features": settings.teacher_features,
    }
    changed = [f"{name} {value}" for name, value in changes.items() if value not in ("none", "full", (), None)]
    parts = (settings.model, settings.model_overrides, settings.precision, settings.loss, *changed, str(settings.cache))
    return ", ".join(filter(None, parts))


def plot(records: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    """Plot images per second and memory over the batch size."""
    figure = Figure(figsize=(12, 4.5), dpi=100, layout="constrained")
    figure.suptitle(title)
    panels = {
        "images/s": {"images_per_second": "all devices"},
        "memory of a device, MiB": {"memory_mib": "planned", "peak_memory_mib": "peak in use"},
    }
    for axes, (label, lines) in zip(figure.subplots(1, 2), panels.items(), strict=True):
        for key, name in lines.items():
            line = sorted((r["batch"], r[key]) for r in records if r[key])
            axes.plot([b for b, _ in line], [value for _, value in line], marker="o", markersize=3, label=name)
        harness.label_axes(axes, records, label)
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=8, frameon=False)
    figure.savefig(path)


if __name__ == "__main__":
    command_line.run(benchmark_from_flags)
