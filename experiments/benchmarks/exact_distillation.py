"""Float64 reference of the distillation loss, with its gradients at sampled rows.

Runs on the devices, a few rows at a time. Shares no code with `infcl_jax.losses` and `infcl_jax.ops`.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from experiments.benchmarks.exact_loss import Array, Gradients
from infcl_jax.runtime.mesh import DATA_AXIS

_PAIRS = 2**25  # pairs compared at a time on a device; float64 similarities of both models take 0.5 GiB
_SHARDED, _REPLICATED = PartitionSpec(DATA_AXIS), PartitionSpec()


class _Models(NamedTuple):
    """Features of both models, rows or columns, and float64 scales.

    Attributes:
      student: `[n, D]`.
      teacher: `[n, Dt]`.
    """

    student: Array
    teacher: Array


class _Statistics(NamedTuple):
    """Statistics of each row, float64 `[b/n]`.

    Attributes:
      lse: log-sum-exp of the student's logits.
      teacher_lse: log-sum-exp of the teacher's logits.
      divergence: KL divergence of the student's from the teacher's softmax.
      moment: mean similarity of the student under its own softmax, less that under the teacher's.
    """

    lse: jax.Array
    teacher_lse: jax.Array
    divergence: jax.Array
    moment: jax.Array


def exact_gradients(
    mesh: Mesh,
    image: jax.Array,
    text: jax.Array,
    scale: jax.Array,
    rows: np.ndarray,
    teacher: tuple[jax.Array, jax.Array, jax.Array],
) -> Gradients:
    """Compute the float64 loss and gradients, with two sweeps over all pairs.

    Args:
      mesh: devices.
      image: `[b, D]` image features of the student, sharded over the mesh.
      text: `[b, D]` text features of the student, sharded over the mesh.
      scale: logit scale of the student, replicated over the mesh.
      rows: int `[samples]` sampled rows.
      teacher: image and text features `[b, Dt]` of the teacher, and its logit scale.

    Returns:
      Float64 loss and gradients of the student's features and scale, on the host.
    """
    with jax.enable_x64(True):
        exact = jax.jit(functools.partial(_exact_gradients, mesh), out_shardings=NamedSharding(mesh, _REPLICATED))
        return jax.tree.map(np.asarray, exact(image, text, scale, rows, teacher))


def _exact_gradients(
    mesh: Mesh, image: jax.Array, text: jax.Array, scale: jax.Array, rows: Array, teacher: tuple
) -> Gradients:
    images, texts = _Models(image, teacher[0]), _Models(text, teacher[1])
    scales = scale.astype(jnp.float64), teacher[2].astype(jnp.float64)
    sweep = jax.shard_map(_row_statistics, mesh=mesh, in_specs=(_SHARDED, _SHARDED, _REPLICATED), out_specs=_SHARDED)
    row, column = sweep(images, texts, scales), sweep(texts, images, scales)
    return Gradients(
        loss=(row.divergence + column.divergence).mean() / 2,
        image=_gradient_of_rows(images, texts, row, column, scales, rows),
        text=_gradient_of_rows(texts, images, column, row, scales, rows),
        scale=(row.moment + column.moment).mean() / 2,
    )


def _row_statistics(own: _Models, other: _Models, scales: tuple[jax.Array, jax.Array]) -> _Statistics:
    """Compute the statistics of each local row over the columns of all devices."""
    columns = _Models(*(lax.all_gather(a, DATA_AXIS, tiled=True).astype(jnp.float64) for a in other))

    def statistics(row: _Models) -> _Statistics:
        s, u = (c @ r.astype(jnp.float64) for c, r in zip(columns, row, strict=True))
        z, t = scales[0] * s, scales[1] * u
        lse, teacher_lse = jax.nn.logsumexp(z), jax.nn.logsumexp(t)
        q, p = jnp.exp(z - lse), jnp.exp(t - teacher_lse)
        return _Statistics(lse, teacher_lse, p @ (t - z) - teacher_lse + lse, (q - p) @ s)

    return lax.map(statistics, own, batch_size=max(1, _PAIRS // len(columns.student)))


def _gradient_of_rows(
    own: _Models, other: _Models, of_own: _Statistics, of_other: _Statistics, scales: tuple, rows: Array
) -> jax.Array:
    """Compute the float64 `[samples, D]` gradients of the sampled rows of the student's `own`."""
    columns = other.student.astype(jnp.float64)
    z, t = (
        scale * a[rows].astype(jnp.float64) @ b.astype(jnp.float64).T
        for scale, a, b in zip(scales, own, other, strict=True)
    )
    q = jnp.exp(z - of_own.lse[rows][:, None]) + jnp.exp(z - of_other.lse[None, :])
    p = jnp.exp(t - of_own.teacher_lse[rows][:, None]) + jnp.exp(t - of_other.teacher_lse[None, :])
    return scales[0] / len(columns) / 2 * (q - p) @ columns
