"""Times the towers' attention, forward and backward, with its memory and its error against float64.

    python -m experiments.benchmarks.attention --attention=mosaic_gpu,cudnn --positions=50,197 --heads=12 \
        --batch=1024 --output=runs/benchmark_attention

Prints a table and adds JSON lines to `benchmark_attention.jsonl` in the output folder; docs/benchmarks.md says what the
figures mean. One device.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast, get_args

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from jax.sharding import Mesh

from experiments.benchmarks import harness
from experiments.benchmarks.harness import Product, Program
from infcl_jax.ops.attention.api import AttentionImplementation, attend, padding_for, takes_packed

RECORDS_FILE = "benchmark_attention.jsonl"

_CHOICES = get_args(AttentionImplementation)
_IMPLEMENTATIONS = flags.DEFINE_list("attention", "xla", f"Some of {', '.join(_CHOICES)}.")
_POSITIONS = flags.DEFINE_list("positions", "50,77,197,257", "Lengths t of the sequences.")
_HEADS = flags.DEFINE_integer("heads", 12, "Heads of each.", lower_bound=1)
_CHANNELS = flags.DEFINE_integer("channels", 64, "Channels d of a head.", lower_bound=1)
_CAUSAL = flags.DEFINE_bool("causal", False, "Whether a position sees only positions up to its own.")

# Forward, and with the backward pass: [b, t, heads, d] that have to be read or written, and products of t^2 d
# multiplications for each head.
_TENSORS, _ALL_TENSORS = 4, 12
_PRODUCTS, _ALL_PRODUCTS = 2, 7
_COMPARED = 4  # sequences


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to measure: every implementation at every batch size and length.

    Attributes:
      implementations: of `infcl_jax.ops.attention.api.attend`.
      batch: sizes b.
      positions: lengths t.
      heads: of each sequence.
      channels: d, of each head.
      causal: whether a position sees only positions up to its own.
      dtype: of queries, keys and values.
      repeats: timed runs of each program, of which the median counts.
    """

    implementations: tuple[AttentionImplementation, ...]
    batch: tuple[int, ...]
    positions: tuple[int, ...]
    heads: int = 12
    channels: int = 64
    causal: bool = False
    dtype: str = "bfloat16"
    repeats: int = 5


def benchmark_from_flags() -> None:
    """Measures what the flags ask for.

    Raises:
      ValueError: a flag is wrong or missing, or the device does not have an implementation.
    """
    settings = Settings(
        implementations=cast(
            tuple[AttentionImplementation, ...], harness.names("attention", _IMPLEMENTATIONS.value, _CHOICES)
        ),
        batch=harness.batch_sizes(),
        positions=harness.integers("positions", _POSITIONS.value),
        heads=_HEADS.value,
        channels=_CHANNELS.value,
        causal=_CAUSAL.value,
        repeats=harness.REPEATS.value,
    )
    output = harness.output_folder()
    if harness.DEVICES.value not in (None, 1):
        raise ValueError(
            f"expected --devices=1, since sequences have nothing to tell each other, got {harness.DEVICES.value}"
        )
    measure_all(settings, harness.start_devices(1), output)


def measure_all(settings: Settings, mesh: Mesh, output: Path) -> list[dict[str, Any]]:
    """Measures one case after the other, prints and records each.

    Args:
      settings: what to measure.
      mesh: of one device.
      output: folder of the JSON lines, which are added to.

    Returns:
      The new records, see docs/benchmarks.md. What does not fit into memory has the status "out of memory" and None
      for the figures that could not be had.
    """
    about = f"{settings.dtype}, {settings.heads} heads of {settings.channels}{', causal' if settings.causal else ''}"
    product = harness.start_table(about, _COLUMNS, mesh, settings.repeats, output)
    records = []
    for t, b, implementation in itertools.product(settings.positions, settings.batch, settings.implementations):
        case = {"implementation": implementation, "batch": b, "positions": t}
        case |= {name: getattr(settings, name) for name in ("heads", "channels", "causal", "dtype", "repeats")}
        found = harness.collect(_FIGURES, _measured(settings, implementation, b, t, product))
        records.append(harness.report(output / RECORDS_FILE, _COLUMNS, mesh, product, case, found))
    return records


