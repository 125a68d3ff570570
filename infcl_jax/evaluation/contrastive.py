"""Contrastive loss of a split, as one batch or in batches."""

import functools

import jax
import numpy as np
from jax.sharding import Mesh

from infcl_jax.inference.features import shard_rows
from infcl_jax.losses import clip_loss
from infcl_jax.runtime.mesh import replicate, to_host

_MAX_BATCHES = 16  # bounds the time of `batch_loss` at small batch sizes


def split_loss(
    image: np.ndarray, text: np.ndarray, logit_scale: float, mesh: Mesh, implementation: str | None = None
) -> float:
    """Compute the exact symmetric contrastive loss over a whole split.

    Every other sample of the split is a negative. Unlike a mean over evaluation batches, the loss does not depend on
    the batch size, so it compares runs trained with different batch sizes. Its chance level is the logarithm of the
    size of the split. The loss is CLIP's (arXiv:2103.00020, figure 3).

    Examples:
      >>> round(split_loss(np.asarray(image), np.asarray(text), 14.3, mesh), 2)
      0.39

    Args:
        image: [N, D] normalized image features, the same on every process; row i and row i of `text` are a pair.
        text: [N, D] normalized text features.
        logit_scale: factor of the similarities, the exponential of the model's logit scale parameter.
        mesh: mesh with an axis "data", over which the pairs are sharded.
        implementation: backend of `clip_loss`.

    Returns:
        The mean loss of both directions in nats, the same on every process.

    Raises:
        ValueError: the features differ in shape, are not [N, D], or are empty.
    """
    if image.ndim != 2 or image.shape != text.shape or 0 in image.shape:
        raise ValueError(f"expected image and text features of one shape [N, D], got {image.shape} and {text.shape}")
    mask = shard_rows(mesh, np.ones(len(image), np.bool_), fill=False)
    rows = (shard_rows(mesh, np.asarray(features, np.float32)) for features in (image, text))
    scale = replicate(mesh, np.asarray(logit_scale, np.float32))
    return float(to_host(_loss(*rows, scale, mask, mesh=mesh, implementation=implementation)))


def batch_loss(
    image: np.ndarray,
    text: np.ndarray,
    logit_scale: float,
    mesh: Mesh,
    batch_size: int,
    implementation: str | None = None,
) -> float:
    """Compute the mean contrastive loss of batches of a split.

    It is comparable with the training loss of the same batch size. At most 16 batches are drawn without replacement
    from the split, the same at every call.

    Examples:
      >>> loss = batch_loss(np.asarray(image), np.asarray(text), 14.3, mesh, batch_size=8)
      >>> round(loss, 2)
      0.39

    Args:
        image: [N, D] normalized image features, see `split_loss`.
        text: [N, D] normalized text features.
        logit_scale: factor of the similarities.
        mesh: mesh with an axis "data".
        batch_size: pairs per batch, over all devices, at most N.
        implementation: backend of `clip_loss`.

    Returns:
        The mean loss in nats, the same on every process.

    Raises:
        ValueError: `batch_size` is not in [1, N], or the features are wrong, see `split_loss`.
    """
    if not 1 <= batch_size <= len(image):
        raise ValueError(f"expected 1 <= batch_size <= {len(image)} pairs of the split, got {batch_size}")
    order = np.random.default_rng(0).permutation(len(image))
    batches = order[: len(order) // batch_size * batch_size].reshape(-1, batch_size)[:_MAX_BATCHES]
    losses = [split_loss(image[rows], text[rows], logit_scale, mesh, implementation) for rows in batches]
    return float(np.mean(losses))


@functools.partial(jax.jit, static_argnames=("mesh", "implementation"))
def _loss(
    image: jax.Array, text: jax.Array, scale: jax.Array, mask: jax.Array, *, mesh: Mesh, implementation: str | None
) -> jax.Array:
    return clip_loss(image, text, scale, mesh=mesh, mask=mask, implementation=implementation)
