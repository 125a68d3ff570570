"""Float64 references of the losses, with their feature gradients at sampled rows.

They run on the devices, a few rows at a time, and share no code with `infcl_jax.losses` and `infcl_jax.ops`. The
gradient of one row needs statistics of all rows and columns, which sweeps over all pairs compute.
"""

from collections.abc import Callable
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
    """Loss and gradients, float64 on the host.

    Attributes:
      loss: scalar.
      image: `[samples, D]` gradients of the image features at the sampled rows.
      text: `[samples, D]` gradients of the text features at the sampled rows.
      scale: gradient of the logit scale, scalar.
      bias: gradient of the logit bias, scalar; None without one.
    """

    loss: Array
    image: Array
    text: Array
    scale: Array
    bias: Array | None = None


class _Side(NamedTuple):
    """Features `[n, D]` of images or texts, and what decides the target: ids `[n]` or a teacher's features."""

    features: jax.Array
    target: jax.Array


class _Statistics(NamedTuple):
    """Statistics of each row, float64 `[b]`.

    Attributes:
      lse: log-sum-exp of the logits.
      target_lse: log-sum-exp of the target's logits.
      loss: divergence of the softmax from the target, or the cross-entropy.
      d_scale: derivative of `loss` by the logit scale.
    """

    lse: jax.Array
    target_lse: jax.Array
    loss: jax.Array
    d_scale: jax.Array


def clip(
    mesh: Mesh,
    image: jax.Array,
    text: jax.Array,
    scale: jax.Array,
    rows: np.ndarray,
    ids: jax.Array | None = None,
    multi_positive: str = "mean",
) -> Gradients:
    """Compute the CLIP loss and its gradients at `rows`; without ids, the positives are the pairs."""
    is_any = multi_positive == "any"

    def target_logits(logits: jax.Array, own: jax.Array, other: jax.Array) -> jax.Array:
        return jnp.where(other == own, logits * float(is_any), -jnp.inf)

    def gradients(image: jax.Array, text: jax.Array, scale: jax.Array, ids: jax.Array, rows: jax.Array) -> Gradients:
        return _softmax(mesh, _Side(image, ids), _Side(text, ids), scale, rows, target_logits, divergence=is_any)

    return _on_host(mesh, gradients, image, text, scale, _known(mesh, ids, len(image)), rows)


def distillation(
    mesh: Mesh,
    image: jax.Array,
    text: jax.Array,
    scale: jax.Array,
    rows: np.ndarray,
    teacher: tuple[jax.Array, jax.Array, jax.Array],
) -> Gradients:
    """Compute the distillation loss and its gradients at `rows`.

    `teacher` has image and text features `[b, Dt]` of the teacher, and its logit scale.
    """

    def gradients(image: jax.Array, text: jax.Array, scale: jax.Array, teacher: tuple, rows: jax.Array) -> Gradients:
        def target_logits(logits: jax.Array, own: jax.Array, other: jax.Array) -> jax.Array:
            return teacher[2].astype(jnp.float64) * other @ own

        sides = _Side(image, teacher[0]), _Side(text, teacher[1])
        return _softmax(mesh, *sides, scale, rows, target_logits, divergence=True)

    return _on_host(mesh, gradients, image, text, scale, teacher, rows)


def siglip(
    mesh: Mesh,
    image: jax.Array,
    text: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    rows: np.ndarray,
    ids: jax.Array | None = None,
) -> Gradients:
    """Compute the sigmoid loss and its gradients at `rows`; without ids, the positives are the pairs."""

    def gradients(
        image: jax.Array, text: jax.Array, scale: jax.Array, bias: jax.Array, ids: jax.Array, rows: jax.Array
    ) -> Gradients:
        scale, bias = scale.astype(jnp.float64), bias.astype(jnp.float64)

        def terms(row: _Side, columns: _Side) -> tuple[jax.Array, jax.Array, jax.Array]:
            """Return similarity, loss and gradient of the logit of each pair."""
            similarity = columns.features @ row.features
            sign = jnp.where(columns.target == row.target, -1.0, 1.0)
            margin = sign * (scale * similarity + bias)
            return similarity, jax.nn.softplus(margin), sign * jax.nn.sigmoid(margin)

        def sums(row: _Side, columns: _Side) -> jax.Array:
            similarity, loss, d_logits = terms(row, columns)
            return jnp.stack([loss.sum(), d_logits @ similarity, d_logits.sum()])

        def features(own: _Side, other: _Side) -> jax.Array:
            *_, d_logits = _at_rows(terms, own, other, rows)
            return scale / len(own.features) * d_logits @ other.features.astype(jnp.float64)

        images, texts = _Side(image, ids), _Side(text, ids)
        loss, d_scale, d_bias = _sweep(mesh, sums, images, texts).mean(0)
        return Gradients(loss, features(images, texts), features(texts, images), d_scale, d_bias)

    return _on_host(mesh, gradients, image, text, scale, bias, _known(mesh, ids, len(image)), rows)


