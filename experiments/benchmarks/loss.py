r"""Benchmark of the CLIP, sigmoid or distillation loss: time, memory and error against float64.

    python -m experiments.benchmarks.loss --implementations=xla,dense --batch=1024,4096 --features=512,768 \
        --output=runs/benchmark_loss
    python -m experiments.benchmarks.loss --loss=siglip --scale=10 --bias=-10 --implementations=xla --output=runs/siglip
    python -m experiments.benchmarks.loss --loss=distillation --features=512 --teacher_features=768 \
        --implementations=xla --output=runs/distillation
    python -m experiments.benchmarks.loss --implementations=mosaic_gpu --batch=65536 --ids=none,unique,1%,8 \
        --output=runs/benchmark_ids

Prints a table, appends JSON lines to `benchmark_loss.jsonl` and plots `benchmark_loss.png` in the output folder.
docs/performance.md defines the figures. On several hosts, or with one process per GPU, run the same command in every
process, see `infcl_jax.distributed.initialize`.
"""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from matplotlib.figure import Figure

from experiments import command_line
from experiments.benchmarks import harness, timing
from experiments.benchmarks.exact import Gradients, relative_errors
from experiments.benchmarks.loss_case import LOSSES, Case, Settings
from experiments.benchmarks.timing import Gemm, Program
from infcl_jax import clip_loss, distillation_loss, siglip_loss
from infcl_jax.runtime.processes import is_lead

RECORDS_FILE = "benchmark_loss.jsonl"
PICTURE_FILE = "benchmark_loss.png"

_from_flags = command_line.define_flags(Settings)

_COLUMNS = (
    ("implementation", "implementation", "s"),
    ("b", "batch", ",d"),
    ("D", "feature_dim", "d"),
    ("ids", "ids", "s"),
    *harness.PASSES,
    ("memory MiB", "memory_mib", ",.1f"),
    ("loss error", "loss_error", ".1e"),
    ("image error", "image_error", ".1e"),
    ("text error", "text_error", ".1e"),
    ("scale error", "scale_error", ".1e"),
    ("bias error", "bias_error", ".1e"),
    ("status", "status", "s"),
)
_FIGURES = (
    *(key for _, key, _ in harness.PASSES),
    *("forward_memory_mib", "memory_mib"),
    *(f"{name}_error" for name in Gradients._fields),
)


def benchmark_from_flags() -> None:
    """Run the benchmark with the settings of the flags."""
    settings = _from_flags(batch=harness.batch_sizes(), repeats=harness.REPEATS.value)
    command_line.names("implementations", settings.implementations, LOSSES[settings.loss])
    if settings.loss == "distillation" and settings.ids != ("none",):
        raise ValueError(f"expected --ids=none with --loss=distillation, got {','.join(settings.ids)!r}")
    output = harness.output_folder()
    mesh = harness.start_devices(harness.DEVICES.value)
    harness.check_even("batch", settings.batch, mesh)
    measure_all(settings, mesh, output)


def measure_all(settings: Settings, mesh: Mesh, output: Path) -> list[dict[str, Any]]:
    """Measure, print, record and plot all cases.

    Returns:
      The new records, see docs/performance.md. A case that does not fit into memory has the status "out of memory" and
      None for its missing figures.
    """
    about = f"{settings.loss}, {settings.dtype}, scale {settings.scale:g}"
    names = ["loss", "dtype", "scale", "repeats", "samples"]
    if settings.loss == "siglip":
        about += f", bias {settings.bias:g}"
    if settings.loss == "distillation":
        about += f", teacher's scale {settings.teacher_scale:g}"
    names += {"siglip": ["bias"], "distillation": ["teacher_features", "teacher_scale"]}.get(
        settings.loss, ["multi_positive"]
    )
    gemm = harness.start_table(about, _COLUMNS, mesh, settings.repeats, output)
    records = []
    for dim, b, ids in itertools.product(settings.features, settings.batch, settings.ids):
        case = Case.draw(b, dim, settings, mesh, ids)
        exact = case.exact() if settings.samples else None
        for implementation in settings.implementations:
            case_settings = {"implementation": implementation, "batch": b, "feature_dim": dim, "ids": ids}
            case_settings |= {name: getattr(settings, name) for name in names}
            figures = measure(case, implementation, settings.repeats, gemm, exact)
            records.append(harness.report(output / RECORDS_FILE, _COLUMNS, mesh, gemm, case_settings, figures))
    if is_lead():
        plot(records, output / PICTURE_FILE)
    return records


