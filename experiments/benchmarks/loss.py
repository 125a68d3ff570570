r"""Times the CLIP loss, forward and backward, with its memory and its error against float64.

    python -m experiments.benchmarks.loss --implementations=xla,dense --batch=1024,4096 --features=512,768 \
        --output=runs/benchmark_loss

Prints a table, adds JSON lines to `benchmark_loss.jsonl` and draws `benchmark_loss.png` in the output folder;
docs/benchmarks.md says what the figures mean. On several hosts, or with one process for each GPU: the same command in
every process, see `infcl_jax.distributed.initialize`.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from matplotlib.figure import Figure

from experiments.benchmarks import harness
from experiments.benchmarks.exact_loss import Gradients, exact_gradients, relative_errors
from experiments.benchmarks.harness import Product, Program
from infcl_jax import clip_loss
from infcl_jax.distributed import DATA_AXIS, is_lead, replicate
from infcl_jax.ops.pairwise_lse import IMPLEMENTATIONS

RECORDS_FILE = "benchmark_loss.jsonl"
PICTURE_FILE = "benchmark_loss.png"

_IMPLEMENTATIONS = flags.DEFINE_list("implementations", "xla,dense", f"Some of {', '.join(IMPLEMENTATIONS)}.")
_FEATURES = flags.DEFINE_list("features", "512", "Widths D of the features.")
_DTYPE = flags.DEFINE_enum("dtype", "bfloat16", ["bfloat16", "float16", "float32"], "Of the features.")
_SCALE = flags.DEFINE_float("scale", 50.0, "Logit scale.", lower_bound=1e-3)
_SAMPLES = flags.DEFINE_integer(
    "samples", 16, "Rows of either gradient compared with float64; 0: no comparison.", lower_bound=0
)


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to measure: every implementation at every width and batch size.

    Attributes:
      implementations: names of `infcl_jax.ops.pairwise_lse.IMPLEMENTATIONS`.
      batch: global batch sizes b, multiples of the device count.
      features: widths D.
      dtype: of the features.
      scale: logit scale.
      repeats: timed runs of each program, of which the median counts.
      samples: rows of either gradient compared with float64; 0 for no comparison at all.
    """

    implementations: tuple[str, ...]
    batch: tuple[int, ...]
    features: tuple[int, ...]
    dtype: str = "bfloat16"
    scale: float = 50.0
    repeats: int = 5
    samples: int = 16


def benchmark_from_flags() -> None:
    """Measures what the flags ask for.

    Raises:
      ValueError: a flag is wrong or missing, or does not suit the devices.
    """
    settings = Settings(
        implementations=harness.names("implementations", _IMPLEMENTATIONS.value, IMPLEMENTATIONS),
        batch=harness.batch_sizes(),
        features=harness.integers("features", _FEATURES.value),
        dtype=_DTYPE.value,
        scale=_SCALE.value,
        repeats=harness.REPEATS.value,
        samples=_SAMPLES.value,
    )
    output = harness.output_folder()
    mesh = harness.start_devices(harness.DEVICES.value)
    harness.check_even("batch", settings.batch, mesh)
    measure_all(settings, mesh, output)


def measure_all(settings: Settings, mesh: Mesh, output: Path) -> list[dict[str, Any]]:
    """Measures one case after the other, prints and records each, and draws them all.

    Args:
      settings: what to measure.
      mesh: the devices; a single one runs the loss without a mesh.
      output: folder of the JSON lines, which are added to, and of the picture, which is replaced.

    Returns:
      The new records, see docs/benchmarks.md. What does not fit into memory has the status "out of memory" and None
      for the figures that could not be had.
    """
    about = f"{settings.dtype}, scale {settings.scale:g}"
    product = harness.start_table(about, _COLUMNS, mesh, settings.repeats, output)
    records = []
    for dim, b in itertools.product(settings.features, settings.batch):
        case = Case.draw(b, dim, settings, mesh)
        exact = exact_gradients(mesh, *case.operands, case.rows) if settings.samples else None
        for implementation in settings.implementations:
            about_case = {"implementation": implementation, "batch": b, "feature_dim": dim}
            about_case |= {name: getattr(settings, name) for name in ("dtype", "scale", "repeats", "samples")}
            found = measure(case, implementation, settings.repeats, product, exact)
            records.append(harness.report(output / RECORDS_FILE, _COLUMNS, mesh, product, about_case, found))
    if is_lead():
        draw(records, output / PICTURE_FILE)
    return records


def forward_flops(b: int, dim: int) -> int:
    """Operations that count for the loss alone: one product of all pairs, `2 b^2 D`."""
    return 2 * b * b * dim


def total_flops(b: int, dim: int) -> int:
    """Operations that count for the loss and its gradients, whatever an implementation spends: `8 b^2 D`."""
    return 4 * forward_flops(b, dim)