_FIGURES = (
    *(key for _, key, _ in harness.PASSES),
    *("forward_tbytes", "tbytes", "memory_mib", "forward_error", "gradient_error"),
)


def _measured(
    settings: Settings, implementation: AttentionImplementation, b: int, t: int, product: Product
) -> Iterator[dict[str, float]]:
    """Figure after figure, so that those before memory runs out are known."""
    shape = (b, t, settings.heads, settings.channels)
    padding = padding_for(shape, settings.dtype, implementation)
    operands = draw((b, t, *shape[2:]), settings.dtype)
    *parts, cotangent = (jnp.pad(x, ((0, 0), (0, padding), (0, 0), (0, 0))) for x in operands)
    if takes_packed(shape, settings.dtype, implementation):
        parts = [jnp.concatenate(parts, axis=2)]
    run = functools.partial(attend, causal=settings.causal, padding=padding, implementation=implementation)

    def both(cotangent: jax.Array, *parts: jax.Array) -> tuple[jax.Array, ...]:
        result, pull = jax.vjp(run, *parts)
        return result, *pull(cotangent)

    forward, total = Program(run, *parts), Program(both, cotangent, *parts)
    yield {"memory_mib": total.memory_bytes / 2**20}
    exact = exact_attention(*[x[:_COMPARED] for x in operands], causal=settings.causal)
    result, *gradients = total()
    if len(gradients) == 1:
        gradients = jnp.split(gradients[0], 3, axis=2)
    errors = [_relative(found[:_COMPARED, :t], want) for found, want in zip((result, *gradients), exact, strict=True)]
    yield {"forward_error": errors[0], "gradient_error": max(errors[1:])}
    figures = {}
    for program, prefix, tensors, products in (
        (forward, "forward_", _TENSORS, _PRODUCTS),
        (total, "", _ALL_TENSORS, _ALL_PRODUCTS),
    ):
        seconds = program.seconds(settings.repeats)
        figures[f"{prefix or 'total_'}ms"] = 1e3 * seconds
        figures[f"{prefix}tflops"] = harness.tflops(2 * products * b * shape[2] * t * t * shape[3], seconds)
        figures[f"{prefix}tbytes"] = tensors * operands[0].nbytes / seconds / 1e12
    yield figures | {
        "backward_ms": figures["total_ms"] - figures["forward_ms"],
        "of_product": figures["tflops"] / product.tflops,
    }


def draw(shape: tuple[int, ...], dtype: str) -> list[jax.Array]:
    """Random queries, keys, values, and cotangents of the result."""
    keys = jax.random.split(jax.random.key(0), 4)
    return [jax.random.normal(key, shape, jnp.float32).astype(dtype) for key in keys]


def exact_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, cotangent: jax.Array, *, causal: bool
) -> tuple[np.ndarray, ...]:
    """The result and the gradients of queries, keys and values, in float64 (Dao et al. 2022, appendix B.2)."""
    q, k, v, of_result = (np.asarray(x, np.float64) for x in (query, key, value, cotangent))
    scale = q.shape[-1] ** -0.5
    scores = np.einsum("bthd,bshd->bhts", q, k) * scale
    if causal:
        scores = np.where(np.tri(q.shape[1], dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    slopes = np.einsum("bthd,bshd->bhts", of_result, v)
    slopes = weights * (slopes - (weights * slopes).sum(-1, keepdims=True)) * scale
    return (
        np.einsum("bhts,bshd->bthd", weights, v),
        np.einsum("bhts,bshd->bthd", slopes, k),
        np.einsum("bhts,bthd->bshd", slopes, q),
        np.einsum("bhts,bthd->bshd", weights, of_result),
    )


def _relative(found: jax.Array, exact: np.ndarray) -> float:
    return float(np.linalg.norm(np.asarray(found, np.float64) - exact) / np.linalg.norm(exact))


_COLUMNS = (
    ("implementation", "implementation", "s"),
    ("b", "batch", ",d"),
    ("t", "positions", ",d"),
    *harness.PASSES,
    ("forward TB/s", "forward_tbytes", ".3g"),
    ("TB/s", "tbytes", ".3g"),
    ("memory MiB", "memory_mib", ",.1f"),
    ("error", "forward_error", ".1e"),
    ("gradient error", "gradient_error", ".1e"),
    ("status", "status", "s"),
)


if __name__ == "__main__":
    harness.run(benchmark_from_flags)