def relative_errors(mesh: Mesh, results: tuple, exact: Gradients, rows: np.ndarray) -> dict[str, float]:
    """Compute the relative errors of a loss and its gradients.

    An error is the Euclidean norm of the difference from the reference, divided by the norm of the reference.

    Args:
      mesh: devices.
      results: `(loss, (image, text, *scalars))` from `jax.value_and_grad`, over the whole batch.
      exact: reference values.
      rows: int `[samples]` sampled rows.

    Returns:
      Errors by the names of the reference values: "loss", "image", "text", "scale".
    """

    def sampled(loss: jax.Array, gradients: tuple) -> tuple:
        image, text, *scalars = gradients
        return loss, image[rows], text[rows], *scalars

    got = jax.jit(sampled, out_shardings=NamedSharding(mesh, _REPLICATED))(*results)
    known = {name: value for name, value in exact._asdict().items() if value is not None}
    return {
        name: float(np.linalg.norm(np.asarray(value, np.float64) - expected) / np.linalg.norm(expected))
        for (name, expected), value in zip(known.items(), got, strict=True)
    }


def _softmax(
    mesh: Mesh,
    image: _Side,
    text: _Side,
    scale: jax.Array,
    rows: jax.Array,
    target_logits: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
    divergence: bool,
) -> Gradients:
    """Compute the mean loss of rows and columns against the softmax of `target_logits(logits, own, other)`.

    The loss is the Kullback-Leibler divergence from the target, or else the cross-entropy, which includes the target's
    entropy. With the positives' own logits as the target, the divergence is that of several positives with "any".
    """
    scale = scale.astype(jnp.float64)

    def logits(row: _Side, columns: _Side) -> tuple[jax.Array, jax.Array]:
        own = scale * columns.features @ row.features
        return own, target_logits(own, row.target, columns.target)

    def statistics(row: _Side, columns: _Side) -> _Statistics:
        z, t = logits(row, columns)
        lse, target_lse = jax.nn.logsumexp(z), jax.nn.logsumexp(t)
        q, p = jnp.exp(z - lse), jnp.exp(t - target_lse)
        entropy = target_lse - p @ jnp.where(p > 0, t, 0.0) if divergence else 0.0
        return _Statistics(lse, target_lse, lse - p @ z - entropy, (q - p) @ z / scale)

    def features(own: _Side, other: _Side, of_own: _Statistics, of_other: _Statistics) -> jax.Array:
        z, t = _at_rows(logits, own, other, rows)
        q = jnp.exp(z - of_own.lse[rows][:, None]) + jnp.exp(z - of_other.lse[None])
        p = jnp.exp(t - of_own.target_lse[rows][:, None]) + jnp.exp(t - of_other.target_lse[None])
        return scale / len(own.features) / 2 * (q - p) @ other.features.astype(jnp.float64)

    row, column = _sweep(mesh, statistics, image, text), _sweep(mesh, statistics, text, image)
    return Gradients(
        loss=(row.loss + column.loss).mean() / 2,
        image=features(image, text, row, column),
        text=features(text, image, column, row),
        scale=(row.d_scale + column.d_scale).mean() / 2,
    )


def _float64(side: _Side) -> _Side:
    return jax.tree.map(lambda a: a.astype(jnp.float64) if jnp.issubdtype(a.dtype, jnp.floating) else a, side)


def _sweep(mesh: Mesh, function: Callable[[_Side, _Side], Any], own: _Side, other: _Side) -> Any:
    """Apply `function(row, columns)` to each row of `own`, on its device."""

    def local(own: _Side, other: _Side) -> Any:
        columns = _float64(jax.tree.map(lambda a: lax.all_gather(a, DATA_AXIS, tiled=True), other))
        batch_size = max(1, _PAIRS // len(columns.features))
        return lax.map(lambda row: function(_float64(row), columns), own, batch_size=batch_size)

    return jax.shard_map(local, mesh=mesh, in_specs=_SHARDED, out_specs=_SHARDED)(own, other)


def _at_rows(function: Callable[[_Side, _Side], Any], own: _Side, other: _Side, rows: jax.Array) -> Any:
    """Apply `function(row, columns)` to the sampled rows of `own` at once."""
    sampled, columns = _float64(jax.tree.map(lambda a: a[rows], own)), _float64(other)
    return jax.vmap(lambda row: function(row, columns))(sampled)


def _known(mesh: Mesh, ids: jax.Array | None, rows: int) -> jax.Array:
    """Return the ids, or those of pairs that are their own positives."""
    return jax.device_put(np.arange(rows, dtype=np.int32), NamedSharding(mesh, _SHARDED)) if ids is None else ids


def _on_host(mesh: Mesh, gradients: Callable[..., Gradients], *arrays: Any) -> Gradients:
    with jax.enable_x64(True):
        results = jax.jit(gradients, out_shardings=NamedSharding(mesh, _REPLICATED))(*arrays)
        return jax.tree.map(np.asarray, results)
