"""The CLIP loss of a batch in float64, with its gradients at sampled rows: what implementations are held against.

Runs on the devices, a slice of the pairs at a time; shares no code with `infcl_jax.losses` and `infcl_jax.ops`.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from infcl_jax.distributed import DATA_AXIS

Array = jax.Array | np.ndarray

_PAIRS = 2**26  # compared at a time: 0.5 GiB a matrix
_SHARDED, _SHARED = PartitionSpec(DATA_AXIS), PartitionSpec()


class Gradients(NamedTuple):
    """The loss and its gradients; those of the features at the sampled rows only, `[samples, D]`."""

    loss: Array
    image: Array
    text: Array
    scale: Array


def exact_gradients(mesh: Mesh, image: jax.Array, text: jax.Array, scale: jax.Array, rows: np.ndarray) -> Gradients:
    """Float64 loss and gradients, on the host.

    The gradient of one row needs the log-sum-exps of all columns, so there are two sweeps over all pairs, of `2 b^2 D`
    float64 operations each.

    Args:
      mesh: the devices.
      image: `[b, D]` features, sharded over the mesh.
      text: `[b, D]`, likewise.
      scale: logit scale, on every device.
      rows: int `[samples]`, whose gradients to return.
    """
    with jax.enable_x64(True):
        exact = jax.jit(functools.partial(_exact_gradients, mesh), out_shardings=NamedSharding(mesh, _SHARED))
        return jax.tree.map(np.asarray, exact(image, text, scale, rows))


def relative_errors(mesh: Mesh, results: tuple, exact: Gradients, rows: np.ndarray) -> dict[str, float]:
    """Distance of a loss and its gradients from the exact ones relative to these, in the Euclidean norm.

    Args:
      mesh: the devices.
      results: `(loss, (image, text, scale))` as `jax.value_and_grad` returns them, over the whole batch.
      exact: see `exact_gradients`.
      rows: the sampled rows.

    Returns:
      `{"loss": error, "image": error, "text": error, "scale": error}`.
    """

    def sampled(loss: jax.Array, gradients: tuple) -> Gradients:
        image, text, scale = gradients
        return Gradients(loss, image[rows], text[rows], scale)

    got = jax.jit(sampled, out_shardings=NamedSharding(mesh, _SHARED))(*results)
    return {
        name: float(np.linalg.norm(np.asarray(value, np.float64) - expected) / np.linalg.norm(expected))
        for name, value, expected in zip(Gradients._fields, got, exact, strict=True)
    }


def _exact_gradients(mesh: Mesh, image: jax.Array, text: jax.Array, scale: jax.Array, rows: Array) -> Gradients:
    scale = scale.astype(jnp.float64)
    sweep = jax.shard_map(_row_sums, mesh=mesh, in_specs=(_SHARDED, _SHARDED, _SHARED), out_specs=(_SHARDED, _SHARDED))
    row, row_mean = sweep(image, text, scale)
    column, column_mean = sweep(text, image, scale)
    positive = (image.astype(jnp.float64) * text.astype(jnp.float64)).sum(1)
    return Gradients(
        loss=((row + column) / 2 - scale * positive).mean(),
        image=_gradient_of_rows(image, text, row, column, scale, rows),
        text=_gradient_of_rows(text, image, column, row, scale, rows),
        scale=((row_mean + column_mean) / 2 - positive).mean(),
    )


def _row_sums(own: jax.Array, other: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of each of this device's rows: log-sum-exp over all others, and mean similarity under that softmax."""
    others = lax.all_gather(other, DATA_AXIS, tiled=True).astype(jnp.float64)

    def compare(row: jax.Array) -> tuple[jax.Array, jax.Array]:
        similarity = others @ row.astype(jnp.float64)
        lse = jax.nn.logsumexp(scale * similarity)
        return lse, jnp.exp(scale * similarity - lse) @ similarity

    return lax.map(compare, own, batch_size=max(1, _PAIRS // len(others)))


def _gradient_of_rows(
    own: jax.Array, other: jax.Array, own_lse: jax.Array, other_lse: jax.Array, scale: jax.Array, rows: Array
) -> jax.Array:
    b, others = len(own), other.astype(jnp.float64)
    logits = scale * own[rows].astype(jnp.float64) @ others.T
    probability = (jnp.exp(logits - own_lse[rows][:, None]) + jnp.exp(logits - other_lse[None, :])) / 2
    return scale / b * (probability - jax.nn.one_hot(rows, b, dtype=jnp.float64)) @ others