def measure(case: Case, implementation: str, repeats: int, gemm: Gemm, exact: Any) -> dict[str, Any]:
    """Measure time, throughput, memory and error of one implementation."""
    return harness.collect(_FIGURES, _measure(case, implementation, repeats, gemm, exact))


def _measure(case: Case, implementation: str, repeats: int, gemm: Gemm, exact: Any) -> Iterator[dict[str, float]]:
    """Yield figures one at a time, to record those before an out-of-memory error."""
    mesh = case.mesh if case.mesh.size > 1 else None
    options = {"mesh": mesh, "implementation": implementation, **case.options}
    operands, num_operands = case.operands, len(case.operands)
    if case.ids is not None:
        operands = (*operands, jnp.stack([0x9E3779B * case.ids, case.ids], axis=1))  # as wide as a 64-bit hash

    if case.teacher is not None:
        operands = (*operands, *case.teacher)

    def loss(*operands: jax.Array) -> jax.Array:
        if case.teacher is not None:
            return distillation_loss(*operands, **options)
        *features, ids = operands if case.ids is not None else (*operands, None)
        function = siglip_loss if case.loss == "siglip" else clip_loss
        return function(*features, image_ids=ids, text_ids=ids, **options)

    forward = Program(loss, *operands)
    yield {"forward_memory_mib": forward.memory_bytes / 2**20}
    with_gradients = Program(jax.value_and_grad(loss, argnums=tuple(range(num_operands))), *operands)
    yield {"memory_mib": with_gradients.memory_bytes / 2**20}
    forward_seconds = forward.seconds(repeats)
    rate = timing.tflops(case.forward_flops, forward_seconds, case.mesh.size)
    yield {"forward_ms": 1e3 * forward_seconds, "forward_tflops": rate}
    if exact is not None:
        errors = relative_errors(case.mesh, with_gradients(), exact, case.rows)
        yield {f"{name}_error": error for name, error in errors.items()}
    seconds = with_gradients.seconds(repeats)
    rate = timing.tflops(case.total_flops, seconds, case.mesh.size)
    yield {"total_ms": 1e3 * seconds, "backward_ms": 1e3 * (seconds - forward_seconds)}
    yield {"tflops": rate, "gemm_fraction": rate / gemm.tflops}


def plot(records: Sequence[dict[str, Any]], path: Path) -> None:
    """Plot time and memory over the batch size.

    Colors are implementations and kinds of ids, line styles are feature dimensions.
    """
    figure = Figure(figsize=(12, 4.5), dpi=100, layout="constrained")
    figure.suptitle("{loss}, {device}, {devices} device(s), {dtype}, scale {scale:g}".format_map(records[0]))
    names = list(dict.fromkeys((r["implementation"], r["ids"]) for r in records))
    dims = list(dict.fromkeys(r["feature_dim"] for r in records))
    panels = {"total_ms": "forward and backward, ms", "memory_mib": "memory beyond inputs and gradients, MiB"}
    for axes, (key, label) in zip(figure.subplots(1, 2), panels.items(), strict=True):
        for (i, (name, ids)), (j, dim) in itertools.product(enumerate(names), enumerate(dims)):
            line = [
                r for r in records if (r["implementation"], r["ids"], r["feature_dim"]) == (name, ids, dim) and r[key]
            ]
            line.sort(key=lambda r: r["batch"])
            axes.plot(
                [r["batch"] for r in line],
                [r[key] for r in line],
                color=f"C{i}",
                linestyle=("-", "--", "-.", ":")[j % 4],
                marker="o",
                markersize=3,
                label=f"{name}, D = {dim}" + ("" if ids == "none" else f", ids {ids}"),
            )
        axes.set_yscale("log" if any(r[key] for r in records) else "linear")
        harness.label_axes(axes, records, label)
    axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(path)


if __name__ == "__main__":
    command_line.run(benchmark_from_flags)