class Case(NamedTuple):
    """One batch on its devices.

    Attributes:
      mesh: the devices.
      operands: of the loss: image and text features `[b, D]`, sharded over the mesh, and the fp32 logit scale.
      rows: int32 `[samples]`, whose gradients are compared with float64.
    """

    mesh: Mesh
    operands: tuple[jax.Array, jax.Array, jax.Array]
    rows: np.ndarray

    @classmethod
    def draw(cls, b: int, dim: int, settings: Settings, mesh: Mesh) -> "Case":
        """Random features; the cosines between an image and its text are uniform in [0, 1]."""

        def features() -> tuple[jax.Array, jax.Array]:
            for_image, for_text, for_cosine = jax.random.split(jax.random.key(0), 3)
            image = _unit(jax.random.normal(for_image, (b, dim), jnp.float32))
            text = _unit(jax.random.normal(for_text, (b, dim), jnp.float32))
            cosine = jax.random.uniform(for_cosine, (b, 1), jnp.float32)
            text = _unit(cosine * image + jnp.sqrt(1 - cosine**2) * text)
            return image.astype(settings.dtype), text.astype(settings.dtype)

        image, text = jax.jit(features, out_shardings=NamedSharding(mesh, PartitionSpec(DATA_AXIS)))()
        rows = np.random.default_rng(0).choice(b, min(b, settings.samples), replace=False).astype(np.int32)
        return cls(mesh, (image, text, replicate(mesh, np.float32(settings.scale))), rows)


def _unit(rows: jax.Array) -> jax.Array:
    return rows / jnp.linalg.norm(rows, axis=1, keepdims=True)


def measure(case: Case, implementation: str, repeats: int, product: Product, exact: Gradients | None) -> dict[str, Any]:
    """Time, rate, memory and error of one implementation; see docs/benchmarks.md."""
    return harness.collect(_FIGURES, _measured(case, implementation, repeats, product, exact))


_FIGURES = (
    *(key for _, key, _ in harness.PASSES),
    *("forward_memory_mib", "memory_mib"),
    *(f"{name}_error" for name in Gradients._fields),
)


def _measured(
    case: Case, implementation: str, repeats: int, product: Product, exact: Gradients | None
) -> Iterator[dict[str, float]]:
    """Figure after figure, so that those before memory runs out are known."""
    b, dim = case.operands[0].shape
    mesh = case.mesh if case.mesh.size > 1 else None
    loss = functools.partial(clip_loss, mesh=mesh, implementation=implementation)
    forward = Program(loss, *case.operands)
    yield {"forward_memory_mib": forward.memory_bytes / 2**20}
    total = Program(jax.value_and_grad(loss, argnums=(0, 1, 2)), *case.operands)
    yield {"memory_mib": total.memory_bytes / 2**20}
    forward_seconds = forward.seconds(repeats)
    rate = harness.tflops(forward_flops(b, dim), forward_seconds, case.mesh.size)
    yield {"forward_ms": 1e3 * forward_seconds, "forward_tflops": rate}
    if exact is not None:
        errors = relative_errors(case.mesh, total(), exact, case.rows)
        yield {f"{name}_error": error for name, error in errors.items()}
    seconds = total.seconds(repeats)
    rate = harness.tflops(total_flops(b, dim), seconds, case.mesh.size)
    yield {"total_ms": 1e3 * seconds, "backward_ms": 1e3 * (seconds - forward_seconds)}
    yield {"tflops": rate, "of_product": rate / product.tflops}


_COLUMNS = (
    ("implementation", "implementation", "s"),
    ("b", "batch", ",d"),
    ("D", "feature_dim", "d"),
    *harness.PASSES,
    ("memory MiB", "memory_mib", ",.1f"),
    ("loss error", "loss_error", ".1e"),
    ("image error", "image_error", ".1e"),
    ("text error", "text_error", ".1e"),
    ("scale error", "scale_error", ".1e"),
    ("status", "status", "s"),
)


def draw(records: Sequence[dict[str, Any]], path: Path) -> None:
    """Draws time and memory over the batch size: a colour for each implementation, a line style for each width."""
    figure = Figure(figsize=(12, 4.5), dpi=100, layout="constrained")
    figure.suptitle("{device}, {devices} device(s), {dtype}, scale {scale:g}".format_map(records[0]))
    names, dims = (list(dict.fromkeys(r[key] for r in records)) for key in ("implementation", "feature_dim"))
    panels = {"total_ms": "forward and backward, ms", "memory_mib": "memory beyond inputs and gradients, MiB"}
    for axes, (key, label) in zip(figure.subplots(1, 2), panels.items(), strict=True):
        for (i, name), (j, dim) in itertools.product(enumerate(names), enumerate(dims)):
            line = [r for r in records if (r["implementation"], r["feature_dim"]) == (name, dim) and r[key]]
            line.sort(key=lambda r: r["batch"])
            axes.plot(
                [r["batch"] for r in line],
                [r[key] for r in line],
                color=f"C{i}",
                linestyle=("-", "--", "-.", ":")[j % 4],
                marker="o",
                markersize=3,
                label=f"{name}, D = {dim}",
            )
        axes.set_yscale("log" if any(r[key] for r in records) else "linear")
        harness.over_batches(axes, records, label)
    axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(path)


if __name__ == "__main__":
    harness.run(benchmark_from_flags)
