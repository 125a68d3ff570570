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
      bias: gradient of the logit bias, scalar.
    """

    loss: Array
    image: Array
    text: Array
    scale: Array
    bias: Array


def exact_gradients(
    mesh: Mesh,
    image: jax.Array,
    text: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    rows: np.ndarray,
    ids: jax.Array | None = None,
) -> Gradients:
    """Compute the float64 loss and gradients, with one sweep over all pairs.

    Args:
      mesh: devices.
      image: `[b, D]` image features, sharded over the mesh.
      text: `[b, D]` text features, sharded over the mesh.
      scale: logit scale, replicated over the mesh.
      bias: logit bias, replicated over the mesh.
      rows: int `[samples]` sampled rows.
      ids: int32 `[b]`, sharded over the mesh; pairs with equal ids are positives. None: the positives are the pairs.

    Returns:
      Float64 loss and gradients, on the host.
    """
    if ids is None:
        ids = jax.device_put(np.arange(len(image), dtype=np.int32), NamedSharding(mesh, _SHARDED))
    with jax.enable_x64(True):
        exact = jax.jit(functools.partial(_exact_gradients, mesh), out_shardings=NamedSharding(mesh, _REPLICATED))
        return jax.tree.map(np.asarray, exact(image, text, scale, bias, rows, ids))


def _exact_gradients(
    mesh: Mesh, image: jax.Array, text: jax.Array, scale: jax.Array, bias: jax.Array, rows: Array, ids: jax.Array
) -> Gradients:
    scale, bias = scale.astype(jnp.float64), bias.astype(jnp.float64)
    sweep = jax.shard_map(
        _row_sums, mesh=mesh, in_specs=(*[_SHARDED] * 3, _REPLICATED, _REPLICATED), out_specs=_SHARDED
    )
    loss, d_scale, d_bias = sweep(image, text, ids, scale, bias).mean(0)
    return Gradients(
        loss=loss,
        image=_gradient_of_rows(image, text, scale, bias, rows, ids),
        text=_gradient_of_rows(text, image, scale, bias, rows, ids),
        scale=d_scale,
        bias=d_bias,
    )


def _row_sums(own: jax.Array, other: jax.Array, ids: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    """Sum loss, gradient of the scale and gradient of the bias over all columns.

    Args:
      own: `[b/n, D]` row features of this device.
      other: `[b/n, D]` column features of this device; all devices' columns are gathered.
      ids: int32 `[b/n]` ids of this device's rows and columns.
      scale: float64 logit scale.
      bias: float64 logit bias.

    Returns:
      Float64 `[b/n, 3]`.
    """
    columns, column_ids = (lax.all_gather(a, DATA_AXIS, tiled=True) for a in (other, ids))
    columns = columns.astype(jnp.float64)

    def row_sums(id_and_row: tuple[jax.Array, jax.Array]) -> jax.Array:
        row_id, row = id_and_row
        similarity = columns @ row.astype(jnp.float64)
        d_logits, loss = _terms(scale * similarity + bias, column_ids == row_id)
        return jnp.stack([loss.sum(), d_logits @ similarity, d_logits.sum()])

    return lax.map(row_sums, (ids, own), batch_size=max(1, _PAIRS // len(columns)))


def _terms(logits: jax.Array, positive: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the gradient of each pair's logit, and its loss term."""
    sign = jnp.where(positive, -1.0, 1.0)
    return sign * jax.nn.sigmoid(sign * logits), jax.nn.softplus(sign * logits)


def _gradient_of_rows(
    own: jax.Array, other: jax.Array, scale: jax.Array, bias: jax.Array, rows: Array, ids: jax.Array
) -> jax.Array:
    """Compute the float64 `[samples, D]` gradients of the sampled rows of `own`."""
    b, columns = len(own), other.astype(jnp.float64)
    logits = scale * own[rows].astype(jnp.float64) @ columns.T + bias
    d_logits, _ = _terms(logits, ids[None, :] == ids[rows][:, None])
    return scale / b * d_logits @ columns
