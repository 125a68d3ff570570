"""Float64 reference of the sigmoid loss, with its gradients at sampled rows.

Runs on the devices, a few rows at a time. Shares no code with `infcl_jax.losses` and `infcl_jax.ops`.
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

_PAIRS = 2**26  # pairs compared at a time on a device; their float64 similarities take 0.5 GiB
_SHARDED, _REPLICATED = PartitionSpec(DATA_AXIS), PartitionSpec()


class Gradients(NamedTuple):
    """Loss and gradients, with feature gradients at the sampled rows only.

    Attributes:
      loss: scalar.
      image: `[samples, D]` gradients of the image features.
      text: `[samples, D]` gradients of the text features.
      scale: gradient of the logit scale, scalar.
      bias: gradient of the logit bias, scalar.
    """

    loss: Array
    image: Array
    text: Array
    scale: Array
    bias: Array


def exact_gradients(
    mesh: Mesh, image: jax.Array, text: jax.Array, scale: jax.Array, bias: jax.Array, rows: np.ndarray
) -> Gradients:
    """Compute the float64 loss and gradients, with one sweep over all pairs.

    Args:
      mesh: devices.
      image: `[b, D]` image features, sharded over the mesh.
      text: `[b, D]` text features, sharded over the mesh.
      scale: logit scale, replicated over the mesh.
      bias: logit bias, replicated over the mesh.
      rows: int `[samples]` sampled rows.

    Returns:
      Float64 loss and gradients, on the host.
    """
    with jax.enable_x64(True):
        exact = jax.jit(functools.partial(_exact_gradients, mesh), out_shardings=NamedSharding(mesh, _REPLICATED))
        return jax.tree.map(np.asarray, exact(image, text, scale, bias, rows))


def _exact_gradients(
    mesh: Mesh, image: jax.Array, text: jax.Array, scale: jax.Array, bias: jax.Array, rows: Array
) -> Gradients:
    scale, bias = scale.astype(jnp.float64), bias.astype(jnp.float64)
    sweep = jax.shard_map(
        _row_sums, mesh=mesh, in_specs=(_SHARDED, _SHARDED, _REPLICATED, _REPLICATED), out_specs=_SHARDED
    )
    loss, d_scale, d_bias = sweep(image, text, scale, bias).mean(0)
    return Gradients(
        loss=loss,
        image=_gradient_of_rows(image, text, scale, bias, rows),
        text=_gradient_of_rows(text, image, scale, bias, rows),
        scale=d_scale,
        bias=d_bias,
    )


def _row_sums(own: jax.Array, other: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    """Sum loss, gradient of the scale and gradient of the bias over all columns.

    Args:
      own: `[b/n, D]` row features of this device.
      other: `[b/n, D]` column features of this device; all devices' columns are gathered.
      scale: float64 logit scale.
      bias: float64 logit bias.

    Returns:
      Float64 `[b/n, 3]`.
    """
    columns = lax.all_gather(other, DATA_AXIS, tiled=True).astype(jnp.float64)
    first = lax.axis_index(DATA_AXIS) * len(own)

    def row_sums(index_and_row: tuple[jax.Array, jax.Array]) -> jax.Array:
        index, row = index_and_row
        similarity = columns @ row.astype(jnp.float64)
        d_logits, loss = _terms(scale * similarity + bias, jnp.arange(len(columns), dtype=jnp.int32) == index)
        return jnp.stack([loss.sum(), d_logits @ similarity, d_logits.sum()])

    return lax.map(
        row_sums, (first + jnp.arange(len(own), dtype=jnp.int32), own), batch_size=max(1, _PAIRS // len(columns))
    )


def _terms(logits: jax.Array, positive: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the gradient of each pair's logit, and its loss term."""
    sign = jnp.where(positive, -1.0, 1.0)
    return sign * jax.nn.sigmoid(sign * logits), jax.nn.softplus(sign * logits)


def _gradient_of_rows(own: jax.Array, other: jax.Array, scale: jax.Array, bias: jax.Array, rows: Array) -> jax.Array:
    """Compute the float64 `[samples, D]` gradients of the sampled rows of `own`."""
    b, columns = len(own), other.astype(jnp.float64)
    logits = scale * own[rows].astype(jnp.float64) @ columns.T + bias
    d_logits, _ = _terms(logits, jnp.arange(b, dtype=jnp.int32)[None, :] == rows[:, None])
    return scale / b * d_logits @ columns
