"""Cases of the loss benchmark: settings, random batches, FLOPs and float64 references."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from experiments.benchmarks import exact
from experiments.command_line import option
from infcl_jax.losses.distillation import IMPLEMENTATIONS as DISTILLATION_IMPLEMENTATIONS
from infcl_jax.ops.pairwise.lse import IMPLEMENTATIONS, MULTI_POSITIVE
from infcl_jax.ops.pairwise.sigmoid import SIGMOID_IMPLEMENTATIONS
from infcl_jax.runtime.mesh import DATA_AXIS, replicate

IDS = ("none", "unique", "1%", "8")
LOSSES = {
    "clip": IMPLEMENTATIONS,
    "siglip": SIGMOID_IMPLEMENTATIONS,
    "distillation": DISTILLATION_IMPLEMENTATIONS,
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """Benchmark cases: every implementation, dimension, batch size and kind of ids.

    `batch` has global batch sizes b, multiples of the device count. The median of `repeats` timed runs is reported.
    """

    implementations: tuple[str, ...] = option(
        ("xla", "dense"), f"Some of {', '.join(IMPLEMENTATIONS)}.", known=IMPLEMENTATIONS
    )
    batch: tuple[int, ...] = ()
    features: tuple[int, ...] = option((512,), "Feature dimensions D.")
    dtype: str = option("bfloat16", "Dtype of the features.", known=("bfloat16", "float16", "float32"))
    scale: float = option(50.0, "Logit scale.", lower_bound=1e-3)
    repeats: int = 5
    samples: int = option(16, "Rows of each feature gradient compared with float64; 0: no comparison.", lower_bound=0)
    loss: str = option(
        "clip", "Loss: softmax over rows and columns, sigmoid of pairs, or divergence from a teacher.", known=LOSSES
    )
    bias: float = option(-10.0, "Logit bias of the siglip loss.")
    ids: tuple[str, ...] = option(
        ("none",),
        "Positives: none (the pairs, without ids), unique ids, 1% (of the ids repeat another), 8 (every id 8 times).",
        known=IDS,
    )
    multi_positive: str = option("mean", "Target of several positives.", known=MULTI_POSITIVE)
    teacher_features: int | None = option(
        None, "Feature dimension of the teacher; that of the student by default.", lower_bound=1
    )
    teacher_scale: float = option(50.0, "Logit scale of the teacher.", lower_bound=1e-3)


def forward_flops(b: int, dim: int) -> int:
    """Count the nominal FLOPs of the loss, `2 b^2 D`: one GEMM."""
    return 2 * b * b * dim


def total_flops(b: int, dim: int) -> int:
    """Count the nominal FLOPs of loss and gradients, `8 b^2 D`.

    The count is the same for every implementation.
    """
    return 4 * forward_flops(b, dim)


class Case(NamedTuple):
    """One batch of features on the devices.

    Attributes:
      mesh: devices.
      operands: image and text features `[b, D]`, sharded over the mesh, the fp32 logit scale and, for the siglip loss,
        the fp32 logit bias.
      rows: int32 `[samples]` rows whose gradients are compared with float64.
      loss: key of `LOSSES`.
      ids: int32 `[b]` ids of the pairs, sharded over the mesh; None: without ids.
      multi_positive: "mean" or "any", see `clip_loss`.
      teacher: image and text features `[b, Dt]` of the teacher of the distillation loss, sharded over the mesh, and its
        fp32 logit scale; None for the other losses.
    """

    mesh: Mesh
    operands: tuple[jax.Array, ...]
    rows: np.ndarray
    loss: str = "clip"
    ids: jax.Array | None = None
    multi_positive: str = "mean"
    teacher: tuple[jax.Array, jax.Array, jax.Array] | None = None

    @classmethod
    def draw(cls, b: int, dim: int, settings: Settings, mesh: Mesh, ids: str = "none") -> "Case":
        """Draw random unit features.

        The cosine between an image and its text is uniform in [0, 1].
        """

        image, text = _features(0, b, dim, settings.dtype, mesh)
        teacher = None
        if settings.loss == "distillation":
            teacher_scale = replicate(mesh, np.float32(settings.teacher_scale))
            teacher = *_features(1, b, settings.teacher_features or dim, settings.dtype, mesh), teacher_scale
        rows = np.random.default_rng(0).choice(b, min(b, settings.samples), replace=False).astype(np.int32)
        scalars = (settings.scale, settings.bias) if settings.loss == "siglip" else (settings.scale,)
        operands = image, text, *(replicate(mesh, np.float32(scalar)) for scalar in scalars)
        numbers = draw_ids(ids, b)
        if numbers is not None:
            numbers = jax.device_put(numbers, NamedSharding(mesh, PartitionSpec(DATA_AXIS)))
        return cls(mesh, operands, rows, settings.loss, numbers, settings.multi_positive, teacher)

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of the loss that are not arrays."""
        return {"multi_positive": self.multi_positive} if self.loss == "clip" else {}

    @property
    def forward_flops(self) -> int:
        """Nominal FLOPs of the loss.

        They are `2 b^2 D`, or `2 b^2 (D + Dt)` with a teacher.
        """
        return forward_flops(*self.operands[0].shape) + self._teacher_flops

    @property
    def total_flops(self) -> int:
        """Nominal FLOPs of loss and gradients.

        They are `8 b^2 D`, or `8 b^2 D + 4 b^2 Dt` with a teacher.
        """
        return total_flops(*self.operands[0].shape) + 2 * self._teacher_flops

    @property
    def _teacher_flops(self) -> int:
        return 0 if self.teacher is None else forward_flops(*self.teacher[0].shape)

    def exact(self) -> exact.Gradients:
        """Compute the float64 loss and gradients."""
        if self.teacher is not None:
            image, text, scale = self.operands
            return exact.distillation(self.mesh, image, text, scale, self.rows, self.teacher)
        function: Any = exact.siglip if self.loss == "siglip" else exact.clip
        return function(self.mesh, *self.operands, self.rows, self.ids, **self.options)


def draw_ids(kind: str, b: int) -> np.ndarray | None:
    """Draw shuffled int32 ids `[b]`; None without ids."""
    rng = np.random.default_rng(1)
    ids = rng.permutation(b).astype(np.int32)
    if kind == "none":
        return None
    if kind == "1%":
        ids[rng.choice(b, b // 100, replace=False)] = rng.integers(0, b, b // 100)
    return ids // 8 if kind == "8" else ids


def _unit(rows: jax.Array) -> jax.Array:
    return rows / jnp.linalg.norm(rows, axis=1, keepdims=True)


def _features(seed: int, b: int, dim: int, dtype: str, mesh: Mesh) -> tuple[jax.Array, jax.Array]:
    """Draw image and text features, sharded over the mesh."""

    def features() -> tuple[jax.Array, jax.Array]:
        image_key, text_key, cosine_key = jax.random.split(jax.random.key(seed), 3)
        image = _unit(jax.random.normal(image_key, (b, dim), jnp.float32))
        text = _unit(jax.random.normal(text_key, (b, dim), jnp.float32))
        cosine = jax.random.uniform(cosine_key, (b, 1), jnp.float32)
        text = _unit(cosine * image + jnp.sqrt(1 - cosine**2) * text)
        return image.astype(dtype), text.astype(dtype)

    return jax.jit(features, out_shardings=NamedSharding(mesh, PartitionSpec(DATA_AXIS)))()
