"""Benchmark of the towers' attention: time, memory and error against float64.

    python -m experiments.benchmarks.attention --attention=mosaic_gpu,cudnn --positions=50,197 --heads=12 \
        --batch=1024 --output=runs/benchmark_attention

Runs on one device. Prints a table and appends JSON lines to `benchmark_attention.jsonl` in the output folder.
docs/performance.md defines the figures.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from experiments import command_line
from experiments.benchmarks import harness, timing
from experiments.benchmarks.timing import Gemm, Program
from infcl_jax.ops.attention.api import AttentionImplementation, attend, padding_for, prefers_packed

RECORDS_FILE = "benchmark_attention.jsonl"

_CHOICES = get_args(AttentionImplementation)
# Least HBM traffic in tensors [b, t, heads, d], and GEMMs of t^2 d multiplications per head: forward, and forward and
# backward together. The backward pass recomputes QK.
_FORWARD_TENSORS, _ALL_TENSORS = 4, 12
_FORWARD_GEMMS, _ALL_GEMMS = 2, 7
_SAMPLED = 4  # sequences compared with float64

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
_FIGURES = (
    *(key for _, key, _ in harness.PASSES),
    *("forward_tbytes", "tbytes", "memory_mib", "forward_error", "gradient_error"),
)


@dataclasses.dataclass(frozen=True)
class Settings:
    """Benchmark cases: every implementation, batch size and sequence length."""

    implementations: tuple[AttentionImplementation, ...] = command_line.option(
        ("xla",), f"Some of {', '.join(_CHOICES)}.", known=_CHOICES, flag="attention"
    )
    batch: tuple[int, ...] = ()
    positions: tuple[int, ...] = command_line.option((50, 77, 197, 257), "Sequence lengths t.")
    heads: int = command_line.option(12, "Heads.", lower_bound=1)
    channels: int = command_line.option(64, "Channels d per head.", lower_bound=1)
    causal: bool = command_line.option(False, "Apply a causal mask.")
    dtype: str = "bfloat16"
    repeats: int = 5


_from_flags = command_line.define_flags(Settings)


def benchmark_from_flags() -> None:
    """Run the benchmark with the settings of the flags."""
    settings = _from_flags(batch=harness.batch_sizes(), repeats=harness.REPEATS.value)
    output = harness.output_folder()
    if harness.DEVICES.value not in (None, 1):
        raise ValueError(f"expected --devices=1, since attention needs no communication, got {harness.DEVICES.value}")
    measure_all(settings, harness.start_devices(1), output)


def measure_all(settings: Settings, mesh: Mesh, output: Path) -> list[dict[str, Any]]:
    """Measure, print and record all cases.

    Returns:
      The new records, see docs/performance.md. A case that does not fit into memory has the status "out of memory" and
      None for its missing figures.
    """
    about = f"{settings.dtype}, {settings.heads} heads of {settings.channels}{', causal' if settings.causal else ''}"
    gemm = harness.start_table(about, _COLUMNS, mesh, settings.repeats, output)
    records = []
    for t, b, implementation in itertools.product(settings.positions, settings.batch, settings.implementations):
        case = {"implementation": implementation, "batch": b, "positions": t}
        case |= {name: getattr(settings, name) for name in ("heads", "channels", "causal", "dtype", "repeats")}
        figures = harness.collect(_FIGURES, _measure(settings, implementation, b, t, gemm))
        records.append(harness.report(output / RECORDS_FILE, _COLUMNS, mesh, gemm, case, figures))
    return records


def _measure(
    settings: Settings, implementation: AttentionImplementation, b: int, t: int, gemm: Gemm
) -> Iterator[dict[str, float]]:
    """Yield figures one at a time, to record those before an out-of-memory error."""
    shape = (b, t, settings.heads, settings.channels)
    padding = padding_for(shape, settings.dtype, implementation)
    operands = draw((b, t, *shape[2:]), settings.dtype)
    *qkv, do = (jnp.pad(x, ((0, 0), (0, padding), (0, 0), (0, 0))) for x in operands)
    if prefers_packed(shape, settings.dtype, implementation):
        qkv = [jnp.concatenate(qkv, axis=2)]
    run = functools.partial(attend, causal=settings.causal, padding=padding, implementation=implementation)

    def run_with_gradients(do: jax.Array, *qkv: jax.Array) -> tuple[jax.Array, ...]:
        o, vjp = jax.vjp(run, *qkv)
        return o, *vjp(do)

    forward, with_gradients = Program(run, *qkv), Program(run_with_gradients, do, *qkv)
    yield {"memory_mib": with_gradients.memory_bytes / 2**20}
    exact = exact_attention(*[x[:_SAMPLED] for x in operands], causal=settings.causal)
    o, *gradients = with_gradients()
    if len(gradients) == 1:  # of queries, keys and values packed along the heads
        gradients = jnp.split(gradients[0], 3, axis=2)
    errors = [_relative_error(x[:_SAMPLED, :t], expected) for x, expected in zip((o, *gradients), exact, strict=True)]
    yield {"forward_error": errors[0], "gradient_error": max(errors[1:])}
    figures = {}
    for program, prefix, tensors, gemms in (
        (forward, "forward_", _FORWARD_TENSORS, _FORWARD_GEMMS),
        (with_gradients, "", _ALL_TENSORS, _ALL_GEMMS),
    ):
        seconds = program.seconds(settings.repeats)
        figures[f"{prefix or 'total_'}ms"] = 1e3 * seconds
        figures[f"{prefix}tflops"] = timing.tflops(2 * gemms * b * shape[2] * t * t * shape[3], seconds)
        figures[f"{prefix}tbytes"] = tensors * operands[0].nbytes / seconds / 1e12
    yield figures | {
        "backward_ms": figures["total_ms"] - figures["forward_ms"],
        "gemm_fraction": figures["tflops"] / gemm.tflops,
    }


def draw(shape: tuple[int, ...], dtype: str) -> list[jax.Array]:
    """Draw random queries, keys, values and output cotangents, each of `shape`."""
    keys = jax.random.split(jax.random.key(0), 4)
    return [jax.random.normal(key, shape, jnp.float32).astype(dtype) for key in keys]


def exact_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, cotangent: jax.Array, *, causal: bool
) -> tuple[np.ndarray, ...]:
    """Compute attention and its gradients in float64.

    The backward pass follows Dao et al. 2022, appendix B.2.

    Args:
      query: `[b, t, heads, d]` queries.
      key: `[b, t, heads, d]` keys.
      value: `[b, t, heads, d]` values.
      cotangent: `[b, t, heads, d]` cotangents of the output.
      causal: whether to apply a causal mask.

    Returns:
      Output and gradients of queries, keys and values, float64 `[b, t, heads, d]` each.
    """
    q, k, v, do = (np.asarray(x, np.float64) for x in (query, key, value, cotangent))
    scale = q.shape[-1] ** -0.5
    s = np.einsum("bthd,bshd->bhts", q, k) * scale
    if causal:
        s = np.where(np.tri(q.shape[1], dtype=bool), s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dp = np.einsum("bthd,bshd->bhts", do, v)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) * scale
    return (
        np.einsum("bhts,bshd->bthd", p, v),
        np.einsum("bhts,bshd->bthd", ds, k),
        np.einsum("bhts,bthd->bshd", ds, q),
        np.einsum("bhts,bthd->bshd", p, do),
    )


def _relative_error(actual: jax.Array, exact: np.ndarray) -> float:
    """Return the distance relative to the exact value, in the Euclidean norm."""
    return float(np.linalg.norm(np.asarray(actual, np.float64) - exact) / np.linalg.norm(exact))


if __name__ == "__main__":
    command_line.run(benchmark_from_flags)
