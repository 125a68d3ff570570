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

from infcl_jax.distributed import DATA_AXIS

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


def exact_gradients(mesh: Mesh, image: jax.Array, text: jax.Array, scale: jax.Array, rows: np.ndarray) -> Gradients:
    """Compute the float64 loss and gradients.

    The gradient of one row needs the log-sum-exps of all columns. Two sweeps over all pairs compute them, with
    `2 b^2 D` float64 operations each.

    Args:
      mesh: devices.
      image: `[b, D]` image features, sharded over the mesh.
      text: `[b, D]` text features, sharded over the mesh.
      scale: logit scale, replicated over the mesh.
      rows: int `[samples]` sampled rows.

    Returns:
      Float64 loss and gradients, on the host.
    """
    with jax.enable_x64(True):
        exact = jax.jit(functools.partial(_exact_gradients, mesh), out_shardings=NamedSharding(mesh, _REPLICATED))
        return jax.tree.map(np.asarray, exact(image, text, scale, rows))


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


def _exact_gradients(mesh: Mesh, image: jax.Array, text: jax.Array, scale: jax.Array, rows: Array) -> Gradients:
    scale = scale.astype(jnp.float64)
    sweep = jax.shard_map(
        _row_statistics, mesh=mesh, in_specs=(_SHARDED, _SHARDED, _REPLICATED), out_specs=(_SHARDED, _SHARDED)
    )
    row_lse, row_mean = sweep(image, text, scale)
    col_lse, col_mean = sweep(text, image, scale)
    positive = (image.astype(jnp.float64) * text.astype(jnp.float64)).sum(1)
    return Gradients(
        loss=((row_lse + col_lse) / 2 - scale * positive).mean(),
        image=_gradient_of_rows(image, text, row_lse, col_lse, scale, rows),
        text=_gradient_of_rows(text, image, col_lse, row_lse, scale, rows),
        scale=((row_mean + col_mean) / 2 - positive).mean(),
    )


def _row_statistics(own: jax.Array, other: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Compute log-sum-exp and mean similarity of each local row.

    Args:
      own: `[b/n, D]` row features of this device.
      other: `[b/n, D]` column features of this device; all devices' columns are gathered.
      scale: float64 logit scale.

    Returns:
      Float64 `[b/n]` log-sum-exps over all columns, and float64 `[b/n]` softmax-weighted mean similarities.
    """
    columns = lax.all_gather(other, DATA_AXIS, tiled=True).astype(jnp.float64)

    def statistics(row: jax.Array) -> tuple[jax.Array, jax.Array]:
        similarity = columns @ row.astype(jnp.float64)
        lse = jax.nn.logsumexp(scale * similarity)
        return lse, jnp.exp(scale * similarity - lse) @ similarity

    return lax.map(statistics, own, batch_size=max(1, _PAIRS // len(columns)))


def _gradient_of_rows(
    own: jax.Array, other: jax.Array, own_lse: jax.Array, other_lse: jax.Array, scale: jax.Array, rows: Array
) -> jax.Array:
    """Compute the float64 `[samples, D]` gradients of the sampled rows of `own`."""
    b, columns = len(own), other.astype(jnp.float64)
    logits = scale * own[rows].astype(jnp.float64) @ columns.T
    p = (jnp.exp(logits - own_lse[rows][:, None]) + jnp.exp(logits - other_lse[None, :])) / 2
    return scale / b * (p - jax.nn.one_hot(rows, b, dtype=jnp.float64)) @ columns
