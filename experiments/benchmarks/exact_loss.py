"""Float64 reference of the CLIP loss, with its gradients at sampled rows.

Runs on the devices, a few rows at a time. Shares no code with `infcl_jax.losses` and `infcl_jax.ops`.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from infcl_jax.runtime.mesh import DATA_AXIS

Array = jax.Array | np.ndarray

_PAIRS = 2**26  # pairs compared at a time on a device; their float64 similarities take 0.5 GiB
_SHARDED, _REPLICATED = PartitionSpec(DATA_AXIS), PartitionSpec()


class Gradients(NamedTuple):
    """Loss and gradients, with feature gradients at the sampled rows only.

    Attributes:
      loss: scalar.
      image: `[samples, D]` gradients of the image features.
      text: `[samples, D]` gradients of the text features.
      scale: gradient of the logit scale, scalar.
    """

    loss: Array
    image: Array
    text: Array
    scale: Array


def exact_gradients(
    mesh: Mesh,
    image: jax.Array,
    text: jax.Array,
    scale: jax.Array,
    rows: np.ndarray,
    ids: jax.Array | None = None,
    multi_positive: str = "mean",
) -> Gradients:
    """Compute the float64 loss and gradients.

    The gradient of one row needs the log-sum-exps of all columns. Two sweeps over all pairs compute them, with
    `2 b^2 D` float64 operations each.

    Args:
      mesh: devices.
      image: `[b, D]` image features, sharded over the mesh.
      text: `[b, D]` text features, sharded over the mesh.
      scale: logit scale, replicated over the mesh.
      rows: int `[samples]` sampled rows.
      ids: int32 `[b]`, sharded over the mesh; pairs with equal ids are positives. None: the positives are the pairs.
      multi_positive: "mean" or "any", see `clip_loss`.

    Returns:
      Float64 loss and gradients, on the host.
    """
    if ids is None:
        ids = jax.device_put(np.arange(len(image), dtype=np.int32), NamedSharding(mesh, _SHARDED))
    with jax.enable_x64(True):
        exact = jax.jit(
            functools.partial(_exact_gradients, mesh, multi_positive == "any"),
            out_shardings=NamedSharding(mesh, _REPLICATED),
        )
        return jax.tree.map(np.asarray, exact(image, text, scale, rows, ids))


def relative_errors(mesh: Mesh, results: tuple, exact: Any, rows: np.ndarray) -> dict[str, float]:
    """Compute the relative errors of a loss and its gradients.

    An error is the Euclidean norm of the difference from the reference, divided by the norm of the reference.

    Args:
      mesh: devices.
      results: `(loss, (image, text, *scalars))` from `jax.value_and_grad`, over the whole batch.
      exact: named tuple of the reference values, from `exact_gradients`.
      rows: int `[samples]` sampled rows.

    Returns:
      Errors by the names of the reference values: "loss", "image", "text", "scale".
    """

    def sampled(loss: jax.Array, gradients: tuple) -> tuple:
        image, text, *scalars = gradients
        return loss, image[rows], text[rows], *scalars

    got = jax.jit(sampled, out_shardings=NamedSharding(mesh, _REPLICATED))(*results)
    return {
        name: float(np.linalg.norm(np.asarray(value, np.float64) - expected) / np.linalg.norm(expected))
        for name, value, expected in zip(exact._fields, got, exact, strict=True)
    }


class _Statistics(NamedTuple):
    """Statistics of each row, float64 `[b/n]`.

    Attributes:
      lse: log-sum-exp of the logits.
      mean: softmax-weighted mean similarity.
      target: logarithm of the number of positives, or with "any" log-sum-exp of their logits.
      target_mean: mean similarity of the positives, with "any" weighted by their softmax.
    """

    lse: jax.Array
    mean: jax.Array
    target: jax.Array
    target_mean: jax.Array


def _exact_gradients(
    mesh: Mesh, any_positive: bool, image: jax.Array, text: jax.Array, scale: jax.Array, rows: Array, ids: jax.Array
) -> Gradients:
    scale = scale.astype(jnp.float64)
    sweep = jax.shard_map(
        functools.partial(_row_statistics, any_positive),
        mesh=mesh,
        in_specs=(_SHARDED, _SHARDED, _SHARDED, _REPLICATED),
        out_specs=_SHARDED,
    )
    row, col = sweep(image, text, ids, scale), sweep(text, image, ids, scale)

    def positive(side: _Statistics) -> jax.Array:
        return side.target if any_positive else scale * side.target_mean

    gradient = functools.partial(_gradient_of_rows, any_positive, scale=scale, ids=ids, rows=rows)
    return Gradients(
        loss=((row.lse + col.lse) / 2 - (positive(row) + positive(col)) / 2).mean(),
        image=gradient(image, text, row, col),
        text=gradient(text, image, col, row),
        scale=((row.mean + col.mean) / 2 - (row.target_mean + col.target_mean) / 2).mean(),
    )


def _row_statistics(
    any_positive: bool, own: jax.Array, other: jax.Array, ids: jax.Array, scale: jax.Array
) -> _Statistics:
    """Compute the statistics of each local row over all columns.

    Args:
      any_positive: whether the target is the softmax over the positives, instead of their mean.
      own: `[b/n, D]` row features of this device.
      other: `[b/n, D]` column features of this device; all devices' columns are gathered.
      ids: int32 `[b/n]` ids of this device's rows and columns.
      scale: float64 logit scale.
    """
    columns, column_ids = (lax.all_gather(a, DATA_AXIS, tiled=True) for a in (other, ids))
    columns = columns.astype(jnp.float64)

    def statistics(operands: tuple[jax.Array, jax.Array]) -> _Statistics:
        row, row_id = operands
        similarity = columns @ row.astype(jnp.float64)
        lse = jax.nn.logsumexp(scale * similarity)
        logits = jnp.where(column_ids == row_id, scale * similarity * float(any_positive), -jnp.inf)
        target = jax.nn.logsumexp(logits)
        return _Statistics(
            lse, jnp.exp(scale * similarity - lse) @ similarity, target, jnp.exp(logits - target) @ similarity
        )

    return lax.map(statistics, (own, ids), batch_size=max(1, _PAIRS // len(columns)))


def _gradient_of_rows(
    any_positive: bool,
    own: jax.Array,
    other: jax.Array,
    of_own: _Statistics,
    of_other: _Statistics,
    *,
    scale: jax.Array,
    ids: jax.Array,
    rows: Array,
) -> jax.Array:
    """Compute the float64 `[samples, D]` gradients of the sampled rows of `own`."""
    b, columns = len(own), other.astype(jnp.float64)
    logits = scale * own[rows].astype(jnp.float64) @ columns.T
    target_logits = jnp.where(ids[rows][:, None] == ids[None, :], logits * float(any_positive), -jnp.inf)
    p = (jnp.exp(logits - of_own.lse[rows][:, None]) + jnp.exp(logits - of_other.lse[None, :])) / 2
    target = jnp.exp(target_logits - of_own.target[rows][:, None]) + jnp.exp(target_logits - of_other.target[None, :])
    return scale / b * (p - target / 2) @ columns
